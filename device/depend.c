/* depend.c: posting ops in an order that follows from use (section 4.2).
 *
 * Figure 4 posts its calls one after the other, and this would be a correct order of executing
 * them. What may overlap follows from which op uses which data: an op must come after the last
 * writers of what it reads, and after the last writers of what it writes and all who have read it
 * since. So schedule.c names no events; ops overlap wherever this rule does not forbid it. One
 * thing no view shows, and the caller must tell: that KV pages pass from one batch to another
 * (depend_join).
 *
 * Ops use the same data if their views share bytes. Every view lies in a cell (a slot of a region,
 * or a batch's pages of a layer on a tier), and a cell keeps its past users, each with the bytes
 * that it used.
 *
 * A clock (the literature calls it a vector clock) is a set of ops: it has a number n for every
 * lane, which stands for the lane's first n ops. Since lanes are in order, the newest op stands for
 * all before it, and joining two clocks is a maximum per lane.
 *
 * Most of the ops that an op depends on are known to be over when it begins: from the ops before it
 * on its lane and from all that those have waited for, or because the posting thread has waited for
 * them. Only the rest become its events, and of those only the ones that no other event implies.
 * The posting thread is a user like any other: before it reads a batch's tokens or fills its index
 * tables it calls post_wait.
 *
 * Read next: quant.c. */
#include <limits.h>

#include "device/parts.h"

/* A set of ops: the first ops[lane] of each lane. */
typedef struct {
    uint64_t ops[NLANES];
} Clock;

/* A use of bytes begin .. end-1 by an op, which ends with this event. */
typedef struct {
    Bytes begin, end;
    Use use;
    Event op;
} User;

/* The past users of a cell, without those that later ones imply. */
typedef struct {
    User *user;
    int n, room;
} Cell;

/* A past op: its number on its lane, and the ops that were over when it ended. */
typedef struct {
    uint64_t seq;
    Clock over;
} Past;
/* The number of ops of each lane that are remembered. Of an older op it is still known that those
 * before it on its lane are over, but no longer what else is. */
enum { REMEMBERED = 256 };

/* The state of the rule for all cells and lanes. */
struct Depend {
    Cell *cell;
    int ncells;
    Clock poster;             /* the ops that the posting thread has waited for */
    Clock lane[NLANES];       /* the ops that are over when the lane's newest op ends */
    Past (*past)[REMEMBERED]; /* [NLANES] its past ops, in a ring buffer */
};

// -------------------------------------------------------------------------------------------------
// Clocks
// -------------------------------------------------------------------------------------------------

/* Makes clock a the maximum of both, lane by lane. */
static void join(Clock *a, const Clock *b) {
    for (int i = 0; i < NLANES; i++)
        if (a->ops[i] < b->ops[i])
            a->ops[i] = b->ops[i];
}

/* Adds to a clock all that is over when an event has happened. */
static void join_event(Clock *clock, const Depend *d, Event e) {
    const Past *past = &d->past[e.lane][e.seq % REMEMBERED];
    if (past->seq == e.seq)
        join(clock, &past->over);
    if (clock->ops[e.lane] < e.seq)
        clock->ops[e.lane] = e.seq;
}

/* Returns a use of a view. Two kinds of cells are used as a whole: a batch's pages, which lie
 * scattered, and a weight slot on the GPU, since nothing begins before the whole layer is there. */
static User user_of(const Tensor *view, Use use, Event op) {
    bool weights = view->region == WEIGHT_SLOT || view->region == WEIGHT_SLOT_1;
    if (view->region == KV_CACHE || (weights && view->tier == TIER_GPU))
        return (User){0, SIZE_MAX, use, op};
    return (User){view->offset, view->offset + tensor_span(*view), use, op};
}

