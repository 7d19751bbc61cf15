#!/usr/bin/env python3
"""Write docs/paper.html, the page to keep open beside the paper: docs/paper.txt with the code that it names.

    python3 scripts/paper_page.py            in the repository; or `make docs`
    python3 scripts/paper_page.py --check    whether the page is as it would be written
    python3 scripts/paper_page.py --pdf FILE the page as a booklet; needs chromium; or `make booklet`
    --source FILE                            instead of docs/paper.txt

docs/paper.txt begins with its own form. Code is found by the names of functions and types, when the page is made. What the page says
of the program is checked each time: every function that a station names exists, every number in bold stands in what the station's
commands print (suite tour runs these), these write the files in /tmp that they read, README.md's table leads to a station of each chapter in the page's order, and every file of
code that docs/READING.md has in the trunk and every file with a comment DIFFERS is at some station.
The four parts below are the source, the formulas, the code, and the page itself.

Needs only Python's standard library, 3.8 or later.
"""
import functools
import glob
import html
import os
import re
import sys

import pages
from pages import Fault, NUMBER, argument, is_printed, read, stations

SOURCE, PAGE, EXERCISES = "docs/paper.txt", "docs/paper.html", "docs/EXERCISES.md"
README, READING = "README.md", "docs/READING.md"
LIMIT = 600_000  # bytes; a page has to open quickly


# ------------------------------------------------------------------ the source

# The fields of a station in the order of the page, and the words in front of them there.
SAID = {"paper": "The paper", "formula": "", "miss": "Easy to miss", "differs": "Differs from the paper", "number": "A number"}
FIELDS = [*SAID, "place", "mini", "engine", "also", "picture", "exercise"]
NEEDED = ["place", "paper", "miss", "number"]


# ------------------------------------------------------------------ the formulas

FREE = {"wg", "wc", "wd", "cg", "cc", "cd", "hg", "hc", "hd"}  # blue in the paper's A.3
UPRIGHT = {"max", "min", "softmax", "relu", "ln", "round", "Concat"}
SIGNS = {"<-": "&#8592;", "<=": "&#8804;", ">=": "&#8805;", "-": "&#8722;", "*": "&#183;", "<": "&lt;", ">": "&gt;"}
MATH = re.compile(r"\s*(?:(?P<word>[A-Za-z]+)|(?P<number>\d+(?:\.\d+)?)|(?P<sign><-|<=|>=|[-+*=<>,;/^_(){}]))")


