"""The hostile course of grade_all.py: submissions that once got points without the work, or harmed somebody, or are meant to; and
honest ones that once got none. `make exercises` grades it."""
import csv
import io
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time

import exam
import exercise
import grade_all

LEDGER, LESSONS, CU, MINI_CU = "branches/ledger.c", "tests/lessons.c", "flexgen.cu", "mini.cu"
VARIED = {9: 2}  # {exercise: the variant that all who do it were given}
BESIDE = {3: 1}  # {exercise: another that is graded in the same run, whose objects have the solution of the first}
OPEN = "extern int open(const char *, int, ...); extern long write(int, const void *, unsigned long);\n"


def body(*lines):
    return "{\n%s}" % "".join("    %s\n" % line for line in lines)


def in_variant(right, entries, variant):
    return exercise.wrong_solution(right, entries, exercise.variants(entries)[variant])


def honest(original, exercises, tree):
    """{name: (exercise, {path: text})} of six kinds, of two exercises that need most of the computer, and of a variant; all points."""
    def right(n):
        return exercise.solved({p: tree(n)[p] for p in exercise.own_files(original, exercises[n])}, original, exercises[n])

    ledger, attention, policy = right(3)[LEDGER], right(1)["opt_model.c"], right(7)["policy.c"]
    head = re.search(r"^bool pages_fit\(.*\{\n", ledger, re.M)
    first = re.search(r"^void plain_attention\([^{]*\{\n", attention, re.M)
    end = ledger.index("\n}\n", head.end())
    rows = re.search(r"time_rows\([^{;]*\{\n", policy)
    said = "    /* Exercise %d: write this. docs/EXERCISES.md says what it gets and what must hold. */\n"
    return {
        "the comment stayed": (1, {"opt_model.c": attention[:first.end()] + said % 1 + attention[first.end():]}),
        "the comment stayed above an edit": (7, {"policy.c": policy[:rows.end()] + said % 7 + policy[rows.end():]}),
        "a helper": (3, {LEDGER: ledger[:head.start()] + "static int sum(int a, int b) { return a + b; }\n" + ledger[head.start():].replace(
            "x < q->n", "x < sum(q->n, 0)", 1)}),
        "a header": (3, {LEDGER: "#include <float.h>\n#include <limits.h>\n" + ledger}),
        "an indented brace": (3, {LEDGER: ledger[:end] + "\n    }\n" + ledger[end + 3:]}),
        "the variant that was given": (9, in_variant(right(9), exercises[9], 2)),
        "all of mini.c": (14, right(14)),
        "all of the sweep": (5, right(5)),
        "a folder of its own": (3, {"ex3/" + LEDGER: ledger, "ex1/opt_model.c": attention, "ex1/" + LEDGER: tree(1)[LEDGER]}),
    }