/* Adds to a clock all that must be over before a view is used. */
static void join_users(Clock *clock, const Depend *d, const Tensor *view, Use use) {
    CHECK(view->cell < d->ncells);
    const Cell *cell = &d->cell[view->cell];
    User now = user_of(view, use, (Event){0});
    for (const User *u = cell->user; u < cell->user + cell->n; u++)
        if (u->begin < now.end && now.begin < u->end && (use == WRITES || u->use == WRITES) &&
            clock->ops[u->op.lane] < u->op.seq)
            clock->ops[u->op.lane] = u->op.seq;
}

// -------------------------------------------------------------------------------------------------
// The events that an op needs
// -------------------------------------------------------------------------------------------------

/* Finds the events of the ops in `need` that are not in `known`, without those that others imply;
 * adds them to `known`. Returns how many there are. For example:
 *
 *             C_READ  C_LOAD  STORE
 *   need         4       7      2
 *   known        3       6      5    so only C_READ 4 and C_LOAD 7 are missing;
 *   over when C_LOAD 7 has ended:
 *                5       7      4    so C_LOAD 7 implies C_READ 4, and is the only event. */
static int events_for(Event *wait, const Depend *d, const Clock *need, Clock *known) {
    int n = 0, kept = 0;
    for (int lane = 0; lane < NLANES; lane++)
        if (need->ops[lane] > known->ops[lane])
            wait[n++] = (Event){lane, need->ops[lane]};
    for (int i = 0; i < n; i++) {
        const Event e = wait[i];
        /* what is over when the events that are kept, which `known` has, and those after e have
         * happened */
        Clock others = *known;
        for (int o = i + 1; o < n; o++)
            join_event(&others, d, wait[o]);
        if (others.ops[e.lane] >= e.seq)
            continue; /* the others imply it */
        join_event(known, d, e);
        wait[kept++] = e;
    }
    return kept;
}

void depend_before(Depend *d, Op *op) {
    Clock need = {{0}};
    /* op_view returns the n-th view of an op, and says how the op uses it */
    for (int n = 0; n < op_nviews(op); n++) {
        Use use;
        const Tensor *view = op_view(op, n, &use);
        if (use && view->rows && view->cell)
            join_users(&need, d, view, use);
    }
    Clock *known = &d->lane[op->lane]; /* becomes what is over when the op begins */
    join(known, &d->poster);
    op->nafter = events_for(op->after, d, &need, known); /* and adds them to *known */
}

/* Adds a user to a cell, and forgets earlier ones whose bytes it uses too, if whoever waits for the
 * new user thereby waits for them: they used the bytes in the same way on the same lane, or the new
 * one came after all of them, as a writer does. */
static void add_user(Cell *cell, User now, bool after_all) {
    for (int i = cell->n; i-- > 0;) {
        const User *u = &cell->user[i];
        bool covered = now.begin <= u->begin && u->end <= now.end;
        bool later = u->op.lane == now.op.lane && u->op.seq <= now.op.seq && u->use == now.use;
        if (covered && (later || after_all))
            cell->user[i] = cell->user[--cell->n];
    }
    if (cell->n == cell->room) {
        cell->room = 2 * cell->n + 4;
        cell->user = xrealloc(cell->user, cell->room, sizeof *cell->user);
    }
    cell->user[cell->n++] = now;
}

void depend_posted(Depend *d, const Op *op, Event e) {
    d->lane[e.lane].ops[e.lane] = e.seq;
    d->past[e.lane][e.seq % REMEMBERED] = (Past){e.seq, d->lane[e.lane]};
    for (Use pass = READS; pass <= WRITES; pass++) /* what is read and written counts as written */
        for (int n = 0; n < op_nviews(op); n++) {
            Use use;
            const Tensor *view = op_view(op, n, &use);
            if (use == pass && view->rows && view->cell)
                add_user(&d->cell[view->cell], user_of(view, use, e), use == WRITES);
        }
}

int depend_poster(const Depend *d, Event wait[NLANES], const Tensor *view, Use use) {
    Clock need = {{0}}, known = d->poster;
    join_users(&need, d, view, use);
    return events_for(wait, d, &need, &known);
}

