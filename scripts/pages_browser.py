#!/usr/bin/env python3
"""Look at every page and drawing in a headless Chromium as visitors do who see little, use no mouse, or print.

    python3 scripts/pages_browser.py [--screenshots DIR]

Every control has a role and a name in the accessibility tree; every text, in a drawing and on a canvas, too, has a contrast of 4.5:1
with what is behind it, in light and dark and in print; no line crosses a number; the first frame shows something; the Tab key goes through all
controls in the order in which they stand, and one sees where it is.

Exit status 0: everything was as it should be, or there is no Chromium (a line says so).
Needs Python's standard library and chromium.
"""
import glob
import os
import re

import browser
from browser import expect

# What is asked behind the name of a page, and when it is ready.
OPENED = {"index": ("", "true"), "paper": ("", "true"),
          "explore": ("#model=opt-30b&frontier=1&hand=1", "typeof answer === 'function' && at('answer').getAttribute('aria-busy') === 'false' && run"
                                                          " && document.querySelectorAll('#plot polyline').length === 2")}
CONTROLS = {"button", "link", "slider", "checkbox", "combobox", "textbox", "spinbutton", "searchbox", "radio", "switch", "tab", "menuitem", "listbox"}
A4 = 688       # pixels of the printed width
PRINTED = {"slides": 1280}  # a page of another size
SMALLEST = 24  # pixels of a control's side, for fingers

# Runs before the scripts of a page: a canvas remembers its texts, and what was behind each before it was written.
CANVAS = """
const written = new Map(), fillText = CanvasRenderingContext2D.prototype.fillText, clearRect = CanvasRenderingContext2D.prototype.clearRect;
CanvasRenderingContext2D.prototype.clearRect = function (x, y, w, h) {
  if (x === 0 && y === 0) written.set(this.canvas, []);
  clearRect.call(this, x, y, w, h);
};
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  const ratio = this.getTransform().a, width = this.measureText(text).width, list = written.get(this.canvas);
  const left = x - {left: 0, center: width / 2, right: width}[this.textAlign];
  const behind = [.15, .5, .85].map(at => [...this.getImageData(Math.round((left + at * width) * ratio), Math.round(y * ratio), 1, 1).data]);
  list.push({text, color: this.fillStyle, behind: behind.map(([r, g, b, a]) => [r, g, b, a / 255])});
  fillText.call(this, text, x, y);
};
"""

