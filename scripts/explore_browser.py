#!/usr/bin/env python3
"""Use docs/explore.html in a headless Chromium as a visitor would, and say what was seen.

    python3 scripts/explore_browser.py [--screenshots DIR]

Exit status 0: everything was as it should be, or there is no Chromium (a line says so). Times are printed, and never a reason to fail.
Needs Python's standard library and chromium.
"""
import json
import os
import time

import browser
from browser import expect

PAGE = "file://" + os.path.abspath("docs/explore.html")
ANSWERED = "typeof answer === 'function' && at('answer').getAttribute('aria-busy') === 'false'"


def ask(b, address):
    """Opens the page there, and waits for the answer. Seconds that it took."""
    began = time.time()
    b.open(PAGE + address, ANSWERED)
    return time.time() - began


def put(b, name, value):
    """As an input of the visitor's; waits for the answer. Seconds that it took."""
    began = time.time()
    b.js(f"at('answer').setAttribute('aria-busy', 'true'); at('{name}').type === 'checkbox' ? at('{name}').checked = {json.dumps(value)} : "
         f"at('{name}').value = {json.dumps(value)}; at('{name}').dispatchEvent(new Event('input', {{bubbles: true}})); "
         f"at('{name}').dispatchEvent(new Event('change', {{bubbles: true}}))")
    b.wait("at('answer').getAttribute('aria-busy') === 'false'")
    return time.time() - began


def throughput(b):
    return float(b.js("at('figures').querySelector('b').textContent.replace(/,/g, '')"))


def visit(b, pictures):
    first = ask(b, "#model=opt-30b")
    expect("the first answer is the program's for OPT-30B on the T4", abs(throughput(b) - 17.46) < .01, throughput(b))
    b.wait("run && run.squares.length > 100")
    if pictures:
        b.size(1280, 2600), b.picture(os.path.join(pictures, "wide.png"))
        b.media(prefers_color_scheme="dark")
        b.picture(os.path.join(pictures, "dark.png"))
        b.media()
    before = throughput(b)
    put(b, "ctog_bdw", "4")
    expect("a faster link brings more", throughput(b) > 1.05 * before, throughput(b))
    address = b.js("location.hash")
    expect("the address says what was asked", "ctog_bdw=4" in address and "--with ctog_bdw=24000000000" in b.js("at('command').textContent"), address)
    there = throughput(b)
    ask(b, address)
    expect("the address restores the view", throughput(b) == there and b.js("at('ctog_bdw').value") == "4", throughput(b))
    put(b, "ctog_bdw", "0"), put(b, "hand", True)
    put(b, "wg", "100"), put(b, "wc", "0")
    refusal = b.js("at('refused').hidden ? '' : at('refused').textContent")
    expect("what does not fit is refused in the program's words", "the GPU tier needs" in refusal, refusal)
    b.js("at('take').click()"), b.wait("at('refused').hidden && at('answer').getAttribute('aria-busy') === 'false'")
    expect("the best, taken by hand, is as good", abs(throughput(b) / before - 1) < .02, throughput(b))
    put(b, "hand", False), put(b, "s", "3000")
    refusal = b.js("at('refused').hidden ? '' : at('refused').textContent")
    expect("a prompt beyond 2048 is refused in the program's words", "2048 positions" in refusal, refusal)
    put(b, "s", "512"), put(b, "frontier", True)
    b.wait("document.querySelectorAll('#plot polyline').length === 2")
    expect("Figure 1 has both lines", True)
    b.js("at('ctog_bdw').focus()")
    b.press("ArrowRight")
    expect("an arrow key moves a slider", b.js("at('ctog_bdw').value") == "1")
    b.size(360, 740)
    ask(b, "#model=opt-1.3b")
    expect("360 px have no sideways scroll", b.js("document.documentElement.scrollWidth") <= 360, b.js("document.documentElement.scrollWidth"))
    if pictures:
        b.wait("run"), b.size(360, 4200), b.picture(os.path.join(pictures, "narrow.png"))
    b.size(1280, 900)
    large = ask(b, "#model=opt-175b")
    expect("no error on the console", not b.errors, "; ".join(b.errors))
    slid = sorted(put(b, "cmem", str(n)) for n in (1, -1, 2))[1]
    print(f"first answer {first:.2f} s (OPT-30B), {large:.2f} s (OPT-175B); after a slider {slid:.2f} s (OPT-175B, median of three)")


if __name__ == "__main__":
    browser.run(visit)
