#!/usr/bin/env python3
"""paper.py: the paper's evaluation again, on a laptop without a GPU: results/paper/README.md, figures beside it, and runs.json with
every run. Standard library only; `make paper` calls it in the repository. `paper.py --check SECTION...` makes sections anew, such as
`table4`, and compares them with README.md; runs whose figures are in runs.json are not repeated. What was published is in paper_published.py, the tables are
in paper_tables.py, the figures in paper_figures.py, and paper_runs.py runs the program, two at a time.

GPU=1 in the environment also runs the policies on the GPU at hand (device cuda, with a T4's 15 GiB), one run at a time; what does not
fit its host is left out, with the reason. FLEXGEN names another program than ./flexgen."""
import json, os, subprocess, sys, time

import paper_figures as figures, paper_tables as tables
from paper_runs import FLEXGEN, GPU, POOL, TMP, Run, said, table

FOLDER = "results/paper"
PLACES = [  # in the paper, and what answers it here
    ("Table 1", "hardware", "Table 1"), ("Table 2", "throughput of one GPU", "Table 2; the losses"), ("Table 3", "four GPUs", "Table 3"),
    ("Table 4", "where the time goes", "Table 4"), ("Table 5", "ablations", "Table 5"), ("Table 6", "accuracy", "Table 6"),
    ("Tables 7 and 8", "notation", "`flexgen.h`, `hardware/t4.json`"), ("Figure 1", "latency and throughput", "Figure 1"),
    ("Figures 2 and 4", "the loop", "Figures 2 and 4"), ("Figures 3 and 6", "schedules", "Figures 3 and 6"),
    ("Figure 5", "Petals", "Figure 5 and section 6.4"), ("Section 6.3", "tokens for a dollar", "Section 6.3"),
    ("Theorem 4.1, A.2", "weights loaded", "Theorem 4.1"), ("A.4", "policies", "Appendix A.4")]


def gpu_name():
    try:
        names = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True).stdout
    except OSError:
        names = ""
    return names.splitlines()[0] if names else "a GPU without a name"


def introduction():
    gpu = f"*On the GPU* was measured on {gpu_name()}, with a GPU tier of 15 GiB." if GPU else \
        "Nothing here was measured on a GPU. `make paper GPU=1` adds columns that are."
    return ["# The paper's evaluation, again", "",
            said(f"""Written by `make paper`; do not edit. *Published* is what the paper (arXiv 2303.06865) or the original program's
            benchmarks state. *Sim* is this program's own schedule on a machine made of numbers (`--device sim`): nothing is computed,
            and an operation takes what the hardware file says. So a simulated figure is a bound that this engine could reach on such a
            machine, not a measurement. {gpu} Every run is in [runs.json](runs.json), with its flags."""),
            *table(("paper", "what", "here"), *PLACES)]


SECTIONS = [tables.table1, tables.table2, tables.losses, tables.table3, tables.table4, tables.table5, tables.table6, figures.figure1,
            figures.traces, figures.figure5, tables.theorem, tables.appendix_policies, tables.dollars]
PARTS = [tables.table3_rows]  # of sections, which take less time


def check(names):
    """Whether each line of these sections is in README.md, and their drawings are those beside it."""
    with open(f"{FOLDER}/README.md") as f:
        there = f.read().splitlines()
    with open(f"{FOLDER}/runs.json") as f:
        Run.kept = {(r["command"], r["flags"], repr(r["changed"])): r for r in json.load(f)}
    makes, missing = {f.__name__: f for f in SECTIONS + PARTS}, []
    for name in names:
        missing += [f"{name}: {line}" for line in make(makes[name], TMP.name) if line not in there]
    print("".join(f"{FOLDER}/README.md has no such line of {line}\n" for line in missing), end="")
    others = [name for name in sorted(os.listdir(TMP.name)) if name.endswith(".svg") and not same(f"{FOLDER}/{name}", f"{TMP.name}/{name}")]
    print("".join(f"{FOLDER}/{name}: is no longer what is drawn\n" for name in others), end="")
    return not missing + others


def same(*paths):
    texts = []
    for path in paths:
        with open(path) as f:
            texts.append(f.read())
    return texts[0] == texts[1]


def make(section, folder):
    """The lines of a section, and its drawings in a folder."""
    return section(folder) if section.__module__ == "paper_figures" else section()


def main():
    if sys.argv[1:2] == ["--check"]:
        sys.exit(not check(sys.argv[2:]))
    began = time.monotonic()
    os.makedirs(FOLDER, exist_ok=True)
    lines = introduction()
    for section in SECTIONS:
        lines += [*make(section, FOLDER), ""]
    text = "\n".join(lines).rstrip() + "\n"
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    with open(f"{FOLDER}/README.md", "w") as f:
        f.write(text)
    with open(f"{FOLDER}/runs.json", "w") as f:
        f.write("[\n" + ",\n".join(json.dumps(r.entry()) for r in Run.all.values()) + "\n]\n")
    POOL.shutdown()
    print(f"{FOLDER}/README.md: {len(Run.all)} runs of {FLEXGEN} in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