# Runs there, too: what asks a page for the contrast of its texts, and for what has the focus.
LOOK = """
const look = (() => {
const LEAST = 4.5;
const channels = color => { const [r, g, b, a = 1] = (color.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number); return [r, g, b, a]; };
const over = (top, below) => [0, 1, 2].map(n => top[n] * top[3] + below[n] * (1 - top[3])).concat(1);
const light = rgb => rgb.slice(0, 3).map(v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
  .reduce((sum, v, n) => sum + v * [.2126, .7152, .0722][n], 0);
const contrast = (a, b) => { const [x, y] = [light(a), light(b)].sort((m, n) => n - m); return (x + .05) / (y + .05); };

/* {color: what is behind an element, by the backgrounds of all around it; share: how much of its own color their opacity leaves}. */
let known = new Map();
function ground(element) {
  if (!element) return {color: [255, 255, 255, 1], share: 1};
  if (!known.has(element)) {
    const {color, share} = ground(element.parentElement), style = getComputedStyle(element);
    known.set(element, {color: over(channels(style.backgroundColor), color), share: share * Number(style.opacity)});
  }
  return known.get(element);
}
function ratioOn(color, element, back) {
  const rgba = channels(color);
  rgba[3] *= ground(element).share;
  return contrast(over(rgba, back), back);
}

/* The box around a part of a path; without end, if it has curves. */
function around(d) {
  let x = 0, y = 0, box = [Infinity, Infinity, -Infinity, -Infinity];
  for (const [, command, numbers] of d.matchAll(/([A-Za-z])([^A-Za-z]*)/g)) {
    const n = (numbers.match(/-?[\d.]+/g) || []).map(Number);
    if (!'MLHVhvz'.includes(command)) return [-Infinity, -Infinity, Infinity, Infinity];
    for (let at = 0; at < n.length; at += 'ML'.includes(command) ? 2 : 1) {
      if ('ML'.includes(command)) [x, y] = [n[at], n[at + 1]];
      else if (command === 'H' || command === 'h') x = n[at] + (command === 'h' ? x : 0);
      else y = n[at] + (command === 'v' ? y : 0);
      box = [Math.min(box[0], x), Math.min(box[1], y), Math.max(box[2], x), Math.max(box[3], y)];
    }
  }
  return box;
}

/* The shapes of a drawing: {whole, its colors, filled(point), lined(point)}. A path that goes to and fro comes in its parts, each with its box,
 * since asking all of it is slow; dashes count as a line. */
const pen = document.createElementNS('http://www.w3.org/1999/xhtml', 'canvas').getContext('2d');
function shapes_of(drawing) {
  return [...drawing.querySelectorAll('rect, path, circle, polyline')].flatMap(whole => {
    const {fill, stroke, fillOpacity, strokeOpacity, opacity, strokeWidth} = getComputedStyle(whole), inverse = whole.getScreenCTM().inverse();
    const look = {whole, fill, fillOpacity, opacity, inverse}, lines = stroke !== 'none' && strokeOpacity >= .5, width = lines ? parseFloat(strokeWidth) : 0;
    const d = whole.getAttribute('d');
    if (!d) return [{...look, filled: at => whole.isPointInFill(at), lined: at => lines && whole.isPointInStroke(at)}];
    return d.split(/(?=M)/).map(d => {
      const [x0, y0, x1, y1] = around(d), path = new Path2D(d);
      const may = at => at.x >= x0 - width && at.x <= x1 + width && at.y >= y0 - width && at.y <= y1 + width;
      return {...look, filled: at => may(at) && pen.isPointInPath(path, at.x, at.y),
        lined: at => lines && may(at) && (pen.lineWidth = width, pen.isPointInStroke(path, at.x, at.y))};
    });
  });
}

/* Of a text of a drawing: the colors behind some points of it, and whether a line goes through it. */
function behind(text, shapes) {
  const box = text.getBBox(), matrix = text.getScreenCTM(), colors = [];
  let struck = false;
  for (const v of [.35, .5, .65]) for (const u of [.08, .29, .5, .71, .92]) {
    const point = new DOMPoint(box.x + u * box.width, box.y + v * box.height).matrixTransform(matrix);
    let color = ground(text.ownerSVGElement).color, line = false;
    let inverse, at;
    for (const shape of shapes) {
      if (shape.inverse !== inverse) inverse = shape.inverse, at = point.matrixTransform(inverse);
      if (shape.fill !== 'none' && shape.filled(at) && text.compareDocumentPosition(shape.whole) & 2) {
        const rgba = channels(shape.fill);
        rgba[3] *= shape.fillOpacity * shape.opacity;
        color = over(rgba, color);
        if (rgba[3] > .9) line = false;
      }
      if (shape.lined(at)) line = true;
    }
    colors.push(color);
    struck ||= line;
  }
  return {colors, struck};
}

function texts() {
  const faint = new Set(), struck = new Set(), root = document.body || document.documentElement;
  let count = 0;
  known = new Map();
  const note = (ratio, e, text) => {
    count++;
    if (!(ratio >= LEAST)) faint.add(`${ratio.toFixed(2)} ${e.tagName.toLowerCase()}.${e.className.baseVal ?? e.className} ${text.trim().slice(0, 30)}`);
  };
  const drawings = new Map();
  for (const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT); walker.nextNode();) {
    const node = walker.currentNode, e = node.parentElement, style = getComputedStyle(e), drawing = e.ownerSVGElement;
    if (!node.data.trim() || e.closest('script, style, title, option, noscript') || !e.checkVisibility()) continue;
    if (!drawing) { note(ratioOn(style.color, e, ground(e).color), e, node.data); continue; }
    if (!drawings.has(drawing)) drawings.set(drawing, shapes_of(drawing));
    const there = behind(e, drawings.get(drawing));
    note(Math.min(...there.colors.map(color => ratioOn(style.fill, e, color))), e, node.data);
    if (there.struck) struck.add(node.data);
  }
  for (const e of root.querySelectorAll('input, select')) {
    if (!e.checkVisibility() || e.type === 'range' || e.type === 'checkbox') continue;
    note(ratioOn(getComputedStyle(e, e.value || !e.placeholder ? null : '::placeholder').color, e, ground(e).color), e, e.id);
  }
  for (const e of root.querySelectorAll('code')) {
    const before = getComputedStyle(e, '::before');
    if (before.content !== 'none') note(ratioOn(before.color, e, ground(e).color), e, 'line numbers');
  }
  for (const [canvas, list] of typeof written === 'undefined' ? [] : written) {
    if (!canvas.checkVisibility()) continue;
    const pixel = document.createElement('canvas').getContext('2d'), back = ground(canvas).color;
    for (const {text, color, behind} of list) {
      pixel.clearRect(0, 0, 1, 1), pixel.fillStyle = color, pixel.fillRect(0, 0, 1, 1);
      const [r, g, b] = pixel.getImageData(0, 0, 1, 1).data;
      note(Math.min(...behind.map(under => contrast([r, g, b], over(under, back)))), canvas, canvas.id + ': ' + text);
    }
  }
  return {count, faint: [...faint], struck: [...struck]};
}

/* What has the focus, and all that is to be known of it. */
function focused() {
  const e = document.activeElement;
  const style = getComputedStyle(e), box = e.getClientRects()[0], x = box.x + Math.min(8, box.width / 2);
  const y = (Math.max(0, box.top) + Math.min(innerHeight, box.bottom)) / 2; // the middle of what the window has of it
  const there = document.elementFromPoint(x, y), name = `${e.tagName.toLowerCase()}#${e.id} ${e.textContent.trim().slice(0, 24)}`;
  const lined = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2 && contrast(channels(style.outlineColor), ground(e.parentElement).color) >= 3;
  return {name, n: tabbable().indexOf(e), x: box.x, y: box.y + scrollY, below: box.bottom + scrollY, lined,
    seen: Boolean(there) && (e.contains(there) || there.contains(e))};
}
const tabbable = () => [...document.querySelectorAll('a[href], button, input, select, textarea, summary, [tabindex]')]
  .filter(e => e.checkVisibility() && !e.disabled && e.tabIndex >= 0);
return {texts, focused, tabbable, channels};
})();
"""

