"""Entries to the open project that cheat or do harm, and those that do not, for `project.py hostile` and the suite `project`.

The honest ones are the baseline, one whose keys have 3 bits, and one that is exact. Of the others none may have a row, but for those
that put themselves in the place of the clock, or write outside: these have the baseline's figures, no more.
"""
import json
import os
import secrets
import tempfile

import exam
import project

COARSER_KEYS = ("    (void)m;\n    return 4;\n", "    return m.what == KEYS ? 3 : 4;\n")
EXACT = {
    "pack": "{\n    int n = m.rows * m.cols;\n    for (int e = 0; e < n; e++) {\n        f16 h = f32_to_f16(x[e]);\n"
            "        memcpy(to + 2 * e, &h, 2);\n    }\n    return 2 * n;\n}",
    "unpack": "{\n    for (size_t e = 0; e < bytes / 2; e++) {\n        f16 h;\n        memcpy(&h, from + 2 * e, 2);\n"
              "        x[e] = f16_to_f32(h);\n    }\n}"}
# Blocks that have room for F16, as exact needs it.
SMALL = {"percent": [0, 50, 0, 20, 0, 100], "gpu_batch_size": 4, "num_gpu_batches": 4}


def files():
    return project.read(project.HERE + "/project.c"), json.loads(project.read(project.HERE + "/entry.json"))


def entry(code, policy):
    return {"project.c": code, "entry.json": json.dumps(policy) if isinstance(policy, dict) else policy}


def honest():
    code, policy = files()
    return {"coarser keys": entry(code.replace(*COARSER_KEYS), policy),
            "exact": entry(exam.with_bodies(code, EXACT), dict(policy, exact=True, **SMALL))}


def begins(*lines):
    """An entry that does this before it answers."""
    code, policy = files()
    return entry(code + "#include <fcntl.h>\n#include <signal.h>\n#include <unistd.h>\n"
                 "__attribute__((constructor)) static void begin(void) {\n    %s\n}\n" % "\n    ".join(lines), policy)


def dishonest():
    code, policy = files()
    repository, own = os.getcwd(), dict(policy, schedule="own")

    def bodies(more="", **bodies):
        return entry(more + exam.with_bodies(code, {name: "{\n    %s\n}" % body for name, body in bodies.items()}), policy)

    def by_file(path):
        name = '"%s"' % path
        return bodies("#include <stdio.h>\n",
                      pack="FILE *f = fopen(%s, \"wb\"); if (f) { fwrite(x, 4, m.rows * m.cols, f); fclose(f); } return 0;" % name,
                      unpack="FILE *f = fopen(%s, \"rb\"); if (f) { (void)!fread(x, 4, m.rows * m.cols, f); fclose(f); }" % name)

    # a lock for each number of a page: where it begins says the number
    locks = """
#include <fcntl.h>
#include <unistd.h>
static void lock(struct flock *l, int how, int type, long start, long len) {
    static int file;
    if (!file) file = open("/work/entry", O_RDONLY);
    *l = (struct flock){.l_type = type, .l_start = start, .l_len = len};
    fcntl(file, how, l);
}
"""
    by_locks = exam.bodies_in(code, ["pack", "unpack"])
    by_locks["pack"] = """{
    struct flock l;
    if (m.what != WEIGHTS) {
        lock(&l, F_SETLK, F_UNLCK, 0, 0);
        for (int e = m.rows * m.cols - 1; e >= 0; e--) lock(&l, F_SETLK, F_RDLCK, ((long)e << 17) + f32_to_f16(x[e]), 1);
        return 0;
    }
""" + by_locks["pack"][1:]
    by_locks["unpack"] = """{
    struct flock l;
    if (m.what != WEIGHTS) {
        for (int e = 0; e < m.rows * m.cols; e++) lock(&l, F_GETLK, F_WRLCK, (long)e << 17, 1 << 17), x[e] = f16_to_f32((f16)l.l_start);
        return;
    }
""" + by_locks["unpack"][1:]

    model = "%s/%s/model.safetensors" % (repository, project.MODEL)
    return {
        "wrong numbers": bodies(unpack="memset(x, 0, 4 * m.rows * m.cols);"),
        "reads no page": bodies(choose_pages="memset(load, 0, pages);"),
        "gives no number": bodies(unpack="for (int e = 0; e < m.rows * m.cols; e++) x[e] = NAN;"),
        "remembers what it packed": bodies("static float kept[1 << 20];\n", pack="memcpy(kept, x, 4 * m.rows * m.cols); return 0;",
                                           unpack="memcpy(x, kept, 4 * m.rows * m.cols);"),
        **{"hands over in " + at: by_file(at) for at in ("/tmp/x", "/work/x", "/dev/shm/x", "/kit/x", "/var/tmp/x")},
        "hands over by a socket": bodies(
            "#include <sys/socket.h>\n#include <sys/un.h>\n#include <unistd.h>\n",
            pack="static int s; struct sockaddr_un a = {1, \"\\0flexgen\"}; if (!s) s = socket(1, 2, 0); "
                 "sendto(s, x, 1 << 15, 64, (void *)&a, sizeof a); return 0;",
            unpack="static int s; struct sockaddr_un a = {1, \"\\0flexgen\"}; if (!s) s = socket(1, 2, 0), bind(s, (void *)&a, sizeof a); "
                   "recv(s, x, 1 << 15, 64);"),
        "hands over by what it prints": bodies(
            "#include <fcntl.h>\n#include <unistd.h>\n",
            pack="(void)!ftruncate(1, 0), (void)!write(1, x, 4 * m.rows * m.cols); return 0;",
            unpack="static int f; if (!f) f = open(\"/proc/self/fd/1\", O_RDONLY); (void)!pread(f, x, 4 * m.rows * m.cols, 0);"),
        "hands over by locks": entry(locks + exam.with_bodies(code, by_locks), policy),
        "knows the answers": begins("static int32_t zeros[1 << 20];", "int32_t n = 1 << 18;",
                                    "for (;;) if (write(3, &n, 4) + write(3, zeros, n) < 0) _exit(0);"),
        "reads the model": begins("if (open(\"%s\", O_RDONLY) < 0) _exit(1);" % model),
        "reads the texts": begins("if (open(\"%s/%s/stories.txt\", O_RDONLY) < 0) _exit(1);" % (repository, project.MODEL)),
        "asks its parent": begins("char at[40];", "snprintf(at, sizeof at, \"/proc/%d/mem\", getppid());",
                                  "if (open(at, O_RDWR) < 0) _exit(1);"),
        "loops": begins("for (;;) {}"),
        "ends": begins("_exit(0);"),
        "floods": begins("static char much[1 << 16];", "while (write(3, much, sizeof much) > 0) {}"),
        "forks": begins("while (fork() < 10000000) {}"),
        "kills": begins("kill(getppid(), 9);", "kill(-1, 9);", "_exit(0);"),
        "takes too many bytes": bodies(pack="return 3 * (size_t)m.rows * m.cols;"),
        "takes less than none": bodies(pack="return (size_t)-1;"),
        "includes the text": entry('#include "%s/%s/stories.txt"\n' % (repository, project.MODEL) + code, policy),
        "prints figures": begins("puts(\"{\\\"token_s\\\": 1e9, \\\"perplexity\\\": 1}\");", "fflush(stdout);", "_exit(0);"),
        "hides a model": entry(code + "// %s\n" % ("x" * project.MOST_SOURCE), policy),
        "claims to be exact": entry(code, dict(policy, exact=True)),
        "has no memory": entry(code, dict(policy, percent=[100, 0, 100, 0, 100, 0])),
        "has a block of millions": entry(code, dict(policy, gpu_batch_size=10**9)),
        "is not a number": entry(code, json.dumps(policy).replace("99.5", "NaN")),
        "brings a clock": entry(code, dict(policy, token_s=1e9)),
        "is no JSON": entry(code, "[" * 100000),
        "lets one block in": entry(exam.with_bodies(code, {"may_enter": "{ return line->sweep ? 0 : line->seats; }"}), own),
        "never lets anybody in": entry(exam.with_bodies(code, {"may_enter": "{ (void)line; return 0; }"}), own),
        "lets nobody in": entry(exam.with_bodies(code, {"may_enter": "{ (void)line; for (;;) {} }"}), own),
    }


