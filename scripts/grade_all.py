#!/usr/bin/env python3
"""Grades what students have handed in, as CSV on stdout: a line for each student and exercise, with the points of its steps.

    grade_all.py SUBMISSIONS [N...]   the exercises N, or all
    grade_all.py --alike SUBMISSIONS [N...]   which submissions are alike beyond renaming (scripts/alike.py), as CSV
    grade_all.py --hostile            whether what loops, forks, writes outside, connects, kills, exits or cheats harms nobody, and
                                      gets nothing; and whether honest students get their points

SUBMISSIONS/STUDENT/ is a starter tree that was worked in, or its changed files alone. SUBMISSIONS/variants.csv, if it is there, says which
variant each has (exercise.sh --variant); a student's own files have no say in that. Of them the files with the functions to be written
are compiled and linked with a kit (scripts/exam.py), which has no solution of the exercise; the judge is another program. What was
printed lies in SUBMISSIONS.logs/STUDENT-N.log.

Each student and exercise has a directory of its own, which has nothing else. What is built and run there has limits of time, memory,
files and processes; where the system allows namespaces it sees nothing but the compiler, the libraries, the kit, the shipped model and
that directory, and has no network; as root it is another user. GRADE_SEED is the seed of the run for all; else it is drawn, and is in
the last column.
"""
import concurrent.futures
import csv
import hashlib
import os
import queue
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time

import alike
import exam
import exercise

NOBODY = 61000  # as root, worker i is this user + i, so that no worker's processes count as another's
# Bytes, seconds of a processor, processes. Compiling flexgen.cu's emulation needs the most of the first.
LIMITS = ["--as=%d" % (4 << 30), "--cpu=120", "--fsize=%d" % (64 << 20), "--nofile=256", "--core=0"]
PROCESSES = "--nproc=400"  # in a user namespace they are counted apart, so that one submission's do not hinder another's
MOST_LOG = 1 << 20  # bytes

# ---- the sandbox ----------------------------------------------------------------------------------------------------

# $1 is a directory with data/, $2 a kit, $3 the directory of the submission, $4 rw or ro, $5 that of CUDA's headers or /, $6 an empty one; the
# rest is a command. Its root has the system's compiler and libraries, /kit, /data, and /work, which is the only one that rests.
CLOSED = r"""
set -e
PATH=$PATH:/usr/sbin:/sbin
new=$6
mount -t tmpfs -o size=64m,mode=755 tmpfs "$new"
show() { # PATH AS MODE: a directory or file of the system, as it stands there
    if [ -L "$1" ]; then mkdir -p "$new${2%/*}"; cp -P "$1" "$new$2"; return; fi
    [ -e "$1" ] || return 0
    if [ -d "$1" ]; then mkdir -p "$new$2"; else mkdir -p "$new${2%/*}"; : >"$new$2"; fi
    mount --bind "$1" "$new$2"
}
for dir in /usr/bin /usr/lib /usr/lib32 /usr/lib64 /usr/libexec /usr/include /bin /lib /lib32 /lib64 /etc/alternatives /etc/ld.so.cache; do
    show $dir $dir
done
[ "$5" = / ] || show "$5" "$5"
show "$2" /kit
show "$1/data" /data
show "$3" /work
for device in null zero urandom; do show /dev/$device /dev/$device; done
while read -r _ at _ options _; do
    case $at in "$new"/dev/*) continue ;; "$new"/work) [ "$4" = ro ] || continue ;; "$new"/*) ;; *) continue ;; esac
    keep=
    for o in nosuid nodev noexec noatime relatime; do case ,$options, in *,$o,*) keep=$keep,$o ;; esac; done
    mount -o "remount,bind,ro$keep" "$at"
done </proc/self/mounts
for empty in /tmp /var/tmp /dev/shm; do mkdir -p "$new$empty"; mount -t tmpfs -o size=256m,mode=1777 tmpfs "$new$empty"; done
mkdir -p "$new/proc" "$new/old"
mount -t proc proc "$new/proc"
mount -o remount,bind,ro "$new"
cd "$new"
pivot_root . old
cd /
umount -l /old
cd /data
shift 6
# This shell stays, and ends with its parent: it is the first process here, with which all others end, and nobody here may change it.
status=0
prlimit PROCESSES setpriv --bounding-set=-all --inh-caps=-all --no-new-privs -- "$@" || status=$?
exit $status
""".replace("PROCESSES", PROCESSES)
NAMESPACES = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child=SIGKILL", "--net", "--ipc", "--uts"]


class Stage:
    """A directory that others may read, with the kits and what the exams read. Of these a submission sees the kit of its exercise."""

    def __init__(self, original, exercises, numbers):
        self.dir = tempfile.mkdtemp(prefix="flexgen-grade-")
        self.judge = os.path.join(self.dir, "judge")  # which is not in the kit that is seen
        for n in numbers:
            exercise.make_kit(self.kit(n), original, exercises, [n])
            os.replace(os.path.join(self.kit(n), "judge"), self.judge)
        for path, text in original.items():
            shown = path.startswith(("models/opt-tiny/", "hardware/")) or (
                path.startswith("tests/golden/opt-pre/") and not path.endswith("golden.bin"))
            if shown:
                exercise.write_tree(os.path.join(self.dir, "data"), {path: text})
        subprocess.check_call(["chmod", "-R", "a+rX", self.dir])

    def kit(self, number):
        """The kit of an exercise alone: that of another has the solution of this one."""
        return os.path.join(self.dir, "kits", "%d" % number, "kit")


