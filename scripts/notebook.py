#!/usr/bin/env python3
"""docs/flexgen.ipynb: whether it runs, and whether it says what the program says.

    python3 scripts/notebook.py check    it is in the form of a notebook without outputs, and commands print what is below them
    python3 scripts/notebook.py write    writes below the commands what they print, and the form
    python3 scripts/notebook.py run      runs its cells from the top, on the machine that is here
    python3 scripts/notebook.py t4       runs them on a stub of a hosted machine with a T4

Commands are those behind "    $ " in its texts, as in docs/TOUR.md. FLEXGEN and MINI name other programs than ./flexgen and ./mini.
Cells run as in the page if nbclient, nbformat and ipykernel are installed, and else in this process.

On the stub nvidia-smi speaks of a T4, and the hub's package "downloads" the shipped model. Runs of flexgen bench take place on the
sim with the models that they name, so that a policy that does not fit a T4 fails, and each has to reach the figure that the text in
front of it predicts. What generates text does so on the CPU.

Needs only Python's standard library, 3.8 or later.
"""
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import types

NOTEBOOK = "docs/flexgen.ipynb"
COMMAND = re.compile(r"^    \$ ((?:.*\\\n)*.*\n)((?:    (?!\$ ).*\n?)*)", re.M)  # a command, what stands below it
MINUTES = 10  # that all cells may take

# ------------------------------------------------------------------ form and commands


def read():
    with open(NOTEBOOK, encoding="utf-8") as f:
        text = f.read()
    return text, json.loads(text)


def printed_by(command):
    """What a command prints, indented."""
    for program in ("flexgen", "mini"):
        command = command.replace(f"./{program} ", os.environ.get(program.upper(), f"./{program}") + " ")
    r = subprocess.run(["bash", "-o", "pipefail", "-c", command], stdout=subprocess.PIPE, text=True)
    if r.returncode:
        sys.exit(f"{NOTEBOOK}: exit status {r.returncode}: {command}")
    return "".join(f"    {line}\n" for line in r.stdout.splitlines())


