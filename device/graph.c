/* graph.c: ops that a GPU was given before are launched together.
 *
 * A GPU takes a kernel from the host in about 2.5 us, and one of a small model may be done sooner:
 * a sweep of OPT-125M is 102 kernels. CUDA launches many kernels in a row as one graph, if it has
 * been told of them before. lanes.c posts the ops of a stream by the segment, and from one sweep
 * to the next but one most segments are the same: the same kernels on the same views. Only their
 * contents differ, such as the numbers of tokens and pages in the index tables, which lie in two
 * places in turn.
 *
 * Therefore a segment that is new is remembered, and posted op by op. When it comes again, its ops
 * are captured: CUDA notes what they post. From then on it is launched. Another number of rows
 * makes another segment. Nothing here knows which will come, or anything of schedules.
 * Read next: tiers.c. */
#include "device/parts.h"

enum {
    SEGMENTS = 128, /* are remembered; the two sweeps of OPT-175B's 96 layers have 50 */
    LEAST_OPS = 4   /* are in a graph, since one of fewer saves nothing */
};

/* A segment: its ops as they were posted, and the graph that they became. */
typedef struct {
    Op *op; /* [n] */
    int n;
    void *graph; /* NULL: none yet */
} Segment;

struct Graphs {
    const Arenas *arenas;
    Error *notice;             /* receives why no graph can be made */
    bool refused;              /* none can */
    Segment segment[SEGMENTS]; /* in the order in which they first came, modulo SEGMENTS */
    int next;                  /* the place of the next that is new */
    int expected;              /* the place behind the last that came again */
};

/* The rows of pages only say how many have been used (home_pages in square.c); no kernel asks. */
static bool same_view(Tensor a, Tensor b) {
    return (a.rows == b.rows || (a.region == KV_CACHE && b.region == KV_CACHE)) &&
           a.cols == b.cols && a.ld == b.ld && a.type == b.type && a.tier == b.tier &&
           a.offset == b.offset;
}

/* Returns true if two ops launch the same kernels. Only the host looks at their prompts and
 * study, and nobody at their calls. */
static bool same_op(const Op *a, const Op *b) {
    bool same = a->code == b->code && a->nh == b->nh && a->hd == b->hd && a->add == b->add &&
                a->page_tokens == b->page_tokens && a->relu == b->relu &&
                a->sparsity == b->sparsity;
    for (int v = 0; v < MAX_VIEWS && same; v++)
        same = same_view(a->view[v], b->view[v]);
    return same;
}

static bool is_segment(const Segment *s, Op *const op[], int n) {
    bool same = s->n == n;
    for (int i = 0; i < n && same; i++)
        same = same_op(&s->op[i], op[i]);
    return same;
}

/* Returns the segment with these ops, or NULL. Segments mostly come in the order of the time
 * before, so the first that it looks at is the one. */
static Segment *find(Graphs *g, Op *const op[], int n) {
    for (int i = 0; i < SEGMENTS; i++) {
        int at = (g->expected + i) % SEGMENTS;
        if (is_segment(&g->segment[at], op, n)) {
            g->expected = at + 1;
            return &g->segment[at];
        }
    }
    return NULL;
}

static void forget(Graphs *g, Segment *s) {
    Gpu *gpu = g->arenas->gpu;
    if (s->graph)
        gpu->call->forget(gpu, PROJECT, s->graph);
    free(s->op);
    *s = (Segment){0};
}

/* Remembers a segment in the place of the oldest. */
static void remember(Graphs *g, Op *const op[], int n) {
    Segment *s = &g->segment[g->next];
    g->next = (g->next + 1) % SEGMENTS;
    forget(g, s);
    s->op = xcalloc(n, sizeof *s->op);
    s->n = n;
    for (int i = 0; i < n; i++)
        s->op[i] = *op[i];
}

static int run_ops(const Graphs *g, Op *const op[], int n, Error *err) {
    int status = 0;
    for (int i = 0; i < n && !status; i++)
        status = arenas_run(g->arenas, op[i], err);
    return status;
}

/* Makes the segment's graph of its ops. If CUDA refuses, which may lack memory for it, ops are
 * posted one by one from now on; what is wrong with an op itself shows then, too. */
static void capture(Graphs *g, Segment *s, Op *const op[]) {
    Gpu *gpu = g->arenas->gpu;
    Error err, second; /* an error in the middle makes the capture fail, too */
    int status = gpu->call->capture(gpu, PROJECT, &err);
    if (!status) {
        status = run_ops(g, op, s->n, &err);
        s->graph = gpu->call->captured(gpu, PROJECT, status ? &second : &err);
    }
    g->refused = status || !s->graph;
    if (g->refused)
        fail(g->notice, EXIT_OK, "every kernel is launched by itself: %s", err.text);
}

int graphs_run(Graphs *g, Op *const op[], int n, Error *err) {
    Gpu *gpu = g->arenas->gpu;
    if (n < LEAST_OPS || g->refused)
        return run_ops(g, op, n, err);
    Segment *s = find(g, op, n);
    if (!s)
        remember(g, op, n);
    else if (!s->graph)
        capture(g, s, op);
    if (!s || g->refused)
        return run_ops(g, op, n, err);
    return gpu->call->launch(gpu, PROJECT, s->graph, err);
}

Graphs *graphs_open(const Arenas *arenas, Error *notice) {
    Graphs *g = xcalloc(1, sizeof *g);
    g->arenas = arenas;
    g->notice = notice;
    return g;
}

void graphs_close(Graphs *g) {
    for (int i = 0; i < SEGMENTS && g; i++)
        forget(g, &g->segment[i]);
    free(g);
}