class Closed:
    """Where a worker builds and runs: a directory of its own for each submission, and the sandbox."""

    def __init__(self, stage, number):
        self.user, self.stage = NOBODY + number, stage
        self.judge = stage.judge
        self.root = os.path.join(stage.dir, "worker%d" % number)
        os.makedirs(os.path.join(self.root, "new"))
        os.chmod(self.root, 0o755)
        self.flags = ""
        self.limited = ["prlimit"] + LIMITS
        if os.geteuid() == 0:
            self.limited += ["setpriv", "--reuid=%d" % self.user, "--regid=%d" % self.user, "--clear-groups"]
        self.closed = True
        self.fresh(os.path.join(stage.dir, "kit"))
        run = subprocess.run(self.words("[ -e %s ] || echo closed" % shlex.quote(stage.dir), True), capture_output=True, text=True)
        self.closed = run.stdout == "closed\n"
        if not self.closed:
            self.why = run.stderr.strip().splitlines()[-1:] or ["they are not allowed"]

    def fresh(self, kit):
        """An empty directory for the next submission, and the kit that it sees."""
        self.kit = kit
        self.work = os.path.join(self.root, "work")
        shutil.rmtree(self.work, ignore_errors=True)
        if os.path.lexists(self.work):
            subprocess.call(["chmod", "-R", "u+rwX", self.work])
            shutil.rmtree(self.work)
        os.mkdir(self.work)
        if os.geteuid() == 0:
            os.chown(self.work, self.user, self.user)
        self.inside = ("/kit", "/work") if self.closed else (self.kit, self.work)

    def words(self, script, writes):
        run = ["env", "-i", "PATH=/usr/bin:/bin:/usr/sbin:/sbin", "HOME=/tmp", "LC_ALL=C.UTF-8", "sh", "-c", script]
        if not self.closed:
            return [*self.limited, "prlimit", PROCESSES, "env", "-C", os.path.join(self.stage.dir, "data"), *run]
        return [*self.limited, *NAMESPACES, "sh", "-c", CLOSED, "sh", self.stage.dir, self.kit, self.work,
                "rw" if writes else "ro", exam.cuda_include() or "/", os.path.join(self.root, "new"), *run]

    def own(self):
        if os.geteuid() == 0:
            subprocess.check_call(["chown", "-hR", "%d:%d" % (self.user, self.user), self.work])


def is_closed(original, exercises):
    """Whether this system allows namespaces."""
    stage = Stage(original, exercises, [])
    try:
        return Closed(stage, 0).closed
    finally:
        shutil.rmtree(stage.dir, ignore_errors=True)


# ---- grades ---------------------------------------------------------------------------------------------------------


def cell(text):
    """A text that no spreadsheet takes for a formula, of one line."""
    text = "".join(c if c.isprintable() else "?" for c in str(text))
    return "'" + text if text.startswith(("=", "+", "-", "@")) else text


def short(name):
    """A name with which that of a file may begin."""
    whole = os.fsencode(name)
    return name if len(whole) < 200 else "%s-%s" % (name[:40], hashlib.sha256(whole).hexdigest()[:16])


def students_of(root):
    """{student: variant}"""
    students, noted = sorted(d for d in os.listdir(root) if os.path.isdir(os.path.join(root, d))), os.path.join(root, "variants.csv")
    known = exercise.read_variants(noted)
    missing = [s for s in students if s not in known]
    if known and missing:
        sys.exit("%s: has no variant of %s; add a line NAME,VARIANT for each" % (noted, ", ".join(missing)))
    most = exercise.highest_variant(exercise.read_table(exercise.TABLE))
    if max(known.values(), default=0) > most:
        sys.exit("%s: variants are 0 to %d" % (noted, most))
    return {s: known.get(s, 0) for s in students}


def other_variant(files, spec):
    """A note if a file was given out for another variant than the one that it is graded by; its author can write what they want there, so
    this decides nothing."""
    said = {int(v) for text in files.values() for v in re.findall(r"Exercise %d, variant (\d+): write this" % spec["exercise"], text)}
    own = min(said - {spec["variant"]}, default=None)
    return "" if own is None else "its file was given out as variant %d, and it is graded as variant %d" % (own, spec["variant"])