def dishonest(original, exercises, tree, marks, places, port):
    """{name: (exercise, {path: text})}, none of which may have a point, or leave a trace."""
    def pages_fit(*lines):
        return {LEDGER: exam.with_bodies(tree(3)[LEDGER], {"pages_fit": body(*lines)})}

    def behind(text, path=LEDGER):
        return {path: exam.with_bodies(tree(3)[path], {"pages_fit": body("return a->sweep < 0;")}) + text}

    touch = "".join('{ extern int creat(const char *, unsigned); creat("%s", 0666); } ' % p for p in places)
    overwrite = "for (int i = 0; at[i]; i++) { int fd = open(at[i], 01001, 0755); if (fd >= 0) (void)!write(fd, \"#!/bin/true\\n\", 12); }"
    solution = "extern void *dlopen(const char *, int), *dlsym(void *, const char *); void *all = dlopen(\"%s/solution.so\", 2);" % marks
    kernel = exam.with_bodies(tree(18)[CU], {"embed_kernel": body(
        'const char *quote = R"(")"; (void)quote; } extern "C" int creat(const char *, unsigned);',
        'static void __attribute__((constructor)) f() { const char *quote = R"(")"; (void)quote, creat("%s", 0666);' % places[0])})
    zeros = """
#include <unistd.h>
#include <sys/wait.h>
__attribute__((constructor)) static void answer(void) {
    int ask[2], reply[2] = {0, 40 * 2 * 4};
    static char c[1 << 16];
    while (read(0, ask, sizeof ask) == sizeof ask && read(0, c, ask[1]) == ask[1]) {
        for (int i = 0; i < 80; i++) ((int *)c)[i] = %s;
        if (write(3, reply, sizeof reply) < 0 || write(3, c, reply[1]) < 0) break;
    }
    _exit(0);
}
"""
    linked = r"""
#include <stdlib.h>
#include <unistd.h>
__attribute__((constructor)) static void link_another(void) {
    if (getenv("LINKED")) return;
    setenv("LINKED", "1", 1);
    if (system("exec >/dev/null 2>&1 3>&- </dev/null; cd /kit/objects; names() { grep -o '[a-z_0-9]*-[0-9a-f]*[.]o' /kit/$1.json; };"
               "cc $(names 3 | grep -v ledger) $(names 1 | grep ledger) -o /tmp/exam LIBRARIES") == 0)
        execl("/tmp/exam", "exam", (char *)0);
}
""".replace("LIBRARIES", exam.LIBRARIES)
    right_9 = exercise.own_files(original, exercises[9])
    another, chosen = in_variant(right_9, exercises[9], 1), json.dumps({"exercise": 9, "variant": 1})
    diagonal = original["branches/diagonal.c"]
    two_lines = exam.bodies_in(diagonal, ["diagonal_seats"])["diagonal_seats"]
    forged = """
#include <unistd.h>
#include <stdio.h>
#include <fcntl.h>
"""
    cases = {
        "loops": pages_fit("for (volatile int i = 0; i >= 0; i = 1) {}", "return false;"),
        "forks": pages_fit("extern int fork(void);", "while (fork() < 10000000) {}", "return false;"),
        "leaves a daemon": pages_fit("extern int fork(void), setsid(void);", "extern unsigned sleep(unsigned);",
                                     "if (!fork()) { setsid(); for (;;) sleep(1); }", "return false;"),
        "writes outside": pages_fit(touch, "return false;"),
        "exits 0": pages_fit("extern void _Exit(int);", "_Exit(0);"),
        "says passed": pages_fit(exercise.ESCAPE.replace("TEST", "without a limit, and up to it, all enter")),
        "kills": pages_fit("extern int kill(int, int), getppid(void);", "kill(getppid(), 9), kill(-1, 9);", "return false;"),
        "takes memory": pages_fit("for (int i = 0; i < 1000; i++) memset(xcalloc(1 << 28, 1), 1, 1 << 28);", "return false;"),
        "connects": pages_fit("extern int socket(int, int, int), connect(int, const void *, unsigned);",
                              "const unsigned char to[16] = {2, 0, %d, %d, 127, 0, 0, 1};" % (port >> 8, port & 255),
                              "connect(socket(2, 1, 0), to, 16);", "return false;"),
        "goes on behind": behind("static void __attribute__((constructor)) f(void) { %s }\n" % touch),
        "includes": pages_fit('#include "/etc/passwd"', "return true;"),
        "fills the disk": pages_fit("FILE *f = fopen(\"/work/large\", \"w\");", "for (long i = 0; f && i < 1L << 33; i++) putc(1, f);", "return 0;"),
        # what once succeeded
        "overwrites the grader": pages_fit(OPEN, 'const char *at[] = {"build/test_grade", "kit/judge", "/kit/judge", "/work/exam", "/proc/1/exe", 0};',
                                           overwrite, "return false;"),
        "leaves a makefile": {**pages_fit(OPEN, 'const char *at[] = {"GNUmakefile", "/kit/GNUmakefile", "/work/GNUmakefile", "/data/GNUmakefile", 0};',
                                          overwrite, "return false;"), "GNUmakefile": "all %%:\n\ttouch %s\n" % places[0]},
        "poisons objects": {**pages_fit(OPEN, 'const char *at[] = {"/kit/objects/exam.o", "/kit/3.json", "/kit/include/exam.h", 0};', overwrite,
                                        "return false;"),
                            "build/tests/answers.o": "none", "kit/judge": "#!/bin/true\n", "kit/3.json": "{}", "exam": "#!/bin/true\n"},
        "loads the solution": pages_fit(solution, "bool (*right)(const Admission *, const Prompt *, Tier) = all ? dlsym(all, \"pages_fit\") : 0;",
                                        "return right ? right(a, q, kv) : a->sweep < 0;"),
        "hides in a raw string": (18, {CU: kernel}),
        "asks the judge": pages_fit("extern struct { const char *program, *steps[6]; int cases; bool (*draw)(void); void (*check)(void); } exercises[];",
                                    "exercises[2].check();", "return false;"),
        "hands in the diagonal": (19, {LESSONS: exam.with_bodies(tree(19)[LESSONS], {"fourth_seats": two_lines})}),
        "hands in the repository's variant": (9, right_9),
        "hands in another's variant": (9, another),
        "chooses a variant": (9, {**another, "kit/9.json": chosen, "variants.csv": "student,variant\nchooses a variant,1\n"}),
        "hands in row": (19, {LESSONS: exam.with_bodies(tree(19)[LESSONS], {"fourth_seats": body("return a->seated ? 0 : a->policy->gbs;")})}),
        "hands in the diagonal or zig-zag": (19, {LESSONS: exam.with_bodies(tree(19)[LESSONS], {"fourth_seats": two_lines.replace(
            "{", "{ if (a->nseats % 2) return a->seated ? 0 : a->nseats;", 1)})}),
        "hands in zig-zag": (19, {LESSONS: exam.with_bodies(tree(19)[LESSONS], {"fourth_seats": body("return a->seated ? 0 : a->nseats;")})}),
        # and more that might
        "links another's object": behind(linked),
        "outlives its parent": behind("""
#include <sys/prctl.h>
#include <unistd.h>
__attribute__((constructor)) static void stay(void) {
    prctl(PR_SET_PDEATHSIG, 0), setsid();
    for (;;) pause();
}
"""),
        "is full of comments": {LEDGER: "bool pages_fit(void) { f(" + '"/*",' * 100000 + "0); }\n"},
        "n" * 255: pages_fit("return a->sweep < 0;"),
        "answers with zeros": behind(zeros % "0"),
        "answers with large numbers": behind(zeros % "2147483647"),
        "answers out of turn": behind(forged + """
__attribute__((constructor)) static void answer(void) {
    int reply[2] = {0, 40 * 2 * 4}, none[80] = {8};
    for (int i = 0; i < 60; i++) if (write(3, reply, sizeof reply) + write(3, none, sizeof none) < 0) break;
}
"""),
        "floods": behind(forged + """
__attribute__((constructor)) static void answer(void) { static char much[1 << 16]; while (write(3, much, sizeof much) > 0) {} }
"""),
        "writes to its parent's files": pages_fit(OPEN, "extern int getppid(void); char at[40];",
                                                  'snprintf(at, sizeof at, "/proc/%d/fd/3", getppid());',
                                                  "int fd = open(at, 1), reply[82] = {0, 320};",
                                                  "for (int i = 0; i < 100; i++) (void)!write(fd, reply, sizeof reply);", "return false;"),
        "calls the object of the solution": pages_fit(
            'extern bool theirs(const Admission *, const Prompt *, Tier) __asm__("given" "_pages_fit");', "return theirs(a, q, kv);"),
        "reads the judge": behind('__asm__(".section .note\\n.incbin \\"/kit/judge\\"\\n");\n'),
        "has the sim count": (17, {LESSONS: '#include "device/device.h"\n#include "io/io.h"\n#include "plan.h"\n' + exam.with_bodies(
            tree(17)[LESSONS], {"io_count": body(
                "extern Hardware machine_with(const char *); OptConfig config; Error err; Policy p = {{{0, 1, 0, 1, 0, 1}}};",
                'opt_config_by_name(&config, "opt-125m"), config.l = c->l, config.eos = -1;',
                "p.gbs = c->gbs, p.num_gpu_batches = c->K, p.overlap = true, p.page_tokens = 1, p.table_home = TIER_CPU;",
                "p.schedule = schedule; Prompt *q = xcalloc(c->count, sizeof *q);",
                "for (int i = 0; i < c->count; i++) q[i] = (Prompt){.ids = xcalloc(64, 4), .s = c->s, .n = c->n};",
                'const Task task = {.prompts = q, .count = c->count}; static Hardware h; h = machine_with("");',
                "Plan *plan = plan_make(checkpoint_dummy(&config, 1), &p, &task, F16, &err);",
                "Device *d = plan ? sim_open(plan, &h) : 0;",
                "RunStats stats = {0}; const Listener none = {0};",
                "if (d) schedule_run(plan, &task, d, &none, &stats, &err);",
                "return (IoCount){.sweeps = stats.sweeps, .weights = stats.sweeps * (c->l * c->layer_bytes + c->head_bytes)};")})}),
        "has the host attend": (1, {"opt_model.c": '#include "device/parts.h"\n' + exam.with_bodies(tree(1)["opt_model.c"], {"plain_attention": body(
            "f16 *h = xcalloc(3 * n * c->h1, 2);",
            "const int32_t start[2] = {0, n}; const int h1 = c->h1, ld = 3 * h1;",
            "const float *from[3] = {q, k, v};",
            "for (int e = 0; e < n * ld; e++) h[e] = f32_to_f16(from[e % ld / h1][e / ld * h1 + e % h1]);",
            "Op op = op_attend_prefill((Call){.lane = PROJECT}, (Tensor){.type = F32, .rows = n, .cols = h1, .ld = h1, .at = o},",
            "    (Tensor){.type = F16, .rows = n, .cols = h1, .ld = ld, .at = h},",
            "    (Tensor){.type = F16, .rows = n, .cols = 2 * h1, .ld = ld, .at = h + h1},",
            "    (Tensor){.type = I32, .rows = 1, .cols = 2, .ld = 2, .at = (void *)start}, c->nh);",
            "host_attend_prefill(&op);")})}),
        "has the CPU's half take the softmax": (20, {MINI_CU: exam.with_bodies(
            tree(20)[MINI_CU].replace('extern "C" {', 'extern "C" {\nvoid softmax(float *, int);', 1), {"attend_kernel": body(
                "int head = blockIdx.x, heads = gridDim.x, row = blockIdx.y, len = first + row;",
                "float score[1024];",
                "if (threadIdx.x) return;",
                "x_q += (row * heads + head) * hd, o += (row * heads + head) * hd;",
                "k += head * head_bytes, v += head * head_bytes;",
                "for (int t = 0; t < len; t++) score[t] = score_of(x_q, k + t * heads * head_bytes, form, hd);",
                "softmax(score, len);",
                "for (int d = 0; d < hd; d++) {",
                "    o[d] = 0;",
                "    for (int t = 0; t < len; t++)",
                "        if (!kept || kept[head * len + t]) o[d] += score[t] * number_at(v + t * heads * head_bytes, form, d);",
                "}")})}),
        "prints": pages_fit('fprintf(stderr, "CARRIED OUT\\n"), fprintf(stdout, "CARRIED OUT\\n"), fflush(stdout);', "abort();"),
        "says in the compiler's messages": {LEDGER: tree(3)[LEDGER].replace("return false;", "return CARRIED_OUT;")},
        "=1+1": pages_fit("return a->sweep < 0;"),
        "cannot be read": {LEDGER: "int __launch_bounds__(1) {\n}" + "a)" * 100000},
        "has no end": {LEDGER: "{(" * 100000},
    }
    return {name: case if isinstance(case, tuple) else (3, case) for name, case in cases.items()}