void depend_waited(Depend *d, Event e) { join_event(&d->poster, d, e); }

void depend_join(Depend *d, int to, int from) {
    const Cell *cell = &d->cell[from];
    for (const User *u = cell->user; u < cell->user + cell->n; u++)
        add_user(&d->cell[to], *u, false);
}

// -------------------------------------------------------------------------------------------------
// Posting
// -------------------------------------------------------------------------------------------------

/* Waits for an event, if nothing has failed yet. */
static bool wait_for(Poster *poster, Event e) {
    if (!poster->failed && poster->device->wait(poster->device, e, poster->err))
        poster->failed = true;
    if (poster->depend)
        depend_waited(poster->depend, e);
    return !poster->failed;
}

Event post(Poster *poster, Op op) {
    if (poster->depend)
        depend_before(poster->depend, &op);
    Event e = poster->device->post(poster->device, &op);
    if (poster->depend)
        depend_posted(poster->depend, &op, e);
    poster->last[e.lane] = e;
    if (!poster->overlap)
        wait_for(poster, e);
    return e;
}

bool post_wait(Poster *poster, Tensor view, Use use) {
    Event wait[NLANES];
    int n = depend_poster(poster->depend, wait, &view, use);
    for (int i = 0; i < n; i++)
        wait_for(poster, wait[i]);
    return !poster->failed;
}

void *cpu_address(const Poster *poster, Tensor view) {
    return poster->device->cpu_address(poster->device, view);
}

bool post_drain(Poster *poster) {
    for (int lane = 0; lane < NLANES; lane++)
        wait_for(poster, poster->last[lane]);
    return !poster->failed;
}

// -------------------------------------------------------------------------------------------------
// The trunk ends here: what follows joins moves that lie together, and rows of a route. On a first
// reading go on with quant.c.
// -------------------------------------------------------------------------------------------------

/* Returns true if a dense view begins where another ends, its users are the same, and both together
 * have no more columns than an int counts. */
static bool continues(Tensor before, Tensor t) {
    return before.cols <= INT_MAX - t.rows * t.cols && before.tier == t.tier &&
           before.file == t.file && before.region == t.region && before.cell == t.cell &&
           before.type == t.type && before.offset + tensor_bytes(before) == t.offset;
}

int add_move(Move *moves, int n, Tensor dst, Tensor src) {
    if ((Bytes)dst.rows * dst.cols > INT_MAX) { /* more columns of a flat view than an int counts */
        int half = dst.rows / 2, rest = dst.rows - half;
        n = add_move(moves, n, tensor_rows(dst, 0, half), tensor_rows(src, 0, half));
        return add_move(moves, n, tensor_rows(dst, half, rest), tensor_rows(src, half, rest));
    }
    Move move = {tensor_flat(dst), tensor_flat(src)};
    Move *last = n ? &moves[n - 1] : NULL;
    if (!last || !continues(last->dst, dst) || !continues(last->src, src)) {
        moves[n] = move;
        return n + 1;
    }
    last->dst.cols += move.dst.cols;
    last->dst.ld += move.dst.ld;
    last->src.cols += move.src.cols;
    last->src.ld += move.src.ld;
    return n;
}

void add_leg(Route *route, int gpu, int home, int rows) {
    Leg *last = &route->leg[route->n - 1];
    if (route->n && last->gpu + last->rows == gpu && last->home + last->rows == home)
        last->rows += rows;
    else
        route->leg[route->n++] = (Leg){gpu, home, rows};
}

Depend *depend_open(int ncells) {
    Depend *d = xcalloc(1, sizeof *d);
    d->ncells = ncells;
    d->cell = xcalloc(ncells, sizeof *d->cell);
    d->past = xcalloc(NLANES, sizeof *d->past);
    return d;
}

void depend_close(Depend *d) {
    for (int c = 0; c < d->ncells; c++)
        free(d->cell[c].user);
    free(d->cell);
    free(d->past);
    free(d);
}