def written_anew():
    """The notebook as text, in the form in which nbformat writes one, without outputs."""
    notebook = read()[1]
    for number, cell in enumerate(notebook["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            source = COMMAND.sub(lambda found: f"    $ {found[1]}{printed_by(found[1])}", source + "\n").rstrip("\n")
        cell.update(id=f"cell-{number}", metadata={}, source=source.splitlines(True))
        if cell["cell_type"] == "code":
            cell.update(outputs=[], execution_count=None)
    notebook.update(nbformat=4, nbformat_minor=5)
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def check():
    """Prints the lines that are no longer so."""
    old, new = read()[0].splitlines(), written_anew().splitlines()
    wrong = [line for line in new if line not in old] or ["(an order, or a line too many)"] * (old != new)
    print("".join(f"{NOTEBOOK}: should have {line.strip()}\n" for line in wrong), end="")
    return not wrong


# ------------------------------------------------------------------ cells


def run_in_page():
    """As a page does, with the packages for notebooks."""
    import nbclient
    import nbformat
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=60 * MINUTES, kernel_name="python3").execute()
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            print(output.get("text", output.get("data", {}).get("text/plain", "")), end="")


def run_here():
    """One cell after the other, in one namespace; a drawing is only opened."""
    shown = types.SimpleNamespace(SVG=open, display=lambda drawing: print(f"(drawing: {drawing.name})"))
    sys.modules.update({"IPython": types.ModuleType("IPython"), "IPython.display": shown})
    page = {}
    for cell in read()[1]["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), page)


def run():
    """Runs all cells. One that fails ends them with its error."""
    has_page = all(map(importlib.util.find_spec, ("nbclient", "nbformat", "ipykernel")))
    print(f"{NOTEBOOK}: {'in a kernel' if has_page else 'without a kernel: nbclient, nbformat and ipykernel are not all here'}")
    run_in_page() if has_page else run_here()


# ------------------------------------------------------------------ the stub

T4 = "--hardware hardware/t4.json --with cpu_bdw=12e9 --with cpu_flops=12e9 --with dtoc_bdw=0.5e9 --cpu-mem 9G"  # as in the texts
PREDICTED = re.compile(r"^    (?:(?:generation|total \S+ s) throughput|[|] opt-6.7b [|] \d+ [|] FlexGen[^|]*[|] [\d.]+ [|]) ([\d.]+)", re.M)
MEASURED = re.compile(r": measured (\S+) token/s")
THREE_DIGITS = .005  # as many has Table 2
STUBS = {  # of programs, and of the hub's package for Python
    "bin/nvidia-smi": "echo 'Tesla T4, 15360 MiB'",
    "bin/make": "echo 'flexgen: host device, AVX2, cuda device for sm_75, no MPI: no mpicc'",
    "scripts/gpu_check.sh": "echo \"$1 is skipped on a stub\" >$2",
    "flexgen": f"""words=$(echo "$*" | sed -E 's,--device cuda,,; s,build/hub/([^ ]*)-4bit,\\1 --compress-weight,; s,build/hub/,,')
case $1 in
bench) exec {{flexgen}} $words --device sim {T4} ;;
policy) exec {{flexgen}} $words {T4} ;;
*) exec {{flexgen}} $(echo "$*" | sed 's,--device cuda,--device host,') ;;
esac""",
    "huggingface_hub.py": """import glob, os, shutil, subprocess, sys

def snapshot_download(repository, local_dir, allow_patterns):
    os.makedirs(local_dir)
    for path in glob.glob("models/opt-tiny/*"):
        shutil.copy(path, local_dir)
    subprocess.run([sys.executable, "tests/make_bin.py", local_dir], check=True)
    os.remove(f"{local_dir}/model.safetensors")
"""}


def run_on_t4():
    """Runs the cells in a copy of the checkout that has the stubs, and compares with the texts. True if all is well."""
    with tempfile.TemporaryDirectory() as folder:
        for name in os.listdir("."):
            if name not in ("build", "scripts", "flexgen", ".git"):
                os.symlink(os.path.abspath(name), f"{folder}/{name}")
        subprocess.run(["cp", "-r", "scripts", folder], check=True)
        os.mkdir(f"{folder}/bin")
        for name, text in STUBS.items():
            text = text if name.endswith(".py") else "#!/bin/sh\n" + text.replace("{flexgen}", os.path.abspath("flexgen")) + "\n"
            with open(f"{folder}/{name}", "w", encoding="utf-8") as f:
                f.write(text)
            os.chmod(f"{folder}/{name}", 0o755)
        env = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "PYTHONPATH": folder}
        r = subprocess.run([sys.executable, "-B", "scripts/notebook.py", "run"], cwd=folder, env=env, stdout=subprocess.PIPE, text=True)
    print(r.stdout, end="")
    texts = ["".join(cell["source"]) for cell in read()[1]["cells"] if cell["cell_type"] == "markdown"]
    predicted = [float(x) for text in texts for x in PREDICTED.findall(text)]
    measured = [float(x) for x in MEASURED.findall(r.stdout)]
    same = len(measured) == len(predicted) > 0 and all(abs(m / p - 1) < THREE_DIGITS for m, p in zip(measured, predicted))
    if not same:
        print(f"{NOTEBOOK}: its texts predict {predicted}, and the cells behind them give {measured}")
    return r.returncode == 0 and same


def main():
    command = sys.argv[1] if len(sys.argv) == 2 else ""
    if command == "check":
        sys.exit(not check())
    elif command == "write":
        text = written_anew()
        with open(NOTEBOOK, "w", encoding="utf-8") as f:
            f.write(text)
    elif command == "run":
        run()
    elif command == "t4":
        sys.exit(not run_on_t4())
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