class Formula:
    """A line such as x_Out = softmax({x_Q x_K^T}/sqrt(hd)) x_V w_O + x as MathML. Braces hold together what is not seen."""

    def __init__(self, text):
        self.tokens, at = [], 0
        while text[at:].strip():
            match = MATH.match(text, at)
            if not match:
                raise Fault(f"formula: {text}: cannot read {text[at:]}")
            self.tokens.append((match.lastgroup, match[match.lastgroup]))
            at = match.end()
        self.text, self.at = text, 0
        self.mark_alone()

    def mark_alone(self):
        """Brackets whose other half is in another row of the formula."""
        opened = []
        for n, (_, text) in enumerate(self.tokens):
            if text == "(":
                opened.append(n)
            elif text == ")" and opened:
                opened.pop()
            elif text == ")":
                self.tokens[n] = ("alone", text)
        for n in opened:
            self.tokens[n] = ("alone", "(")

    def next_is(self, *signs):
        return self.at < len(self.tokens) and self.tokens[self.at][1] in signs

    def take(self):
        if self.at == len(self.tokens):
            raise Fault(f"formula: {self.text}: ends too early")
        self.at += 1
        return self.tokens[self.at - 1]

    def row(self, end):
        """What stands before the closing sign, which is taken, or before the end."""
        parts, before = [], "sign"
        while self.at < len(self.tokens) and not self.next_is(end):
            kind, text = self.tokens[self.at]
            if kind == "alone" or (kind == "sign" and text not in "({"):
                self.at += 1
                parts.append(f"<mo>{SIGNS.get(text, text)}</mo>")
                before = "group" if text == ")" else "sign"
                continue
            if before != "sign" and not (text == "(" and before == "name"):
                parts.append('<mspace width=".2em"></mspace>')
            parts.append(self.fraction())
            before = "name" if text in UPRIGHT else kind
            if text in "({":
                before = "group"
        if end and self.take()[1] != end:
            raise Fault(f"formula: {self.text}: lacks {end}")
        return "".join(parts)

    def fraction(self):
        above = self.atom()
        if not self.next_is("/"):
            return above
        self.take()
        return f"<mfrac>{above}{self.atom()}</mfrac>"

    def atom(self):
        kind, text = self.take()
        below = above = ""
        if kind == "word":
            base, below = self.word(text)
        elif kind == "number":
            base = f"<mn>{text}</mn>"
        elif text == "(":
            base = f"<mrow><mo>(</mo>{self.row(')')}<mo>)</mo></mrow>"
        elif text == "{":
            base = f"<mrow>{self.row('}')}</mrow>"
        else:
            raise Fault(f"formula: {self.text}: {text} stands in a wrong place")
        if self.next_is("^"):
            self.take()
            above = self.atom()
        if below and above:
            return f"<msubsup>{base}{below}{above}</msubsup>"
        if below or above:
            return f"<{'msub' if below else 'msup'}>{base}{below or above}</{'msub' if below else 'msup'}>"
        return base

    def word(self, text):
        """A name and what stands below it: ctog_bdw is one name, T_pre has something below, and so has h1."""
        if text == "sqrt":
            self.take()
            return f"<msqrt>{self.row(')')}</msqrt>", ""
        below = ""
        while self.next_is("_"):
            self.take()
            kind, more = self.take()
            if len(text) > 1 and kind == "word":
                text += "_" + more
            else:
                below = f"<mi>{more}</mi>" if kind == "word" else f"<mn>{more}</mn>"
        if len(text) == 1 and self.at < len(self.tokens) and text == "h" and self.tokens[self.at] in (("number", "1"), ("number", "2")):
            below = f"<mn>{self.take()[1]}</mn>"
        return f'<mi{" class=free" if text in FREE else ""}>{text}</mi>', below


def formula(lines):
    rows = []
    for line in lines:
        math = Formula(line).row("")
        more = ' class="more"' if rows and line[0] in "+=" else ""
        rows.append(f'<div{more}><math displaystyle="true">{math}</math></div>')
    return '<div class="formula" tabindex="0" role="group" aria-label="formula">' + "\n".join(rows) + "</div>"


# ------------------------------------------------------------------ the code

C = re.compile(r"""
    (?P<c> /\*.*?\*/ | //[^\n]* )
  | (?P<s> "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*' | \b\d(?:[eEpP][+-]|[\w.])* )
  | (?P<k> \b(?:break|const|continue|double|do|else|enum|extern|float|for|if|int|long|bool|char|inline|return|short|signed|sizeof|static|struct
           |switch|case|typedef|union|unsigned|void|while|size_t|uint8_t|int32_t|uint32_t|uint64_t|true|false|NULL)\b | ^\#\w+ )
""", re.S | re.X | re.M)
STATEMENT_ENDS = (";", "{", "}", "},", "*/")


def coloured(text):
    """C as HTML in which no mark goes over the end of a line."""
    out, at = [], 0
    for match in C.finditer(text):
        out.append(html.escape(text[at:match.start()], quote=False))
        for n, part in enumerate(match[0].split("\n")):
            out.append(("\n" if n else "") + f"<span class={match.lastgroup}>{html.escape(part, quote=False)}</span>")
        at = match.end()
    return "".join(out) + html.escape(text[at:], quote=False)


