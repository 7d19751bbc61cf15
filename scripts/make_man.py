#!/usr/bin/env python3
"""Makes the manual page docs/flexgen.1 out of what `flexgen --help` prints. `make docs` runs it.

Needs only Python's standard library, and ./flexgen.
"""
import re
import subprocess

HEAD = r"""
.TH FLEXGEN 1
.SH NAME
flexgen \- generate text from OPT models that do not fit the GPU
.SH SYNOPSIS
.B flexgen
.I COMMAND
.RI [ FLAGS ]
.SH DESCRIPTION
The weights, the KV cache and the activations of a model are spread over GPU, CPU and disk, as in
.I FlexGen: High-throughput Generative Inference of Large Language Models with a Single GPU
(arXiv 2303.06865). Flags that are given are fixed; a search chooses the others.
Results go to standard output, everything else to standard error.
.SH COMMANDS
"""
TAIL = r"""
.SH EXIT STATUS
0 done, 1 failed, 2 wrong use or does not fit.
.SH FILES
.TP
.I ~/.cache/flexgen
This machine, as it was measured.
.TP
.I ../lib/flexgen/hardware
Other machines, from the folder of the program.
.SH EXAMPLES
.nf
flexgen generate \-\-model opt\-1.3b \-\-prompt "Once upon a time"
flexgen policy \-\-model opt\-30b \-\-hardware hardware/t4.json
.fi
"""


def roff(text):
    return text.replace("\\", "\\e").replace("-", r"\-")


def main():
    told = subprocess.check_output(["./flexgen", "--help"], text=True)
    commands = [re.split("  +", line) for line in re.findall(r"^  (flexgen .*)", told, re.M)]
    flags = re.findall(r"^  (--\S+) +(\w+) +(.*)", told, re.M)
    names = dict(re.findall(r"(\w): of (\w+)", told.splitlines()[-1]))
    page = [HEAD.strip()]
    for *use, does in commands:
        page += [".TP", f".B {roff(' '.join(use))}", roff(does)]
    page += [".SH FLAGS"]
    for flag, letters, text in flags:
        of = "all commands" if len(letters) == len(names) else ", ".join(names[letter] for letter in letters)
        page += [".TP", f".BR {roff(flag)} \" ({of})\"", roff(text)]
    with open("docs/flexgen.1", "w", encoding="utf-8") as f:
        f.write("\n".join([*page, TAIL.strip()]) + "\n")


if __name__ == "__main__":
    main()
