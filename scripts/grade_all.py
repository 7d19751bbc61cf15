#!/usr/bin/env python3
"""Grades what students have handed in, as CSV on stdout: a line for each student and exercise, with the points of its steps.

    grade_all.py SUBMISSIONS [N...]   the exercises N, or all
    grade_all.py --hostile            whether what loops, forks, writes outside, connects, kills or exits harms nobody, and gets nothing

SUBMISSIONS/STUDENT/ is a starter tree that was worked in, or its changed files alone, each at its path. Of them the functions to be
written are copied, and nothing else, into a clean tree that has no solution. What is built and run there has limits of time,
memory and processes and no network; where the system allows namespaces it sees and ends no process but its own and can write
nowhere else, and as root it is another user. GRADE_SEED is the seed of the run for all; else it is drawn, and is in the last column.
"""
import concurrent.futures
import csv
import os
import queue
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time

import exercise

NOBODY = 61000  # as root, worker i is this user + i, so that no worker's processes count as another's
BUILD_SECONDS = 120
# Bytes, seconds of a processor, processes. Compiling flexgen.cu's emulation needs the most of the first.
LIMITS = ["--as=%d" % (4 << 30), "--cpu=120", "--fsize=%d" % (256 << 20), "--core=0"]
PROCESSES = "--nproc=400"  # in a user namespace they are counted apart, so that one submission's do not hinder another's

# ---- the sandbox ----------------------------------------------------------------------------------------------------

# $1 is the tree, the rest a command. Only the tree, which is then /mnt, and what is empty at first can be written.
CLOSED = r"""
mount --bind "$1" /mnt && cd /mnt && shift || exit 1
for empty in /tmp /var/tmp /dev/shm; do [ ! -d $empty ] || mount -t tmpfs -o size=256m tmpfs $empty || exit 1; done
while read -r _ at _ options _; do
    case $at in /mnt | /tmp | /var/tmp | /dev/shm | /proc*) continue ;; esac
    keep=
    for o in nosuid nodev noexec noatime relatime; do case ,$options, in *,$o,*) keep=$keep,$o ;; esac; done
    mount -o "remount,bind,ro$keep" "$at" 2>/dev/null || :
done </proc/self/mounts
exec prlimit %s setpriv --bounding-set=-all --inh-caps=-all --no-new-privs -- "$@"
""" % PROCESSES
NAMESPACES = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child=SIGKILL", "--net", "--ipc", "--mount-proc"]