HEADINGS = "[...document.querySelectorAll('h1, h2, h3, h4, h5, h6')].filter(h => h.checkVisibility()).map(h => [Number(h.tagName[1]), h.textContent])"
CUT_OFF = """[...document.querySelectorAll('pre, .formula, .wide, table, canvas, svg')].filter(e => e.checkVisibility())
  .filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth || e.scrollHeight > e.clientHeight + 1 && e.clientHeight || e.getBoundingClientRect().right > WIDTH + 1)
  .map(e => e.tagName + ' ' + e.textContent.trim().slice(0, 20)).join('; ')"""
SMALL = """[...document.querySelectorAll('button, select, input')].filter(e => e.checkVisibility() && e.type !== 'range' && !e.disabled)
  .map(e => [e, (e.type === 'checkbox' ? e.closest('label') : e).getBoundingClientRect()]).filter(([e, box]) => Math.min(box.width, box.height) < LEAST)
  .map(([e]) => e.id).join('; ')"""
# Boxes whose middle is not that of the first line of their text.
ASIDE = """[...document.querySelectorAll('input[type=checkbox]')].filter(e => e.checkVisibility()).filter(e => {
  const range = document.createRange(), box = e.getBoundingClientRect();
  range.selectNodeContents(e.nextSibling);
  const line = range.getClientRects()[0];
  return Math.abs(box.y + box.height / 2 - line.y - line.height / 2) > 3 || line.x < box.right;
}).map(e => e.id).join('; ')"""
# Of a grid of squares: the shares of those that are done and to come; of its lanes: what is drawn left and right of now.
FRAME = """(() => {
  const pixels = id => { const canvas = at(id); return canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height); };
  const is = (data, n, color) => color.every((v, m) => Math.abs(data[n + m] - v) < 4) && data[n + 3] > 250;
  const named = name => { const e = document.body.appendChild(document.createElement('i')); e.style.color = `var(--${name})`;
    const rgb = look.channels(getComputedStyle(e).color).slice(0, 3); e.remove(); return rgb; };
  const squares = pixels('squares'), counts = {};
  for (const name of ['empty', 'done', 'sweep', 'now']) {
    counts[name] = 0;
    for (let n = 0; n < squares.data.length; n += 4) counts[name] += is(squares.data, n, named.cache?.[name] ?? ((named.cache ??= {})[name] = named(name)));
  }
  const all = Object.values(counts).reduce((a, b) => a + b, 0), lanes = pixels('lanes'), left = [0, 0], scale = lanes.width / at('lanes').clientWidth;
  const now = (96 + (at('lanes').clientWidth - 96) * .6) * scale;
  for (let y = 0; y < lanes.height; y += 2) for (let x = Math.ceil(96 * scale); x < lanes.width; x += 2) {
    const n = 4 * (y * lanes.width + x), [r, g, b] = lanes.data.slice(n, n + 3);
    if (lanes.data[n + 3] > 60 && Math.max(r, g, b) - Math.min(r, g, b) > 40) left[Number(x > now + 3 * scale)] += x < now - 3 * scale || x > now + 3 * scale;
  }
  return {done: (counts.done + counts.sweep + counts.now) / all, come: counts.empty / all, before: left[0], after: left[1]};
})()"""


