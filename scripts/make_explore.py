#!/usr/bin/env python3
"""Write docs/explore.html: the policy search in a browser, by this program itself as WebAssembly.

    python3 scripts/make_explore.py build/wasm    `make explore` runs this when the program has been compiled there
    python3 scripts/make_explore.py --check       whether the page is of these sources; needs no compiler

The page is one file: the program, the hardware files, style and script are in it. A hash of what it was made of stands at its
end; comments and blanks do not count, so that they may change without a compiler for WebAssembly.

Needs only Python's standard library, 3.8 or later.
"""
import base64
import glob
import gzip
import hashlib
import json
import os
import re
import sys

import pages
import plot_trace

PAGE = "docs/explore.html"
MODELS = [f"opt-{size}" for size in ("125m", "350m", "1.3b", "2.7b", "6.7b", "13b", "30b", "66b", "175b")]
LIMIT = 1_500_000  # bytes
ERROR = "15%"      # of T: predicted over measured, without the real disk, results/measured.md


def read(path):
    with open(path, encoding="utf-8") as f:
        return f.read()


def essence(path):
    """A source as a compiler sees it: strings stay, comments and the blanks between words go."""
    text = read(path)
    if path.endswith((".c", ".h")):
        text = re.sub(r'("(?:\\.|[^"\\])*")|/\*.*?\*/|//[^\n]*', lambda m: m[1] or " ", text, flags=re.S)
    return " ".join(text.split())


def sources():
    code = [path for folder in (".", "app", "base", "branches", "cost", "device", "io") for path in glob.glob(f"{folder}/*.[ch]")]
    code = [path for path in code if os.path.basename(path) not in ("mini.c", "pipeline.c")]
    pieces = [path for path in glob.glob("scripts/page/*") if not os.path.basename(path).startswith(("paper.", "slides."))]
    return sorted(code + ["docs/explore.c"] + glob.glob("hardware/*.json") + pieces)


def fingerprint():
    total = hashlib.sha256()
    for path in sources():
        total.update(f"{os.path.normpath(path)}\n{essence(path)}\n".encode())
    return total.hexdigest()


def page(wasm):
    with open(os.path.join(wasm, "flexgen.wasm"), "rb") as f:
        program = base64.b64encode(gzip.compress(f.read(), 9, mtime=0)).decode()
    machines = {os.path.basename(path)[:-5]: json.loads(read(path)) for path in sorted(glob.glob("hardware/*.json"))}
    data = json.dumps({"machines": machines, "models": MODELS, "calls": plot_trace.COLORS, "wasm": program})
    pieces = {"STYLE": pages.piece("style.css") + pages.piece("explore.css"), "DATA": data.replace("</", "<\\/"),
              "WORKER": read(os.path.join(wasm, "flexgen.js")) + pages.piece("worker.js"),
              "SCRIPT": pages.piece("draw.js") + pages.piece("explore.js")}
    text = pages.piece("explore.html").replace("<!--ERROR-->", ERROR)
    for name, piece in pieces.items():
        text = text.replace(f"/*{name}*/", piece, 1)
    return text + f"<!-- of sources {fingerprint()} -->\n"


def main():
    if "--check" in sys.argv:
        if fingerprint() not in read(PAGE)[-200:]:
            sys.exit(f"make_explore.py: {PAGE}: is of other sources than these; `make explore` writes it anew")
        return
    text = page(sys.argv[1])
    if len(text.encode()) > LIMIT:
        sys.exit(f"make_explore.py: {PAGE}: would have {len(text.encode())} bytes; expected at most {LIMIT}")
    with open(PAGE, "w", encoding="utf-8", newline="\n") as f:
        f.write(text)
    print(f"{PAGE}: {len(text.encode())} bytes")


if __name__ == "__main__":
    main()