class Tree:
    """A clean tree, which a worker uses again and again."""

    def __init__(self, original, number):
        self.user = NOBODY + number
        self.dir = tempfile.mkdtemp(prefix="flexgen-grade-")
        self.files = exercise.write_tree(self.dir, original, {})
        exercise.copy_objects(self.dir, original)
        self.own()
        limited = ["prlimit"] + LIMITS
        if os.geteuid() == 0:
            limited += ["setpriv", "--reuid=%d" % self.user, "--regid=%d" % self.user, "--clear-groups"]
        self.sandbox = limited + NAMESPACES + ["sh", "-c", CLOSED, "sh", self.dir]
        run = subprocess.run(self.sandbox + ["true"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.closed = run.returncode == 0
        if not self.closed:
            self.sandbox = limited + ["prlimit", PROCESSES, "env", "-C", self.dir]

    def own(self):
        if os.geteuid() == 0:
            subprocess.check_call(["chown", "-R", "%d:%d" % (self.user, self.user), self.dir])

    def write(self, files):
        # what was run here before may have changed anything that is not built
        for path in list(self.files):
            full = os.path.join(self.dir, path)
            text = self.files[path]
            if os.path.islink(full) or not os.path.isfile(full) or open(full, "rb").read() != (text if isinstance(text, bytes) else text.encode()):
                del self.files[path]
        for path in ("build/test_grade", "build/emulated/test_grade", "build/mini_kernels.so"):
            if os.path.lexists(os.path.join(self.dir, path)):
                os.remove(os.path.join(self.dir, path))
        self.files = exercise.write_tree(self.dir, files, self.files)
        self.own()


# ---- a submission ---------------------------------------------------------------------------------------------------

WORDS = r"\b(asm|__asm|__asm__|__attribute__|__attribute|constructor|_Pragma)\b"


def refused(body):
    """Why a body may not be compiled: it is to be one function's, and to run where it is called."""
    code = re.sub(r'/\*.*?\*/|//[^\n]*|"(\\.|[^"\\\n])*"|\'(\\.|[^\'\\\n])*\'', " ", body, flags=re.S)
    depth = 0
    for i, c in enumerate(code):
        depth += {"{": 1, "}": -1}.get(c, 0)
        if depth == 0 and code[i + 1:].strip():
            return "it goes on behind its function"
    if re.search(r"^[ \t]*(#(?!pragma unroll)|%:|\?\?=)", code, re.M) or "<%" in code or "%>" in code or "\\\n" in code:
        return "it has a line for the preprocessor"
    found = re.search(WORDS, code)
    return "it has %s" % found[0] if found else None


def submitted(dir, original, entries):
    """({function: body}, why it was refused) of those that were written, out of a student's files."""
    bodies = {}
    for e in exercise.of(entries, "blank"):
        paths, *names = e["rest"].split()
        for path in exercise.matching(original, paths):
            at = os.path.join(dir, path)
            if not os.path.isfile(at) or not os.path.realpath(at).startswith(os.path.realpath(dir) + os.sep):
                continue
            with open(at, errors="replace") as f:
                source = f.read()
            try:
                found = [(name, source[begin:end]) for name, _, begin, end in exercise.functions(source) if name in names]
            except ValueError:  # a function that does not end
                return {}, "%s cannot be read: its functions' closing braces begin a line" % path
            for name, body in found:
                if name in bodies:
                    return {}, "%s is there twice" % name
                if not re.match(r"{\s*/\* (Exercise \d+: write this|Left out)", body):
                    bodies[name] = body
    for name, body in bodies.items():
        why = refused(body)
        if why:
            return {}, "%s: %s" % (name, why)
    return bodies, None


def grade(tree, original, exercises, number, bodies, seed):
    """(points of each step, a note)"""
    entries, names = exercises[number], [n for e in exercise.of(exercises[number], "blank") for n in e["rest"].split()[1:]]
    steps = [e["rest"].partition(" ")[::2] for e in exercise.of(entries, "step")]
    program = "build/%stest_grade" % ("emulated/" if exercise.is_kernel(entries) else "")
    tree.write(exercise.with_bodies(exercise.starter(original, exercises, [number]), entries, bodies))
    env = dict(os.environ, CFLAGS="-O1 -march=native", SETUP="", HOME="/tmp")
    for name in [n for n in env if n.startswith("MAKE") or n in ("BUILD", "SUITE", "GRADE_SEED")]:
        del env[name]
    try:
        built = subprocess.run(tree.sandbox + ["make", "-s", program], capture_output=True, text=True, errors="replace", env=env,
                               stdin=subprocess.DEVNULL, timeout=BUILD_SECONDS)
    except subprocess.TimeoutExpired:
        return [0] * len(steps), "compiling took more than %d s" % BUILD_SECONDS
    if built.returncode:
        errors = re.findall(r"error: (.*)", built.stderr) or built.stderr.splitlines()[-1:] or ["?"]
        return [0] * len(steps), "does not compile: %s" % errors[0]
    points, notes = [], []
    for worth, test in steps:
        passed, said = exercise.run_step(program, test, seed, tree.sandbox)
        points.append(int(worth) if passed else 0)
        if not passed:
            notes.append("%s: %s" % (test, (said or ["?"])[0]))
    missing = [n for n in names if n not in bodies]
    return points, "; ".join((["without " + " ".join(missing)] if missing else []) + notes[:1])


def grade_all(root, numbers, out):
    original, exercises = exercise.tracked(), exercise.read_table(exercise.TABLE)
    seed = os.environ.get("GRADE_SEED") or str(secrets.randbelow(10**6))
    students = sorted(d for d in os.listdir(root) if os.path.isdir(os.path.join(root, d)))
    trees, rows = queue.Queue(), []
    workers = [Tree(original, i) for i in range(min(os.cpu_count() or 1, max(1, len(students))))]
    if not workers[0].closed:
        print("no namespaces here: what is graded has limits and no rights, but sees the network and other files", file=sys.stderr)
    for tree in workers:
        trees.put(tree)

    def one(student, number, bodies):
        tree, begin = trees.get(), time.time()
        try:
            points, note = grade(tree, original, exercises, number, bodies, seed)
        finally:
            trees.put(tree)
        return points, note, time.time() - begin

    jobs = []
    with concurrent.futures.ThreadPoolExecutor(len(workers)) as pool:
        for number in numbers or sorted(exercises):  # one after the other: less is to be built
            for student in students:
                bodies, why = submitted(os.path.join(root, student), original, exercises[number])
                if bodies or why:
                    jobs.append((student, number, why, None if why else pool.submit(one, student, number, bodies)))
        table = csv.writer(out)
        table.writerow(["student", "exercise", "points", "of", "steps", "seconds", "note", "seed"])
        for student, number, why, job in jobs:
            worth = [int(e["rest"].split()[0]) for e in exercise.of(exercises[number], "step")]
            points, note, seconds = job.result() if job else ([0] * len(worth), "refused: " + why, 0)
            rows.append((student, number, sum(points), note))
            table.writerow([student, number, sum(points), sum(worth), " ".join(map(str, points)), "%.1f" % seconds, note, seed])
            out.flush()
    for tree in workers:
        shutil.rmtree(tree.dir, ignore_errors=True)
    return rows


# ---- a hostile course -----------------------------------------------------------------------------------------------


def hostile():
    """Of submissions for exercise 3 the honest one gets its points, the others nothing, and nothing is left of them."""
    original, exercises = exercise.tracked(), exercise.read_table(exercise.TABLE)
    path, number = "branches/ledger.c", 3
    tree = Tree(original, 0)
    shutil.rmtree(tree.dir, ignore_errors=True)
    if not tree.closed:
        print("the hostile course is left out: no namespaces here, and without them it would do harm")
        return True
    with tempfile.TemporaryDirectory() as root, socket.socket() as server:
        marks = os.path.join(root, "marks")
        os.mkdir(marks)
        os.chmod(marks, 0o777), os.chmod(root, 0o755)
        server.bind(("127.0.0.1", 0)), server.listen(), server.setblocking(False)
        mark = "mark-%s" % secrets.token_hex(8)
        places = [os.path.join(d, mark) for d in (marks, "/tmp", "/var/tmp", "/dev/shm", os.getcwd(), os.path.expanduser("~"))]
        touch = "".join('    { extern int creat(const char *, unsigned); creat("%s", 0666); }\n' % p for p in places)
        port = server.getsockname()[1]
        submissions = {
            "honest": None,
            "loops": "    for (volatile int i = 0; i >= 0; i = 1) {}\n    return false;\n",
            "forks": "    extern int fork(void);\n    while (fork() < 10000000) {}\n    return false;\n",
            "leaves_a_daemon": "    extern int fork(void), setsid(void);\n    extern unsigned sleep(unsigned);\n"
                               "    if (!fork()) { setsid(); for (;;) sleep(1); }\n    return false;\n",
            "writes_outside": touch + "    return false;\n",
            "exits_0": "    extern void _Exit(int);\n    _Exit(0);\n",
            "says_passed": exercise.ESCAPE.replace("TEST", "without a limit, and up to it, all enter"),
            "kills": "    extern int kill(int, int), getppid(void);\n    kill(getppid(), 9), kill(-1, 9);\n    return false;\n",
            "takes_memory": "    for (int i = 0; i < 1000; i++) memset(xcalloc(1 << 28, 1), 1, 1 << 28);\n    return false;\n",
            "connects": "    extern int socket(int, int, int), connect(int, const void *, unsigned);\n"
                        "    const unsigned char to[16] = {2, 0, %d, %d, 127, 0, 0, 1};\n"
                        "    connect(socket(2, 1, 0), to, 16);\n    return false;\n" % (port >> 8, port & 255),
            "goes_on_behind": "    return true;\n }\n static void __attribute__((constructor)) f(void) {\n" + touch,
            "includes": "#include \"/etc/passwd\"\n    return true;\n",
        }
        for name, body in submissions.items():
            files = {path: original[path]} if body is None else exercise.with_bodies(
                {path: original[path]}, exercises[number], {"pages_fit": "{\n%s}" % body})
            os.makedirs(os.path.dirname(os.path.join(root, name, path)))
            with open(os.path.join(root, name, path), "w") as f:
                f.write(files[path])
        os.environ.setdefault("GRADE_SECONDS", "3")
        begin = time.time()
        rows = [r for r in grade_all(root, [number], sys.stdout) if r[0] != "marks"]
        wrong = ["%s got %d points" % (s, p) for s, _, p, _ in rows if p != (10 if s == "honest" else 0)]
        wrong += ["%s was not graded" % s for s in submissions if s not in [r[0] for r in rows]]
        wrong += ["%s was written" % p for p in places if os.path.lexists(p)]
        try:
            server.accept()
            wrong.append("a connection was made")
        except BlockingIOError:
            pass
        wrong += ["process %s is left" % p for p in left()]
        print("%d submissions in %.0f s: %s" % (len(rows), time.time() - begin, "; ".join(wrong) or "nobody was harmed"))
        return not wrong


def left():
    """Processes that run a grader."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open("/proc/%s/cmdline" % pid) as f:
                if f.read().startswith("build/test_grade\0--only\0without a limit"):
                    yield pid
        except OSError:
            pass


if __name__ == "__main__":
    if sys.argv[1:] == ["--hostile"]:
        sys.exit(not hostile())
    if len(sys.argv) < 2 or not os.path.isdir(sys.argv[1]) or not all(a.isdigit() for a in sys.argv[2:]):
        sys.exit(__doc__)
    grade_all(sys.argv[1], [int(a) for a in sys.argv[2:]], sys.stdout)