def few(things):
    things = list(things)
    return "; ".join(map(str, things[:6])) + (f"; {len(things) - 6} more" if len(things) > 6 else "")


def check_texts(b, where):
    seen = b.js("look.texts()")
    expect(f"{where}: texts have a contrast of 4.5 at least", seen["count"] > 0 and not seen["faint"], few(seen["faint"]) or f"{seen['count']} texts")
    expect(f"{where}: no line goes through a text", not seen["struck"], few(seen["struck"]))


def check_tree(b, where):
    """What a screen reader is told."""
    nameless, again, names, count = [], [], set(), 0
    for node in b.call("Accessibility.getFullAXTree")["nodes"]:
        role, name = node.get("role", {}).get("value", ""), node.get("name", {}).get("value", "").strip()
        focusable = any(p["name"] == "focusable" and p["value"]["value"] for p in node.get("properties", []))
        if node.get("ignored") or role in ("RootWebArea", "StaticText", "InlineTextBox", "MenuListPopup", "option", "MenuListOption"):
            continue
        if role in CONTROLS or focusable or role in ("image", "img"):
            count += 1
            if not re.search(r"\w", name) or role in ("generic", "none", "paragraph", ""):
                nameless.append(f"{role} {name!r}")
        if role in CONTROLS - {"link"}:
            if (role, name) in names:
                again.append(f"{role} {name!r}")
            names.add((role, name))
    expect(f"{where}: what can be used or looked at has a role and a name", count > 0 and not nameless, few(nameless) or f"{count} have")
    expect(f"{where}: no two controls have one name", not again, few(again))


def check_page(b, where):
    """What the page says of itself."""
    levels = b.js(HEADINGS)
    skips = [text for (before, _), (level, text) in zip(levels, levels[1:]) if level > before + 1]
    expect(f"{where}: one h1 comes first, and headings leave out no level", [n for n, _ in levels].count(1) == 1 and levels[0][0] == 1 and not skips, few(skips))
    said = b.js("[document.documentElement.lang, document.title, document.querySelectorAll('main').length].join()")
    aside = b.js(ASIDE)
    expect(f"{where}: a box stands beside its text", aside == "", aside)
    expect(f"{where}: it has a language, a title and one main part", re.fullmatch("en,.{8,},1", said) is not None, said)


def check_focus(b, where):
    """From the top with the Tab key to the end."""
    b.js("scrollTo(0, 0), document.body.tabIndex = -1, document.body.focus(), document.body.removeAttribute('tabindex')")
    number, stops = b.js("look.tabbable().length"), []
    for _ in range(number):
        b.press("Tab")
        stops.append(b.js("look.focused()"))
    order = [stop["n"] for stop in stops]
    expect(f"{where}: the Tab key goes through all controls in their order", number > 0 and order == list(range(number)), f"{number} stops" if order == list(range(number)) else order[:12])
    back = [b_["name"] for a, b_ in zip(stops, stops[1:]) if b_["below"] < a["y"] and b_["x"] <= a["x"]]
    expect(f"{where}: it never goes up without going to the right", not back, few(back))
    expect(f"{where}: what has the focus is not hidden", all(s["seen"] for s in stops), few(s["name"] for s in stops if not s["seen"]))
    expect(f"{where}: what has the focus has an outline", all(s["lined"] for s in stops), few(s["name"] for s in stops if not s["lined"]))