def harmless(mark):
    """Entries that change nothing: they name the judge's functions, which are in another program, or write to where only they see it."""
    code, policy = files()
    names = ["sim_open", "schedule_run", "judged_share", "judged_attention", "reference_forward"]
    clock = "#include <time.h>\nint clock_gettime(clockid_t c, struct timespec *t) { (void)c, memset(t, 0, sizeof *t); return 0; }\n"
    return {"replaces the clock": entry(code + clock + "".join("double %s(void) { return 0; }\n" % n for n in names), policy),
            "lets too many in": entry(exam.with_bodies(code, {"may_enter": "{ (void)line; return 1 << 30; }"}), dict(policy, schedule="own")),
            "writes outside": begins("if (creat(\"%s\", 0666) < 0) _exit(1);" % mark)}


def course(entries, predictions=()):
    """The rows of the board of these entries, {name: row}; predictions: [(name, token/s)]."""
    with tempfile.TemporaryDirectory() as dir:
        os.chmod(dir, 0o755)
        for name, texts in entries.items():
            at = os.path.join(dir, "in", name.replace("/", "_"))
            os.makedirs(at)
            for file, text in texts.items():
                with open(os.path.join(at, file), "w") as f:
                    f.write(text)
        os.mkdir(os.path.join(dir, "predictions"))
        for name, speed in predictions:
            with open(os.path.join(dir, "predictions", name + ".json"), "w") as f:
                json.dump({"token_s": speed}, f)
        rows = {row["entry"]: row for row in project.board(os.path.join(dir, "in"), os.path.join(dir, "predictions"))}
        pages = {name: project.read(os.path.join(dir, "in", name)) for name in ("board.csv", "board.md", "board.html")}
        return rows, pages


def hostile():
    if not project.is_closed():
        print("entries that cheat are left out: no namespaces here, and without them they would do harm")
        return True
    os.environ.setdefault("PROJECT_STORIES", "2")
    mark = "/tmp/mark-" + secrets.token_hex(8)
    bad, same, good = dishonest(), harmless(mark), honest()
    rows, _ = course({**bad, **same, **good})
    base = rows["(baseline)"]
    wrong = ["%s has a row" % n for n in bad if "token/s" in rows[n.replace("/", "_")]]
    wrong += ["%s: %s" % (n, rows[n]["note"]) for n in [*good, *same] if "token/s" not in rows[n]]
    figures = ("perplexity", "bits: weights", "cache", "read")
    wrong += ["%s gains" % n for n in same if [rows[n].get(f) for f in figures] != [base[f] for f in figures]
              or rows[n]["token/s"] > base["token/s"]]
    wrong += ["coarser keys are not faster"] if not rows["coarser keys"].get("token/s", 0) > 1.05 * base["token/s"] else []
    wrong += ["%s was written" % mark] if os.path.lexists(mark) else []
    print("%d entries: %s" % (len(rows) - 1, "; ".join(wrong) or "those that cheat have no row, and nobody was harmed"))
    return not wrong