def starts_definition(lines, n, name):
    """True if a definition of that name begins in line n: of a function, a test or a type."""
    if name not in lines[n] and not lines[n].startswith("typedef"):
        return False
    line = re.sub(r"^__global__ void __launch_bounds__\([^)]*\)", "void", lines[n])
    if re.match(rf"TEST\({name}\)", line) or re.match(rf"(SHARED )?(struct|enum|union) {name} \{{", line) or re.match(rf"typedef .*\}} {name};", line):
        return True
    if re.match(rf"[A-Za-z][^;(]*?\b{name}\(", line):
        signature = re.split("[;{]", "\n".join(lines[n:n + 12]), maxsplit=1)
        return len(signature) == 2 and "\n".join(lines[n:n + 12])[len(signature[0])] == "{"
    if line.startswith("typedef") and line.endswith("{"):
        end = next((m for m in range(n, len(lines)) if lines[m].startswith("}")), n)
        return re.match(rf"\}} {name};", lines[end]) is not None
    return False


@functools.lru_cache(maxsize=None)  # a station is checked, and then shown
def definition(path, name):
    """[(number, line)] of a function or a type with its comment, and the number of its first line. None: the file has none."""
    lines = read(path).split("\n")
    first = next((n for n in range(len(lines)) if starts_definition(lines, n, name)), None)
    if first is None:
        return None
    end = next(n for n in range(first, len(lines)) if lines[n].startswith("}") or (lines[n].endswith(("}", "};")) and n == first)
               or (n == first and re.match(r".*\} \w+;", lines[n])))
    before = first
    while before and lines[before - 1] in ("// clang-format on", "// clang-format off"):
        before -= 1
    if before and lines[before - 1].endswith("*/"):
        before -= 1
        while lines[before].startswith(" *"):
            before -= 1
    if not lines[before].startswith("/*"):
        before = first
    return [(n + 1, lines[n]) for n in range(before, end + 1) if not lines[n].startswith("// clang-format")], first + 1


def excerpt(lines, first, wanted, where):
    """The lines of the signature and of each statement that has one of the wanted texts in it."""
    body = [(n, line) for n, line in lines if n >= first]
    signature = next(i for i, (_, line) in enumerate(body) if line.endswith("{"))
    kept = set(range(signature + 1))
    for text in wanted:
        hits = [i for i, (_, line) in enumerate(body) if text in line and i > signature]
        if not hits:
            raise Fault(f"{where}: no line has {text}")
        for i in hits:
            begin = end = i
            while begin - 1 > signature and not body[begin - 1][1].endswith(STATEMENT_ENDS):
                begin -= 1
            while not body[end][1].endswith(STATEMENT_ENDS) or body[end][1].endswith("= {"):
                end += 1
            kept.update(range(begin, end + 1))
    return [body[i] for i in sorted(kept)]


def listing(path, name, wanted):
    lines, first = definition(path, name)
    if wanted:
        lines = excerpt(lines, first, wanted, f"{path}: {name}")
    marked = coloured("\n".join(line for _, line in lines)).split("\n")
    out, last = [], None
    for (n, _), line in zip(lines, marked):
        jump = f' style="counter-set:n {n}"' if last is None or n != last + 1 else ""
        if last is not None and n != last + 1:
            out.append(f"<i>&#8943; line {n}\n</i>")
        out.append(f"<code{jump}>{line}\n</code>")
        last = n
    return (f'<figure class="code"><figcaption><a href="../{path}#L{first}">{path}</a>, line {first}: <b>{name}</b></figcaption>'
            f'<pre tabindex="0" role="group" aria-label="{path}: {name}">' + "".join(out) + "</pre></figure>")


def places(station, field):
    """[(file, [(name, wanted texts)])] of lines such as schedule.c: sweep, begin <first; second>. mini.c's lines have no file."""
    for line in station.lines(field):
        path, colon, names = ("mini.c", ":", line) if field == "mini" else line.partition(":")
        found = re.findall(r"(\w+)(?:\s*<([^>]*)>)?", names) if colon else []
        yield path.strip(), [(name, [w.strip() for w in wanted.split(";")] if wanted else []) for name, wanted in found]


