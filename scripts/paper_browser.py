#!/usr/bin/env python3
"""Use docs/paper.html in a headless Chromium as a reader would, and say what was seen.

    python3 scripts/paper_browser.py [--screenshots DIR]

Exit status 0: everything was as it should be, or there is no Chromium (a line says so).
Needs Python's standard library and chromium.
"""
import os

import browser
from browser import expect

PAGE = "file://" + os.path.abspath("docs/paper.html")
# The formulas whose row is no row: where a browser does not know MathML, its parts stand below one another.
STACKED = "[...document.querySelectorAll('.formula > div')].filter(row => row.getBoundingClientRect().height > 70).length"


def go(b, address):
    b.open(PAGE + address, "typeof step === 'function'")


def at_top(b, name):
    return b.js(f"Math.abs(document.getElementById('{name}').getBoundingClientRect().top) < 20")


def visit(b, pictures):
    b.size(1400, 1000)
    go(b, "#A.3-dtoc")
    expect("a short address goes to the first station that begins so", at_top(b, "A.3-dtoc-p"), b.js("location.hash"))
    b.press("j")
    expect("j goes to the next station", at_top(b, "A.3-ctod-p"), b.js("location.hash"))
    b.press("ArrowLeft"), b.press("k")
    expect("the arrow and k go back", at_top(b, "A.3-gtoc-p"), b.js("location.hash"))
    b.press("ArrowRight")
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
    if pictures:
        for scheme in ("light", "dark"):
            b.media(prefers_color_scheme=scheme)
            b.picture(os.path.join(pictures, scheme + ".png"))
    expect("no error on the console", not b.errors, "; ".join(b.errors))


if __name__ == "__main__":
    browser.run(visit)
