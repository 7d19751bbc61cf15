#!/usr/bin/env python3
"""Use docs/paper.html and docs/slides.html in a headless Chromium as a reader would, and say what was seen.

    python3 scripts/paper_browser.py [--screenshots DIR]

Exit status 0: everything was as it should be, or there is no Chromium (a line says so).
Needs Python's standard library and chromium.
"""
import base64
import os
import re
import shutil
import sys
import tempfile

import explore_browser
from explore_browser import expect

PAPER, SLIDES = ("file://" + os.path.abspath(path) for path in ("docs/paper.html", "docs/slides.html"))
LEAST = 4.5  # contrast of text
A4 = 688     # pixels of the printed width
LETTERS = {1920: 20, 360: 11}  # pixels of the smallest text of a slide, by the window's width

# The texts of the page whose contrast with what is behind them is too small. A picture's text may stand on a shape of the picture.
FAINT = """(() => {
  const channels = color => (color.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const light = rgb => rgb.slice(0, 3).map(v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, n) => sum + v * [.2126, .7152, .0722][n], 0);
  const contrast = (a, b) => { const [x, y] = [light(a), light(b)].sort((m, n) => n - m); return (x + .05) / (y + .05); };
  const behind = element => {
    for (let e = element; e; e = e.parentElement) {
      const rgb = channels(getComputedStyle(e).backgroundColor);
      if (rgb.length < 4 || rgb[3] > 0) return rgb;
    }
    return [255, 255, 255];
  };
  const shapeBehind = text => {
    const box = text.getBoundingClientRect(), x = box.x + box.width / 2, y = box.y + box.height / 2;
    const inside = s => s.isPointInFill(new DOMPoint(x, y).matrixTransform(s.getScreenCTM().inverse()));
    const under = [...text.ownerSVGElement.querySelectorAll('rect, path, circle')].filter(s => text.compareDocumentPosition(s) & 2
      && getComputedStyle(s).fill !== 'none' && +(s.getAttribute('fill-opacity') || 1) > .5 && inside(s));
    return under.length ? channels(getComputedStyle(under[under.length - 1]).fill) : behind(text.ownerSVGElement.parentElement);
  };
  const faint = new Set();
  for (const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT); walker.nextNode();) {
    const node = walker.currentNode, e = node.parentElement, style = getComputedStyle(e);
    if (!node.data.trim() || e.closest('script, title')) continue;
    const ratio = e.ownerSVGElement ? contrast(channels(style.fill), shapeBehind(e)) : contrast(channels(style.color), behind(e));
    if (ratio < LEAST) faint.add(`${ratio.toFixed(2)} ${e.tagName}.${e.className.baseVal ?? e.className} ${node.data.trim().slice(0, 30)}`);
  }
  return [...faint].slice(0, 8).join('; ');
})()""".replace("LEAST", str(LEAST))

# The formulas whose row is no row: where a browser does not know MathML, its parts stand below one another.
STACKED = "[...document.querySelectorAll('.formula > div')].filter(row => row.getBoundingClientRect().height > 70).length"


# What is cut off on the slide that is shown, and its smallest letters in pixels: of text, and of pictures as they are scaled.
CUT = """[...document.querySelectorAll('.current, .current > *')].filter(e => e.scrollHeight > e.clientHeight + 1 && e.clientHeight > 0
  || e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0).map(e => document.querySelector('.current').id + ' ' + e.tagName + '.' + e.className).join()"""
SMALLEST = """Math.min(...[...document.querySelectorAll('.current .say, .current td, .current > pre, .current dd, .current .more')]
  .map(e => parseFloat(getComputedStyle(e).fontSize)), ...[...document.querySelectorAll('.current svg')].map(s => 20 * s.getScreenCTM().a))"""


def go(b, address, page=PAPER, ready="step"):
    b.call("Page.navigate", url="about:blank")
    b.call("Page.navigate", url=page + address)
    b.wait(f"document.readyState === 'complete' && typeof {ready} === 'function'")


def press(b, key):
    for kind in ("keyDown", "keyUp"):
        b.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode={"ArrowRight": 39, "ArrowLeft": 37, "Home": 36, "End": 35, "Enter": 13}.get(key, ord(key[0].upper())))


def at_top(b, name):
    return b.js(f"Math.abs(document.getElementById('{name}').getBoundingClientRect().top) < 20")


def schemes(b, name, pictures):
    """In both colour schemes everything can be read."""
    for scheme in ("light", "dark"):
        b.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        faint = b.js(FAINT)
        expect(f"{name} have a contrast of {LEAST} at least, {scheme}", faint == "", faint)
        if pictures:
            b.picture(os.path.join(pictures, f"{name.replace(' ', '-')}-{scheme}.png"))


