#!/usr/bin/env python3
"""Checks a workflow of GitHub: scripts/workflow.py [FILE]; without one, .github/workflows/ci.yml.

It may only read the repository. Each action has a major version. Bash can read each step, and README, docs/COMPUTERS.md or a script of
.ci names each line of it, sudo apart. If a step of a job fails, the job keeps its logs. Needs PyYAML.
"""
import re
import subprocess
import sys

import yaml

NAMED_IN = ("README.md", "docs/COMPUTERS.md", ".ci/run", ".ci/install")
LOGS = "build/**/*.log"


def wrong_line(line, named):
    command = re.sub("^sudo ", "", line)
    if not re.search(rf"(?<![\w./-]){re.escape(command)}(?![\w./-])", named):
        yield f"no file of {', '.join(NAMED_IN)} names: {command}"


def wrong_step(step, named):
    action, script = step.get("uses"), step.get("run", "")
    if action and not re.fullmatch(r"actions/[\w-]+@v\d+", action):
        yield f"{action}: expected an action of GitHub's own, by its major version"
    if subprocess.run(["bash", "-n"], input=script, text=True, stderr=subprocess.DEVNULL).returncode:
        yield f"bash cannot read: {script}"
    for line in script.splitlines():
        yield from wrong_line(line, named)


def keeps_logs(step):
    return step.get("if") == "failure()" and "/upload-artifact@" in step.get("uses", "") and step["with"]["path"] == LOGS


def wrong(workflow, named):
    if workflow.get("permissions") != {"contents": "read"}:
        yield "permissions: expected contents: read, and no other"
    for name, job in workflow["jobs"].items():
        for step in job["steps"]:
            yield from (f"{name}: {said}" for said in wrong_step(step, named))
        if "permissions" in job:
            yield f"{name}: has permissions of its own"
        if not keeps_logs(job["steps"][-1]):
            yield f"{name}: its last step does not keep {LOGS} if another has failed"


def read(path):
    with open(path, encoding="utf-8") as f:
        return f.read()


def main():
    workflow = yaml.safe_load(read((sys.argv[1:] or [".github/workflows/ci.yml"])[0]))
    named = re.sub(r" *\\\n *", " ", "\n".join(map(read, NAMED_IN)))  # a command goes on behind a backslash
    said = list(wrong(workflow, named))
    print("".join(f"workflow.py: {line}\n" for line in said), end="")
    sys.exit(1 if said else 0)


if __name__ == "__main__":
    main()
