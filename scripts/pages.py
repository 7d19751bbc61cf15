"""What the scripts that write pages have in common. Read by them; it does nothing by itself.

The parts below are the files, as much of Markdown as the documents use, the stations of a source, the numbers that
a run gives, and the page itself.
"""
import html
import os
import re
import shutil
import subprocess
import sys

from plot_trace import Fault

# ------------------------------------------------------------------ files

HERE = os.path.dirname(os.path.abspath(__file__))


def read(path):
    with open(path, encoding="utf-8", newline="\n") as f:
        return f.read()


def piece(name):
    """A file of scripts/page."""
    return read(os.path.join(HERE, "page", name))


def argument(name, default=None):
    """What stands behind an option of the command line."""
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


# ------------------------------------------------------------------ Markdown

def inline(text):
    """Code, links, bold and slanted words; what is in a code span stays as it is."""
    parts = re.split(r"`([^`]+)`", text)
    for n in range(0, len(parts), 2):
        parts[n] = html.escape(parts[n], quote=False)
    parts[1::2] = [f"<code>{html.escape(p, quote=False)}</code>" for p in parts[1::2]]
    # code is put aside, since a star in it is no mark
    kept, text = parts[1::2], "\0".join(parts[::2])
    text = re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", r'<a href="\2">\1</a>', text)
    text = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)
    text = re.sub(r"(?<![\w*])\*([^*\s][^*]*)\*(?![\w*])", r"<em>\1</em>", text)
    return re.sub("\0", lambda _: kept.pop(0), text)


def slug(heading):
    """The name that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def picture(alt, path):
    """An SVG beside the documents, drawn in the page itself."""
    with open(os.path.join("docs", path), encoding="utf-8") as f:
        svg = f.read().strip()
    svg = re.sub(r" width='\d+' height='\d+'", f" role='img' aria-label='{html.escape(alt)}'", svg, count=1)
    svg = re.sub(r"<style>.*?</style>\n|<rect class='ground'.*?/>\n", "", svg)  # the page has its own ground, and style.css the ink
    return f'<figure class="wide" tabindex="0" aria-label="{html.escape(alt)}">{svg}</figure>'


def table(lines):
    rows = [[inline(cell.strip()) for cell in line.strip().strip("|").split("|")] for line in lines]
    head = "".join(f'<th scope="col">{cell}</th>' for cell in rows[0])
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows[2:])
    return f'<div class="wide" tabindex="0" role="group" aria-label="table"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def listing(lines):
    return '<pre tabindex="0" role="group" aria-label="listing">' + html.escape("\n".join(lines), quote=False) + "</pre>"


def block(lines):
    """One paragraph, heading, list, table or piece of code, whose lines belong together."""
    first = lines[0]
    heading = re.match(r"(#+) (.*)", first)
    image = re.fullmatch(r"!\[([^\]]*)\]\(([^)]+)\)", " ".join(lines))
    if heading:
        level = len(heading[1]) + 1  # the page has a title of its own
        return f'<h{level} id="{slug(heading[2])}">{inline(heading[2])}</h{level}>'
    if image:
        return picture(image[1], image[2])
    if first.startswith("|"):
        return table(lines)
    if first.startswith("    "):
        return listing([line[4:] for line in lines])
    if first == "---":
        return "<hr>"
    if first.startswith("- "):
        items = re.split(r"(?:^|\n)- ", "\n".join(lines))[1:]
        return "<ul>" + "\n".join(f"<li>{inline(item)}</li>" for item in items) + "</ul>"
    return f"<p>{inline(chr(10).join(lines))}</p>"


def render(text):
    """Blocks are parted by empty lines, but in a listing; comments are left out."""
    out, lines, code = [], [], None
    for line in text.split("\n") + [""]:
        if line.startswith("```"):
            if code is not None:
                out.append(listing(code))
            code = [] if code is None else None
        elif code is not None:
            code.append(line)
        elif line.strip() and not line.startswith("<!--"):
            lines.append(line)
        elif lines:
            out.append(block(lines))
            lines = []
    return "\n".join(out)


# ------------------------------------------------------------------ a source of stations

class Station:
    """A place of docs/paper.txt, or a slide of docs/slides.txt."""

    def __init__(self, name, title, chapter):
        self.id, self.title, self.chapter = name, title, chapter
        self.field, self.listing, self.printed = {}, [], []  # listing: the commands and what they print; printed: that alone

    def lines(self, field):
        return self.field.get(field, [])

    def text(self, field):
        return " ".join(self.lines(field))


def add_line(station, line, fields):
    """One line below a station's title: of a field, of its continuation, or of a command."""
    if line.startswith("    "):
        goes_on = station.listing and station.listing[-1].endswith("\\")
        station.listing.append(line[4:])
        if not goes_on and not line.startswith("    $ "):
            station.printed.append(line[4:])
    elif line.startswith("  ") and station.field:
        station.field[[*station.field][-1]].append(line.strip())
    else:
        name, _, text = line.partition(" ")
        if name not in fields or name in station.field:
            raise Fault(f"{station.id}: a line begins with {name}; expected one of {', '.join(fields)}, each once")
        station.field[name] = [text.strip()]


def stations(text, fields):
    """The stations of a source. What stands in front of the first chapter is for who edits it."""
    found, chapter = [], None
    for line in text.split("\n"):
        if line.startswith("= "):
            chapter = line[2:]
        elif line.startswith("@ "):
            _, name, title = line.split(" ", 2)
            found.append(Station(name, title.strip(), chapter))
        elif found and line.strip():
            add_line(found[-1], line, fields)
    return found


# ------------------------------------------------------------------ numbers

NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def is_printed(number, printed):
    """True if a number that was printed is this one, or becomes it when it is rounded to as many places."""
    places = len(number.partition(".")[2])
    return any(p == number or ("." in number and f"{float(p):.{places}f}" == number) for p in NUMBER.findall(printed))


# ------------------------------------------------------------------ a page

STYLE = piece("style.css")


def html_page(title, style, body, script, head=""):
    return (f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title}</title>\n'
            f'<style>{style}</style>\n{head}</head>\n<body>\n{body}\n{script}\n</body>\n</html>\n')


def write_or_check(path, text, limit, remedy):
    """Writes a page; with --check it says whether the page is as it would be written."""
    size = len(text.encode())
    if size > limit:
        raise Fault(f"{path}: would have {size} bytes; expected at most {limit}: {remedy}")
    if "--check" in sys.argv:
        if read(path) != text:
            raise Fault(f"{path}: is not what its sources and the runs make now; `make docs` writes it anew")
        return
    with open(path, "w", encoding="utf-8", newline="\n") as f:
        f.write(text)
    print(f"{path}: {size} bytes")


def write_pdf(page, path):
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if not chromium:
        raise Fault("a PDF needs chromium")
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    subprocess.run([chromium, "--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer", f"--print-to-pdf={path}",
                    "file://" + os.path.abspath(page)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(f"{path}: {os.path.getsize(path)} bytes")


def run(main):
    """Runs a script, whose faults are one line for a person."""
    name = os.path.basename(sys.argv[0])
    try:
        main()
    except Fault as fault:
        print(f"{name}: {fault}", file=sys.stderr)
        sys.exit(2)
    except OSError as e:
        sys.exit(f"{name}: {e.filename}: {e.strerror}; run it in the repository, after `make`")