def visit_paper(b, pictures):
    b.size(1400, 1000)
    go(b, "#A.3-dtoc")
    expect("a short address goes to the first station that begins so", at_top(b, "A.3-dtoc-p"), b.js("location.hash"))
    press(b, "j")
    expect("j goes to the next station", at_top(b, "A.3-ctod-p"), b.js("location.hash"))
    press(b, "ArrowLeft"), press(b, "k")
    expect("the arrow and k go back", at_top(b, "A.3-gtoc-p"), b.js("location.hash"))
    press(b, "ArrowRight")
    expect("the arrow goes on", at_top(b, "A.3-dtoc-p"), b.js("location.hash"))
    b.js("document.querySelector('a[href=\"#A.3-dtoc\"]').click()")
    b.wait("location.hash === '#A.3-dtoc-p'")
    expect("so does a link with a short address", at_top(b, "A.3-dtoc-p"), b.js("location.hash"))
    go(b, "#A.3-dtoc-g")
    cuts = b.js("[...document.querySelectorAll('[id=\"A.3-dtoc-g\"] .code i')].map(i =>"
                " i.textContent.trim().split('line ')[1] + ' ' + i.nextElementSibling.style.counterSet.split(' ')[1]).join('; ')")
    expect("a cut in the code has the number of the next line", cuts != "" and all(len(set(c.split())) == 1 for c in cuts.split("; ")), cuts)
    go(b, "#figure-4")
    expect("a whole address goes to its station", at_top(b, "figure-4"))
    columns = b.js("[...document.querySelectorAll('#figure-4 .column')].map(c => Math.round(c.getBoundingClientRect().top)).join()")
    expect("mini.c and the engine stand side by side", len(set(columns.split(","))) == 1, columns)
    expect("every formula is a row", b.js(STACKED) == 0, b.js(STACKED))
    expect("nothing is asked of a network", b.js("document.querySelectorAll('[src], link').length") == 0)
    schemes(b, "texts", pictures)
    for width in (360, 800):
        b.size(width, 740)
        wide = b.js("document.documentElement.scrollWidth")
        expect(f"{width} px have no sideways scroll", wide <= width, wide)
    b.size(A4, 1000)
    b.call("Emulation.setEmulatedMedia", media="print")
    cut = b.js("[...document.querySelectorAll('pre, .formula, .wide')].filter(e => e.scrollWidth > e.clientWidth + 1 || e.scrollHeight > e.clientHeight + 1)"
               ".map(e => (e.closest('.station') || {}).id + ' ' + e.className).join('; ')")
    expect("nothing is cut off in print", cut == "", cut)
    b.call("Emulation.setEmulatedMedia", media="")


def visit_slides(b, pictures):
    b.size(1920, 1080)
    go(b, "", SLIDES, "show")
    count = b.js("slides.length")
    at = lambda: b.js("slides.indexOf(document.querySelector('.current')) + 1")
    for key, slide in (("ArrowRight", 2), ("End", count), ("ArrowLeft", count - 1), ("Home", 1)):
        press(b, key)
        expect(f"{key} goes to slide {slide}", at() == slide, at())
    press(b, "1"), press(b, "3"), press(b, "Enter")
    expect("a number and Enter go to that slide", at() == 13 and b.js("location.hash.slice(1) === slides[12].id"), at())
    press(b, "o")
    expect("o shows all slides, and the current one has the focus", b.js("!contents.hidden && document.activeElement.hash === '#' + slides[12].id"
                                                                       f" && contents.querySelectorAll('a').length === {count}"))
    b.js("contents.querySelectorAll('a')[3].click()")
    b.wait("contents.hidden")
    expect("one of them leads to its slide", at() == 4, at())
    press(b, "n")
    expect("n shows what to say", b.js("getComputedStyle(document.querySelector('.current aside')).display") == "block")
    press(b, "n")
    go(b, "#theorem", SLIDES, "show")
    expect("an address goes to its slide", b.js("document.querySelector('.current').id") == "theorem")
    unnamed = b.js("[...document.querySelectorAll('.slide')].filter(s => !document.getElementById(s.getAttribute('aria-labelledby')).textContent.trim()).length"
                   " + [...document.querySelectorAll('button')].filter(b => !(b.ariaLabel || b.textContent.trim())).length"
                   " + [...document.querySelectorAll('svg')].filter(s => !s.getAttribute('aria-label')).length")
    expect("slides, buttons and pictures have names", unnamed == 0, unnamed)
    for width, height in ((1920, 1080), (1280, 720), (360, 740)):
        b.size(width, height)
        cut, small = [], {}
        for n in range(count):
            b.js(f"show({n})")
            cut.append(b.js(CUT) if width > 360 else b.js("document.documentElement.scrollWidth > innerWidth ? document.querySelector('.current').id : ''"))
            small[b.js("document.querySelector('.current').id")] = b.js(SMALLEST)
        expect(f"{width} px: nothing is cut off", not any(cut), "; ".join(filter(None, cut)))
        if width in LETTERS:
            below = {name: round(size, 1) for name, size in small.items() if size < LETTERS[width]}
            expect(f"{width} px: letters of {LETTERS[width]} px at least", not below, below)
    b.js("document.body.classList.remove('deck')")  # all slides, as without a script
    schemes(b, "slides", pictures)
    b.js("document.body.classList.add('deck')")
    pdf = base64.b64decode(b.call("Page.printToPDF", preferCSSPageSize=True, printBackground=True)["data"])
    printed = len(re.findall(rb"/Type\s*/Page\b", pdf))
    expect("print has a page for each slide", printed == count, f"{printed} for {count}")
    expect("nothing is asked of a network", b.js("document.querySelectorAll('[src], link').length") == 0)


def main():
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    if not binary:
        return print("paper_browser.py: skipped: no chromium")
    pictures = sys.argv[sys.argv.index("--screenshots") + 1] if "--screenshots" in sys.argv else None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        browser = explore_browser.Browser(binary, directory)
        try:
            visit_paper(browser, pictures)
            visit_slides(browser, pictures)
            expect("no error on the console", not browser.errors, "; ".join(browser.errors))
        finally:
            browser.process.terminate(), browser.process.wait()
    sys.exit(explore_browser.failures > 0)


if __name__ == "__main__":
    main()
