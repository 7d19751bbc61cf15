#!/usr/bin/env python3
"""Makes the tables of io/unicode.c: which characters Hugging Face `tokenizers` treats as letters, numbers and white space.

    python3 scripts/make_unicode.py

takes half a minute, because it asks the library itself about every code point; tables from elsewhere, such as Python's
unicodedata, follow another version of Unicode. At the end it prints the digest that tests/test_tokenizer.c compares:
FNV-1a (64 bits) over the letters L, N, S, O of all code points from U+0000 to U+10FFFF except the surrogates.

Needs: tokenizers. Version 0.23.3 made the committed file. It follows Unicode 16.0: Python's `regex` 2024.11.6, which states
this version, agrees on all 1,112,064 characters.
"""
import os
import textwrap

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

UNICODE, LETTERS = "16.0", 141028  # this many letters are in this version
EXAMPLES = {"L": "a", "N": "1", "S": "\n", "O": "!"}
HEAD = """/* unicode.c: tells which characters are letters, numbers and white space.
 *
 * These are \\p{{L}}, \\p{{N}} and \\s of Unicode {unicode}, as Hugging Face `tokenizers` {version} knows them.
 * The tables are made by
 *     python3 scripts/make_unicode.py
 * Read next: checkpoint.c. */
#include "io/io.h"

/* The kind of each code point below 0x80. */
static const char ascii[] =
    "{ascii[0]}"
    "{ascii[1]}";

/* All other code points as inversion lists, one for each kind: a range of characters of that kind
 * begins at every even place of its list, and ends before the code point at the place behind. */
// clang-format off
"""
LISTS = {"L": "letters", "N": "numbers", "S": "spaces"}
TABLES_END = "// clang-format on\n"  # the text behind it is written by hand, and is kept


def kind(split, c):
    """Returns the kind of a character: with the example of its own kind it makes one word, with the others two."""
    [name] = [name for name, example in EXAMPLES.items() if len(split.pre_tokenize_str(example + c)) == 1]
    return name


def main():
    split = ByteLevel(add_prefix_space=False, use_regex=True)
    kinds = {c: kind(split, chr(c)) for c in range(0x110000) if not 0xD800 <= c < 0xE000}
    assert list(kinds.values()).count("L") == LETTERS, f"tokenizers {tokenizers.__version__} is not of Unicode {UNICODE}"
    lists, digest, before = {name: [] for name in EXAMPLES}, 0xCBF29CE484222325, "O"
    for c, name in kinds.items():
        digest = (digest ^ ord(name)) * 0x100000001B3 % 2**64
        if c >= 0x80 and name != before:
            lists[before].append(c)
            lists[name].append(c)
            before = name
    ascii = "".join(kinds[c] for c in range(0x80))
    path = os.path.join(os.path.dirname(__file__), "../io/unicode.c")
    with open(path, encoding="utf-8") as f:
        tail = f.read().partition(TABLES_END)[2]
    with open(path, "w", encoding="utf-8") as f:
        f.write(HEAD.format(unicode=UNICODE, version=tokenizers.__version__, ascii=(ascii[:64], ascii[64:])))
        for name, title in LISTS.items():
            f.write(f"static const uint32_t {title}[] = {{\n")
            f.write(textwrap.fill(" ".join(f"0x{c:X}," for c in lists[name]), 124, initial_indent="    ", subsequent_indent="    "))
            f.write("\n};\n")
        f.write(TABLES_END + tail)
    print(f"digest 0x{digest:016X}")


if __name__ == "__main__":
    main()