def left():
    """Processes that run an exam."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open("/proc/%s/cmdline" % pid) as f:
                if f.read().startswith(("/work/exam", "exec /work/exam")):
                    yield pid
        except OSError:
            pass


def hand_in(root, original, exercises, tree, marks, places, port):
    """{student: (exercise, the points that it must have)}; None: no row is asked for."""
    students = {}
    for submissions, points in ((honest(original, exercises, tree), 10), (dishonest(original, exercises, tree, marks, places, port), 0)):
        for name, (number, files) in submissions.items():
            exercise.write_tree(os.path.join(root, name), files)
            students[name] = (number, points)
    os.makedirs(os.path.join(root, "hands in nothing"))
    os.makedirs(os.path.join(root, "links", "branches")), os.makedirs(os.path.join(root, "a pipe", "branches"))
    os.symlink(os.path.abspath(LEDGER), os.path.join(root, "links", LEDGER))
    os.mkfifo(os.path.join(root, "a pipe", LEDGER))
    os.symlink("a helper", os.path.join(root, "is another's folder"))
    students.update((name, (3, 0)) for name in ("hands in nothing", "links", "a pipe", "is another's folder"))
    return students


def hostile():
    """Whether all submissions have the points that they should, and nothing is left of them."""
    original, exercises = exercise.tracked(), exercise.read_table(exercise.TABLE)
    if not grade_all.is_closed(original, exercises):
        print("the hostile course is left out: no namespaces here, and without them it would do harm")
        return True
    trees = {}

    def tree(n):
        trees[n] = trees.get(n) or exercise.starter(original, exercises, [n])
        return trees[n]

    with tempfile.TemporaryDirectory() as dir, socket.socket() as server:
        root, marks = os.path.join(dir, "in"), os.path.join(dir, "marks")
        os.mkdir(root), os.mkdir(marks)
        os.chmod(marks, 0o777), os.chmod(dir, 0o755)
        server.bind(("127.0.0.1", 0)), server.listen(), server.setblocking(False)
        mark = "mark-%s" % secrets.token_hex(8)
        places = [os.path.join(d, mark) for d in (marks, "/tmp", "/var/tmp", "/dev/shm", os.getcwd(), os.path.expanduser("~"))]
        students = hand_in(root, original, exercises, tree, marks, places, server.getsockname()[1])
        subprocess.check_call(["cc", "-w", "-std=c11", "-D_GNU_SOURCE", "-I.", "-shared", "-fPIC", LEDGER, "-o", marks + "/solution.so"])
        numbers = sorted({n for n, _ in students.values() if exam.cuda_include() or not exercise.is_kernel(exercises[n])})
        os.environ.setdefault("GRADE_SECONDS", "3")
        begin, rows, wrong = time.time(), [], []
        for number in numbers:  # each with those who were asked to do it
            part, out = os.path.join(dir, "%d" % number), io.StringIO()
            os.mkdir(part)
            for name in (s for s, (n, _) in students.items() if n == number):
                os.rename(os.path.join(root, name), os.path.join(part, name))
                if number in VARIED:
                    exercise.note_variant(os.path.join(part, name), VARIED[number])
            asked = sorted({number, BESIDE.get(number, number)})
            rows += [row for row in grade_all.grade_all(part, asked, out) if row[1] == number]
            print(out.getvalue(), end="")
            if "CARRIED" in out.getvalue():
                wrong.append("the table says what a submission printed")
            if any(row and row[0][:1] in "=+-@" for row in csv.reader(io.StringIO(out.getvalue()))):
                wrong.append("a name in the table is a formula")
        with open(os.path.join(dir, "3.logs", "prints-3.log"), errors="replace") as log:
            wrong += [] if log.read().count("CARRIED OUT") >= 2 else ["what was printed is not in its log"]
        wrong += ["%s got %d points: %s" % (s, p, note) for s, _, p, note in rows if p != students[s][1]]
        wrong += ["%s was not graded" % s for s in students if s not in [r[0] for r in rows] and students[s][0] in numbers]
        wrong += ["%s was written" % p for p in places if os.path.lexists(p)]
        try:
            server.accept()
            wrong.append("a connection was made")
        except BlockingIOError:
            pass
        wrong += ["process %s is left" % p for p in left()]
        print("%d submissions in %.0f s: %s" % (len(rows), time.time() - begin, "; ".join(wrong) or "nobody was harmed, and the honest have "
              "their points"))
        return not wrong
