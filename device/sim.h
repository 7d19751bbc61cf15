/* sim.h: a simulated machine, as sim.c runs it alone and world.c together with others. */
#ifndef SIM_H
#define SIM_H
#include <pthread.h>

#include "cost/hardware.h"
#include "device/device.h"
#include "device/net.h"
#include "device/trace.h"

/* A posted op: what it must come after, and what it takes. */
typedef struct {
    int nafter;
    Event after[NLANES];
    Slice slice;       /* what it was */
    uint64_t order;    /* how many were posted before it */
    double work, left; /* seconds at full speed; of them not done yet */
} SimOp;

/* Op number n, counted from 0, lies at ring[n % capacity]. */
typedef struct {
    SimOp *ring;
    uint64_t capacity, posted, done;
    bool active; /* op number `done` has begun */
    double began;
} SimLane;

/* Messages to a stage, in the order in which they arrive: when, and of how many bytes. Of n, `taken` have been received. */
typedef struct {
    struct {
        double at;
        Bytes size;
    } * letter;
    int n, taken;
} Inbox;

typedef struct Sim {
    Device base;
    Hardware hardware;
    SimLane lane[NLANES];
    double clock;            /* seconds */
    double speed[NCHANNELS]; /* of the active ops, as a share of what each has alone */
    double ends; /* of the active ops the first ends after so many seconds more, at full speed or beside the others */
    uint64_t nposted;
    uint8_t *tables;    /* index tables of the CPU tier */
    Bytes tables_at[2]; /* where they lie on GPU and CPU: mirrors of each other */
    Bytes tables_bytes;
    Reach reach;

    /* of a stage of a pipeline, world.c's: */
    World *world;                            /* NULL: this machine is alone */
    void (*sent)(struct Sim *, Bytes bytes); /* an op on SEND has ended */
    double bytes_s;                          /* of its wire */
    Net net;
    Inbox inbox[NET_TOKENS + 1]; /* hidden states from the stage before, tokens from the last */
    double wire_free;            /* when the last of its posted messages has left */
    double next;                 /* when an op ends, or the next message arrives */
    bool waits;                  /* its thread does: for a message, or if that is NULL for an event */
    const Inbox *message;
    Event event;
    pthread_cond_t woken;
} Sim;

/* Clocks of several machines that differ by less than this share show the same time: they have added up other numbers. */
static const double ROUNDING_OF_CLOCKS = 1e-12;

static inline bool happened(const Sim *d, Event e) { return d->lane[e.lane].done >= e.seq; }
/* Whether a message is there that has not been taken. */
static inline bool has_come(const Sim *d, const Inbox *box) {
    return box->taken < box->n && box->letter[box->taken].at <= d->clock * (1 + ROUNDING_OF_CLOCKS);
}
static inline void take_letter(Inbox *box, Bytes size) { CHECK(box->letter[box->taken++].size == size); }

/* Begins what can begin, and looks when something will happen next (next, ends); INFINITY: nothing by itself. */
void sim_look_ahead(Sim *sim);
/* dt seconds pass since that look, in which no active op ends, or at their end one or several together. */
void sim_pass(Sim *sim, double dt);
#endif