def check_first_frame(b, where):
    frame = b.js(FRAME)
    expect(f"{where}: the first frame shows squares that are done and some to come", min(frame["done"], frame["come"]) > .1, frame)
    expect(f"{where}: the first frame shows lanes before and after now", min(frame["before"], frame["after"]) > 50, frame)


def check_still(b, where):
    picture = "[...document.querySelectorAll('canvas')].map(c => c.toDataURL()).join() + document.getAnimations().length"
    before = b.js(picture)
    b.js("new Promise(done => setTimeout(done, 300))")
    expect(f"{where}: nothing moves by itself", before.endswith("0") and b.js(picture) == before)


def check_print(b, where, width):
    b.size(width, 1000)
    b.media("print", prefers_color_scheme="dark")
    b.js("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    cut = b.js(CUT_OFF.replace("WIDTH", str(width)))
    expect(f"{where}, in print: nothing is cut off", cut == "", cut)
    there = b.js("[...document.querySelectorAll('button, select, input')].filter(e => e.checkVisibility()).map(e => e.id).join('; ')")
    expect(f"{where}, in print: no control is printed", there == "", there)
    check_texts(b, f"{where}, in print")
    b.media()


def visit_page(b, path, pictures):
    name = os.path.basename(path)[:-5]
    address, ready = OPENED.get(name, ("", "true"))
    where = name + ".html"
    b.size(1280, 900), b.media(prefers_reduced_motion="reduce")
    b.open("file://" + os.path.abspath(path) + address, ready)
    check_page(b, where)
    check_tree(b, where)
    check_still(b, where)
    check_focus(b, where)
    if b.js("document.getElementById('squares') !== null"):
        check_first_frame(b, where)
        b.size(360, 740)
        check_focus(b, f"{where}, 360 px")
    for scheme, width in (("light", 1280), ("dark", 360)):
        b.media(prefers_color_scheme=scheme)
        b.size(width, 900)
        b.js("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        check_texts(b, f"{where}, {scheme}, {width} px")
        if pictures:
            b.picture(os.path.join(pictures, f"{name}-{scheme}-{width}.png"))
    for width in (360, 800):
        b.size(width, 900)
        wide, small = b.js("document.documentElement.scrollWidth"), b.js(SMALL.replace("LEAST", str(SMALLEST)))
        expect(f"{where}: {width} px have no sideways scroll", wide <= width, wide)
        expect(f"{where}: {width} px have no control that is too small for a finger", small == "", small)
    check_print(b, where, PRINTED.get(name, A4))
    if name == "slides":
        b.size(1280, 900)
        b.js("document.body.classList.remove('deck')")  # all of them, as without a script
        check_tree(b, f"{where}, all slides")
        for scheme in ("light", "dark"):
            b.media(prefers_color_scheme=scheme)
            check_texts(b, f"{where}, all slides, {scheme}")
    if name == "explore":
        b.size(1280, 900)
        b.js("at('s').value = 3000, answer()")
        b.wait("!at('refused').hidden")
        check_texts(b, f"{where}, with a question that is refused")


def visit(b, pictures):
    b.call("Accessibility.enable")
    b.call("Page.addScriptToEvaluateOnNewDocument", source=CANVAS + LOOK)
    for path in sorted(glob.glob("docs/*.html")):
        visit_page(b, path, pictures)
    b.size(1280, 900)
    for path in sorted(glob.glob("docs/**/*.svg", recursive=True) + glob.glob("results/**/*.svg", recursive=True)):
        for scheme in ("light", "dark"):
            b.media(prefers_color_scheme=scheme)
            b.open("file://" + os.path.abspath(path))
            check_texts(b, f"{path}, {scheme}")
    expect("no error on the console", not b.errors, "; ".join(b.errors))


if __name__ == "__main__":
    browser.run(visit)
