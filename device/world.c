/* world.c: several simulated machines in one time, as the stages of a pipeline (section 4.4): the network of pipeline.c as
 * a clock.
 *
 * A stage's thread computes nothing that takes time, so time passes only when all of them wait: then the last one to do so
 * goes to the next moment at which an op ends or a message arrives anywhere, and wakes those who have waited for that.
 * Results do not depend on how fast threads are. Only the sims where something happens are touched; the others' clocks are
 * behind, and catch up when it is their turn. Read next: host.c, the arithmetic. */
#include <math.h>

#include "device/sim.h"

/* The sims of a pipeline and the wires between them. */
struct World {
    pthread_mutex_t lock; /* guards this, and inboxes; a sim's rest is its thread's as long as that runs, then the lock's */
    Sim **sim;
    int stages, running; /* threads that do not wait */
    double delay_s;
    bool failed;
    Error error;
};

/* A message of a stage that has left at `leaves`. */
static void deliver(Sim *from, int to, NetKind kind, Bytes size, double leaves) {
    Sim *d = from->world->sim[to];
    Inbox *box = &d->inbox[kind];
    if (!(box->n & (box->n - 1))) box->letter = xrealloc(box->letter, imax(1, 2 * box->n), sizeof *box->letter);
    box->letter[box->n].at = leaves + from->world->delay_s;
    d->next = fmin(d->next, box->letter[box->n].at);
    box->letter[box->n++].size = size;
}

static void deliver_states(Sim *from, Bytes bytes) { deliver(from, from->net.stage + 1, NET_STATES, bytes, from->clock); }

/* To the next moment at which something happens, or several things together. All threads wait. */
static void step(World *w) {
    double t = INFINITY;
    for (int s = 0; s < w->stages; s++) t = fmin(t, w->sim[s]->next);
    CHECK(!isinf(t)); /* whoever waits for a message waits for one that comes */
    const double together = t * (1 + ROUNDING_OF_CLOCKS);
    for (int s = 0; s < w->stages; s++) {
        Sim *d = w->sim[s];
        if (d->next > together) continue;
        sim_pass(d, d->clock + d->ends <= together ? d->ends : t - d->clock);
        d->clock = t;
        if (d->waits && (d->message ? has_come(d, d->message) : happened(d, d->event))) {
            d->waits = false, d->next = INFINITY;
            w->running++;
            pthread_cond_signal(&d->woken);
        } else
            sim_look_ahead(d);
    }
}

/* The stage's thread waits: for a message, which it takes, or with box NULL for an event. */
static int wait_in_world(Sim *d, Event e, Inbox *box, Bytes size, Error *err) {
    World *w = d->world;
    pthread_mutex_lock(&w->lock);
    d->waits = box ? !has_come(d, box) : !happened(d, e);
    if (d->waits) {
        d->event = e, d->message = box;
        sim_look_ahead(d);
        for (w->running--; d->waits && !w->failed;) w->running ? (void)pthread_cond_wait(&d->woken, &w->lock) : step(w);
    }
    const int status = w->failed ? -1 : 0;
    if (status) *err = w->error;
    if (box && !status) take_letter(box, size);
    pthread_mutex_unlock(&w->lock);
    return status;
}

static void wake_all(World *w) {
    for (int s = 0; s < w->stages; s++) pthread_cond_signal(&w->sim[s]->woken);
}

static int world_wait(Device *base, Event e, Error *err) {
    Sim *d = (Sim *)base;
    CHECK(e.seq <= d->lane[e.lane].posted);
    return happened(d, e) ? 0 : wait_in_world(d, e, NULL, 0, err);
}

static Sim *sim_of(Net *net) { return (Sim *)((char *)net - offsetof(Sim, net)); }

/* A stage that posts has no op on SEND: it is the last. Only that a message comes matters; there is nothing in it. */
static int world_post(Net *net, int to, NetKind kind, const void *bytes, size_t size, Error *err) {
    Sim *d = sim_of(net);
    (void)bytes, (void)err;
    CHECK(kind == NET_TOKENS && net->stage == net->stages - 1);
    pthread_mutex_lock(&d->world->lock);
    d->wire_free = fmax(d->wire_free, d->clock) + (double)size / d->bytes_s;
    deliver(d, to, kind, size, d->wire_free);
    pthread_mutex_unlock(&d->world->lock);
    return 0;
}

/* The sim has no tokens: -1. */
static int world_receive(Net *net, int from, NetKind kind, void *bytes, size_t size, Error *err) {
    Sim *d = sim_of(net);
    CHECK(kind == NET_TOKENS && from == net->stages - 1);
    memset(bytes, 0xff, size);
    return wait_in_world(d, (Event){0, 0}, &d->inbox[kind], size, err);
}

static void world_fail(Net *net, const Error *err) {
    World *w = sim_of(net)->world;
    pthread_mutex_lock(&w->lock);
    if (!w->failed) fail_of_stage(&w->error, net->stage, err);
    w->failed = true;
    wake_all(w);
    pthread_mutex_unlock(&w->lock);
}

World *world_open(Device *const sim[], int stages, double bytes_s, double delay_s) {
    World *w = xcalloc(1, sizeof *w);
    *w = (World){.sim = xcalloc(stages, sizeof *w->sim), .stages = stages, .running = stages, .delay_s = delay_s};
    pthread_mutex_init(&w->lock, NULL);
    for (int s = 0; s < stages; s++) {
        Sim *d = w->sim[s] = (Sim *)sim[s];
        d->world = w, d->sent = deliver_states, d->bytes_s = bytes_s, d->next = INFINITY, d->base.wait = world_wait;
        d->base.net = stages > 1 ? &d->net : NULL;
        d->net = (Net){.stage = s, .stages = stages, .post = world_post, .receive = world_receive, .fail = world_fail};
        pthread_cond_init(&d->woken, NULL);
    }
    return w;
}

void world_leave(Device *sim) {
    World *w = ((Sim *)sim)->world;
    pthread_mutex_lock(&w->lock);
    w->running--;
    wake_all(w); /* if nobody runs any more, one of those who wait goes on with the time */
    pthread_mutex_unlock(&w->lock);
}

void world_close(World *w) {
    for (int s = 0; s < w->stages; s++) {
        Sim *d = w->sim[s];
        for (const Inbox *box = d->inbox; box <= &d->inbox[NET_TOKENS]; box++) CHECK(w->failed || box->taken == box->n);
        pthread_cond_destroy(&d->woken);
        d->base.close(&d->base);
    }
    pthread_mutex_destroy(&w->lock);
    free(w->sim), free(w);
}