# ------------------------------------------------------------------ what is checked

MARKED = re.compile(r"\(`([\w/]+\.\w+)`\)")  # a file with a comment DIFFERS

def check_alone(s):
    """Each file in /tmp that a station's commands read was written by one of them."""
    written = set()
    for writes, path in re.findall(r"(>|tee |--trace |mkdir -p )?(/tmp/[\w./-]+)", "\n".join(s.listing)):
        if writes:
            written.add(path)
        elif path not in written:
            raise Fault(f"{s.id}: none of its commands writes {path}")


def check_station(s, known):
    """known: all words of the sources."""
    missing = [field for field in NEEDED if not s.text(field)]
    if missing:
        raise Fault(f"{s.id}: lacks {', '.join(missing)}")
    if not any(line.startswith("$ ") for line in s.listing):
        raise Fault(f"{s.id}: has no command")
    check_alone(s)
    printed = "\n".join(s.printed)
    for bold in re.findall(r"\*\*([^*]+)\*\*", s.text("number")):
        if not all(is_printed(number, printed) for number in NUMBER.findall(bold)):
            raise Fault(f"{s.id}: **{bold}** is in nothing that its commands print")
    for field in ("mini", "engine", "also"):
        for path, names in places(s, field):
            if not os.path.exists(path):
                raise Fault(f"{s.id}: {path}: no such file")
            for name, _ in names:
                if definition(path, name) is None:
                    raise Fault(f"{s.id}: {path}: has no function or type {name}")
    for path in MARKED.findall(s.text("differs")):
        if "DIFFERS:" not in read(path):
            raise Fault(f"{s.id}: {path}: no comment with DIFFERS")
    for field in SAID:
        for name in re.findall(r"`(\w+_\w+)`", s.text(field)):
            if name not in known:
                raise Fault(f"{s.id}: {name} stands in no source")


def table_rows(path, begin):
    """The rows of the table of a document whose first line begins so."""
    found = re.search(rf"^\| {re.escape(begin)} \|.*?\n\n", read(path), re.M | re.S)
    if not found:
        raise Fault(f"{path}: has no table that begins with | {begin} |")
    return found[0].strip().split("\n")[2:]


def check_readme(all_stations):
    """Each row of README's table has the place of a station, to which it leads. The rows are in the page's order, and none of its chapters
    is left out."""
    order, at, chapters = {s.id: n for n, s in enumerate(all_stations)}, 0, set()
    for row in table_rows(README, "paper"):
        link = re.match(r"\| \[([^]]+)\]\(docs/paper\.html#([^)]+)\) \|", row)
        if not link or link[2] not in order:
            raise Fault(f"{README}: leads to no station: {row}")
        place, s = link[1], all_stations[order[link[2]]]
        if not re.search(rf"(?<![\w.]){re.escape(place)}(?!\w|\.\w)", s.text("place")):
            raise Fault(f"{README}: {place} leads to {s.id}, which stands at {s.text('place')}")
        if order[s.id] < at:
            raise Fault(f"{README}: {s.id} stands behind {all_stations[at].id}; on the page it stands before it")
        at = order[s.id]
        chapters.add(s.chapter)
    for s in all_stations:
        if s.chapter not in chapters:
            raise Fault(f"{README}: no row leads to a station of: {s.chapter}")


def check_trunk(all_stations):
    files = {path for s in all_stations for field in ("mini", "engine", "also") for path, _ in places(s, field)}
    for row in table_rows(READING, "read"):
        for path in re.findall(r"`([^`]+\.c)`", row.split("|")[1]):
            if path not in files:
                raise Fault(f"{READING}: {path} of the trunk is at no station")


def check_differs(all_stations, sources):
    """Each file that departs from the paper somewhere, and says so, is at some station."""
    named = {path for s in all_stations for path in MARKED.findall(s.text("differs"))}
    for path, text in sources.items():
        if "DIFFERS:" in text and path not in named:
            raise Fault(f"{path}: has a comment with DIFFERS, and is at no station")


