#!/usr/bin/env python3
"""Use docs/slides.html in a headless Chromium as somebody who gives a lecture, and say what was seen.

    python3 scripts/slides_browser.py [--screenshots DIR]

scripts/pages_browser.py looks at the contrast and the names of all slides.
Exit status 0: everything was as it should be, or there is no Chromium (a line says so).
Needs Python's standard library and chromium.
"""
import base64
import os
import re

import browser
from browser import expect

PAGE = "file://" + os.path.abspath("docs/slides.html")
LETTERS = {1920: 20, 360: 11}  # pixels of the smallest text of a slide, by the window's width

# What is cut off on the slide that is shown, and its smallest letters in pixels: of text, and of pictures as they are scaled.
CUT = """[...document.querySelectorAll('.current, .current > *')].filter(e => e.scrollHeight > e.clientHeight + 1 && e.clientHeight > 0
  || e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0).map(e => document.querySelector('.current').id + ' ' + e.tagName + '.' + e.className).join()"""
SMALLEST = """Math.min(...[...document.querySelectorAll('.current .say, .current td, .current > pre, .current dd, .current .more')]
  .map(e => parseFloat(getComputedStyle(e).fontSize)), ...[...document.querySelectorAll('.current svg')].map(s => 20 * s.getScreenCTM().a))"""


def go(b, address):
    b.open(PAGE + address, "typeof show === 'function'")


def visit(b, pictures):
    b.size(1920, 1080)
    go(b, "")
    count = b.js("slides.length")
    at = lambda: b.js("slides.indexOf(document.querySelector('.current')) + 1")
    for key, slide in (("ArrowRight", 2), ("End", count), ("ArrowLeft", count - 1), ("Home", 1)):
        b.press(key)
        expect(f"{key} goes to slide {slide}", at() == slide, at())
    b.press("1"), b.press("3"), b.press("Enter")
    expect("a number and Enter go to that slide", at() == 13 and b.js("location.hash.slice(1) === slides[12].id"), at())
    b.press("o")
    expect("o shows all slides, and the current one has the focus", b.js("!contents.hidden && document.activeElement.hash === '#' + slides[12].id"
                                                                       f" && contents.querySelectorAll('a').length === {count}"))
    b.js("contents.querySelectorAll('a')[3].click()")
    b.wait("contents.hidden")
    expect("one of them leads to its slide", at() == 4, at())
    b.press("n")
    expect("n shows what to say", b.js("getComputedStyle(document.querySelector('.current aside')).display") == "block")
    b.press("n")
    go(b, "#theorem")
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
    if pictures:
        for scheme in ("light", "dark"):
            b.media(prefers_color_scheme=scheme)
            b.picture(os.path.join(pictures, scheme + ".png"))
    pdf = base64.b64decode(b.call("Page.printToPDF", preferCSSPageSize=True, printBackground=True)["data"])
    printed = len(re.findall(rb"/Type\s*/Page\b", pdf))
    expect("print has a page for each slide", printed == count, f"{printed} for {count}")
    expect("nothing is asked of a network", b.js("document.querySelectorAll('[src], link').length") == 0)
    expect("no error on the console", not b.errors, "; ".join(b.errors))


if __name__ == "__main__":
    browser.run(visit)