def grade(place, spec, root, student, seed, log):
    """(points of each step, a note) of what a student has handed in for an exercise."""
    none = [0] * len(spec["steps"])
    if os.path.islink(os.path.join(root, student)):
        return none, "refused: the folder is a link"
    files, note = exam.handed_in(os.path.join(root, student), spec)
    if not files:
        return none, note
    place.fresh(place.stage.kit(spec["exercise"]))
    steps = exam.grade(spec, files, place, seed, log)
    if isinstance(steps, str):
        return none, steps
    note = "; ".join(filter(None, [note, other_variant(files, spec)]))
    wrong = ["%s: %s" % (test, (said or ["?"])[0]) for (worth, test, _), (points, said, _) in zip(spec["steps"], steps) if points < worth]
    return [points for points, _, _ in steps], "; ".join([note] * bool(note) + wrong[:1])


def numbers_of(exercises, numbers):
    """Those that are asked for, or all."""
    if not set(numbers) <= set(exercises):
        sys.exit("grade_all.sh SUBMISSIONS [N...]: the exercises are 1 to %d" % len(exercises))
    return numbers or sorted(exercises)


def grade_all(root, numbers, out):
    original, exercises = exercise.tracked(), exercise.read_table(exercise.TABLE)
    numbers = numbers_of(exercises, numbers)
    seed = os.environ.get("GRADE_SEED") or str(secrets.randbelow(10**6))
    students = students_of(root)
    logs = os.path.abspath(root) + ".logs"
    os.makedirs(logs, exist_ok=True)
    stage = Stage(original, exercises, numbers)
    try:
        exams = {n: exam.read_kit(stage.kit(n), n) for n in numbers}
        workers = queue.Queue()
        places = [Closed(stage, i) for i in range(min(os.cpu_count() or 1, max(1, len(students))))]
        if not places[0].closed:
            print("no namespaces here (%s): what is graded has limits, but can see this computer's files and network, and leave processes "
                  "behind; grade in a container" % places[0].why[0], file=sys.stderr)
        for place in places:
            workers.put(place)

        def variant_of(student, number):
            return students[student] if students[student] in exercise.variants(exercises[number]) else 0

        def one(student, number):
            place, begin, name = workers.get(), time.time(), "%s-%d.log" % (short(student), number)
            log = os.path.join(logs, name)
            try:
                open(log, "wb").close()
                points, note = grade(place, {**exams[number], "variant": variant_of(student, number)}, root, student, seed, log)
            except Exception as e:  # a submission must not keep others from being graded
                points, note = [0] * len(exams[number]["steps"]), "cannot be graded: %s" % type(e).__name__
            finally:
                workers.put(place)
            if os.path.getsize(log) > MOST_LOG:
                os.truncate(log, MOST_LOG)
            return points, note, time.time() - begin

        rows, table = [], csv.writer(out)
        table.writerow(["student", "exercise", "points", "of", "steps", "seconds", "note", "variant", "seed"])
        with concurrent.futures.ThreadPoolExecutor(len(places)) as pool:
            jobs = [(student, n, pool.submit(one, student, n)) for n in numbers for student in students]
            for student, n, job in jobs:
                points, note, seconds = job.result()
                worth = [w for w, _, _ in exams[n]["steps"]]
                rows.append((student, n, sum(points), note))
                table.writerow([cell(student), n, sum(points), sum(worth), " ".join(map(str, points)), "%.1f" % seconds, cell(note),
                                variant_of(student, n), seed])
                out.flush()
        return rows
    finally:
        shutil.rmtree(stage.dir, ignore_errors=True)


# ---- what is alike --------------------------------------------------------------------------------------------------


def report_alike(root, numbers, out):
    """Prints the pairs that are alike, the most alike first; on standard error where nothing can be told. Nothing is compiled."""
    original, exercises = exercise.tracked(), exercise.read_table(exercise.TABLE)
    numbers, known, pairs = numbers_of(exercises, numbers), alike.Known(original, exercises), []
    objects = exercise.Objects(original, os.path.join(exercise.build_dir(), "kit"))
    for n in numbers:
        spec, _ = exercise.exam_of(original, exercises, n, objects)
        found = {student: exam.handed_in(os.path.join(root, student), spec)[0] for student in students_of(root)}
        found, few = alike.alike(known, spec, {student: files for student, files in found.items() if files})
        pairs += [(pair, n) for pair in found]
        if few:
            print("exercise %d: too short to tell: %s" % (n, ", ".join(map(cell, few))), file=sys.stderr)
    table = csv.writer(out)
    table.writerow(["exercise", "alike", "pieces", "student", "student"])
    table.writerows([n, "%.0f%%" % (100 * share), count, cell(a), cell(b)] for (share, count, a, b), n in sorted(pairs, reverse=True))


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments == ["--hostile"]:
        import hostile
        sys.exit(not hostile.hostile())
    work = report_alike if arguments[:1] == ["--alike"] else grade_all
    root, *words = arguments[work == report_alike:] or [""]
    if not root:
        sys.exit(__doc__)
    if not os.path.isdir(root):
        sys.exit("grade_all.sh SUBMISSIONS [N...]: there is no directory %s" % root)
    for a in words:
        if not a.isdigit():
            sys.exit("grade_all.sh SUBMISSIONS [N...]: %s is no number of an exercise" % a)
    work(root, [int(a) for a in words], sys.stdout)