def check(all_stations):
    paths = glob.glob("*.[ch]") + glob.glob("*.cu") + glob.glob("*/*.[ch]") + glob.glob("hardware/*.json")
    sources = {path: read(path) for path in sorted(paths) if not path.startswith("tests/")}
    known = set(re.findall(r"\w+", "\n".join(sources.values())))
    ids = [s.id for s in all_stations]
    if len(set(ids)) < len(ids):
        raise Fault("two stations have one name")
    for s in all_stations:
        check_station(s, known)
    check_readme(all_stations)
    check_trunk(all_stations)
    check_differs(all_stations, sources)


# ------------------------------------------------------------------ the page

LETTERS = re.compile(r"(?<![\w/.`])(?:(?P<base>[a-z]+(?:_[a-z0-9]+)?)\^(?P<above>[pg])|(?P<one>[xtwTh])_?(?P<below>pre|gen|Out|quant|next|[KQVO12])(?P<power>\^2)?|"
                     r"(?P<two>att|mlp|bls)_(?P<number>[12]))(?!\w)")


def letter(match):
    if match["above"]:
        return f"{match['base']}<sup>{match['above']}</sup>"
    square = "<sup>2</sup>" if match["power"] else ""
    return f"<i>{match['one']}</i><sub>{match['below']}</sub>{square}" if match["one"] else f"{match['two']}<sub>{match['number']}</sub>"


def prose(text):
    """Markdown, and the letters of formulas: T_pre, h1^2, ctog^p."""
    parts = re.split(r"(<code>.*?</code>|<[^>]*>)", pages.inline(text))
    return "".join(part if part.startswith("<") else LETTERS.sub(letter, part) for part in parts)


def paragraph(s, field):
    said = f"<strong>{SAID[field]}.</strong> " if SAID[field] else ""
    text = MARKED.sub(r"([`\1`](../\1))", s.text(field))
    return f'<p class="{field}">{said}{prose(text)}</p>' if text else ""


def code(s):
    columns = []
    for field in ("mini", "engine"):
        shown = [listing(path, name, wanted) for path, names in places(s, field) for name, wanted in names]
        if shown:
            columns.append('<div class="column">' + "\n".join(shown) + "</div>")
    return f'<div class="columns">{"".join(columns)}</div>' if columns else ""


def also(s):
    parts = []
    for path, names in places(s, "also"):
        lines = {name: definition(path, name)[1] for name, _ in names}
        functions = ", ".join(f'<a href="../{path}#L{n}"><code>{name}</code></a>, line {n}' for name, n in lines.items())
        parts.append(f'<a href="../{path}"><code>{path}</code></a>{": " + functions if functions else ""}')
    return f'<p class="also"><strong>See also.</strong> {"; ".join(parts)}.</p>' if parts else ""


def exercises(s):
    titles = dict(re.findall(r"^## (\d+)\. (.*)$", read(EXERCISES), re.M))
    parts = []
    for number in s.text("exercise").split():
        if number not in titles:
            raise Fault(f"{s.id}: there is no exercise {number}")
        parts.append(f'<a href="EXERCISES.md#{pages.slug(number + ". " + titles[number])}">{number}, {pages.inline(titles[number])}</a>')
    return f'<p class="exercise"><strong>Exercise.</strong> {"; ".join(parts)}.</p>' if parts else ""


def picture(s):
    out = []
    for line in s.lines("picture"):
        path, _, caption = line.partition(" ")
        svg = pages.picture(caption, os.path.relpath(path, "docs"))
        out.append(svg.replace("</figure>", f"<figcaption>{pages.inline(caption)}</figcaption></figure>"))
    return "".join(out)


