#!/usr/bin/env python3
"""Use docs/paper.html in a headless Chromium as a reader would, and say what was seen.

    python3 scripts/paper_browser.py [--screenshots DIR]

Exit status 0: everything was as it should be, or there is no Chromium (a line says so).
Needs Python's standard library and chromium.
"""
import os
import shutil
import sys
import tempfile

import explore_browser
from explore_browser import expect

PAGE = "file://" + os.path.abspath("docs/paper.html")
LEAST = 4.5  # contrast of text
A4 = 688     # pixels of the printed width

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


def go(b, address):
    b.call("Page.navigate", url="about:blank")
    b.call("Page.navigate", url=PAGE + address)
    b.wait("document.readyState === 'complete' && typeof step === 'function'")


def press(b, key):
    for kind in ("keyDown", "keyUp"):
        b.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode={"ArrowRight": 39, "ArrowLeft": 37}.get(key, ord(key[0].upper())))


def at_top(b, name):
    return b.js(f"Math.abs(document.getElementById('{name}').getBoundingClientRect().top) < 20")


def visit(b, pictures):
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
    for scheme in ("light", "dark"):
        b.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        faint = b.js(FAINT)
        expect(f"texts have a contrast of {LEAST} at least, {scheme}", faint == "", faint)
        if pictures:
            b.picture(os.path.join(pictures, scheme + ".png"))
    for width in (360, 800):
        b.size(width, 740)
        wide = b.js("document.documentElement.scrollWidth")
        expect(f"{width} px have no sideways scroll", wide <= width, wide)
    b.size(A4, 1000)
    b.call("Emulation.setEmulatedMedia", media="print")
    cut = b.js("[...document.querySelectorAll('pre, .formula, .wide')].filter(e => e.scrollWidth > e.clientWidth + 1 || e.scrollHeight > e.clientHeight + 1)"
               ".map(e => (e.closest('.station') || {}).id + ' ' + e.className).join('; ')")
    expect("nothing is cut off in print", cut == "", cut)
    expect("no error on the console", not b.errors, "; ".join(b.errors))


def main():
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    if not binary:
        return print("paper_browser.py: skipped: no chromium")
    pictures = sys.argv[sys.argv.index("--screenshots") + 1] if "--screenshots" in sys.argv else None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        browser = explore_browser.Browser(binary, directory)
        try:
            visit(browser, pictures)
        finally:
            browser.process.terminate(), browser.process.wait()
    sys.exit(explore_browser.failures > 0)


if __name__ == "__main__":
    main()