def station(s, n, all_stations):
    before, after = all_stations[n - 2].id if n > 1 else "contents", all_stations[n].id if n < len(all_stations) else "contents"
    return "\n".join(part for part in (
        f'<section class="station" id="{s.id}" aria-labelledby="t{n}">',
        f'<nav aria-label="Stations"><a href="#{before}" aria-label="Station before">&#8592;</a> <a href="#{after}" aria-label="Station after">&#8594;</a></nav>',
        f'<h3 id="t{n}"><a href="#{s.id}"><span class="n">{n}</span> {prose(s.title)}</a></h3>',
        f'<p class="place">{prose(s.text("place"))}</p>', paragraph(s, "paper"),
        formula(s.lines("formula")) if s.lines("formula") else "", picture(s), code(s),
        '<div class="notes">', paragraph(s, "miss"), paragraph(s, "differs"), "</div>", paragraph(s, "number"), '<pre class="run" tabindex="0" role="group" aria-label="commands and what they print">' + html.escape("\n".join(s.listing), quote=False) + "</pre>",
        also(s), exercises(s), "</section>") if part)


def contents(all_stations):
    out, chapter = ['<nav id="contents" aria-label="Contents">'], None
    for n, s in enumerate(all_stations, 1):
        if s.chapter != chapter:
            out.append(("</ol>" if chapter else "") + f'<h2>{pages.inline(s.chapter)}</h2><ol start="{n}">')
            chapter = s.chapter
        out.append(f'<li value="{n}"><a href="#{s.id}">{prose(s.title)}</a> <small>{prose(s.text("place"))}</small></li>')
    return "\n".join(out) + "</ol></nav>"


INTRO = """
<p>This page stands beside Sheng et al., <em>High-throughput Generative Inference of Large Language Models with a Single GPU</em>
(<a href="https://arxiv.org/abs/2303.06865">arXiv 2303.06865</a>), in the paper's order. A station is one place that this program
implements: what the paper says there, its formula, the code of <code>mini.c</code> and of the engine, what is easy to miss, where
the program departs from the paper, a number from a run, and the exercise about it, if there is one. Where lines of code are left out,
&#8943; stands, with the number of the line that follows. Blue letters are the fractions that the linear
program may choose, as in the paper. <code>ctog</code>, <code>gtoc</code>, <code>dtoc</code> and <code>ctod</code> are the links from
CPU to GPU, back, from disk to CPU, and back; <code>^p</code> is prefill and <code>^g</code> is generation.</p>
<p class="keys">Keys: <kbd>j</kbd> or <kbd>&#8594;</kbd> goes to the next station, <kbd>k</kbd> or <kbd>&#8592;</kbd> to the one before,
<kbd>c</kbd> to the contents. The address names the station, such as <a href="#A.3-dtoc-g">#A.3-dtoc-g</a>. A short one goes to the
first station that begins so: <a href="#A.3-dtoc">#A.3-dtoc</a> to that of prefill. To run a command, run <code>make</code> and <code>make
mini</code> first, and stay in the repository's folder; the commands of a station need no other station's. Printed, the page is a booklet; <code>make booklet</code> writes it as PDF.</p>
"""


def page(all_stations):
    body, chapter = [], None
    for n, s in enumerate(all_stations, 1):
        if s.chapter != chapter:
            body.append(f'<h2 class="chapter">{pages.inline(s.chapter)}</h2>')
            chapter = s.chapter
        body.append(station(s, n, all_stations))
    return pages.html_page(
        "FlexGen: the paper beside the code", pages.STYLE + pages.piece("paper.css"),
        f'<main>\n<h1>The paper beside the code</h1>{INTRO}{contents(all_stations)}\n' + "\n".join(body) + "\n</main>",
        f'<script>{pages.piece("paper.js")}</script>')


def main():
    if "--pdf" in sys.argv:
        return pages.write_pdf(PAGE, argument("--pdf"))
    all_stations = stations(read(argument("--source", SOURCE)), FIELDS)
    check(all_stations)
    pages.write_or_check(PAGE, page(all_stations), LIMIT, "show less code")


if __name__ == "__main__":
    pages.run(main)
