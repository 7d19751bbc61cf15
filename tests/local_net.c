/* local_net.c: a network between threads of one process, for tests of what runs on one. tests.h says how it is opened.
 *
 * It is strict where MPI would let a fault pass: a message that nobody has received at the end, one of another size than is
 * expected, and a wait for a stage that has ended are bugs and abort, with a line that says whose. So does a stage that
 * fails, and one that waits for so long that the stages must wait for each other in a circle. */
#include <pthread.h>
#include <time.h>

#include "tests.h"

enum {
    MAX_STAGES = 8,
    PATIENCE = 60, /* seconds that a stage waits: a slow emulation needs some for a sweep, a deadlock any number */
};

typedef struct Letter {
    struct Letter *next;
    size_t size;
    double visible;
    uint8_t bytes[];
} Letter;

typedef struct {
    Letter *first, *last;
    double visible; /* the newest letter */
} Queue;

/* The network; there is one at a time. */
static struct {
    pthread_mutex_t lock; /* guards everything */
    pthread_cond_t news;
    int delay_us, stages, open;
    bool closed[MAX_STAGES];
    uint64_t random;
    Queue queue[MAX_STAGES][MAX_STAGES][NKINDS_OF_MESSAGES]; /* from, to */
} hub;

static void bug(const char *what, int from, int to, NetKind kind) {
    static const char *const names[] = {"states", "tokens", "setup"};
    fprintf(stderr, "local_net: bug: %s from stage %d to stage %d (%s)\n", what, from, to, names[kind]);
    abort();
}

/* Sleeps until there is news. Stages that wait for each other wait for news for ever, so that PATIENCE ends them. */
static void wait_for_news(int from, int to, NetKind kind) {
    if (!cond_wait_until(&hub.news, &hub.lock, seconds_now() + PATIENCE)) bug("a wait that does not end", from, to, kind);
}

/* Puts a letter behind the others; later ones do not overtake it. */
static int local_post(Net *net, int to, NetKind kind, const void *bytes, size_t size, Error *err) {
    CHECK(to >= 0 && to < hub.stages && to != net->stage);
    Queue *q = &hub.queue[net->stage][to][kind];
    Letter *letter = xcalloc(1, sizeof *letter + size);
    (void)err;
    letter->size = size;
    memcpy(letter->bytes, bytes, size);
    pthread_mutex_lock(&hub.lock);
    letter->visible = fmax(q->visible, seconds_now() + (test_random(&hub.random) + 1) / 2 * hub.delay_us * 1e-6);
    q->visible = letter->visible;
    *(q->first ? &q->last->next : &q->first) = letter;
    q->last = letter;
    pthread_cond_broadcast(&hub.news);
    pthread_mutex_unlock(&hub.lock);
    return 0;
}

/* Puts a letter behind the others, and waits until all of them have been taken. */
static int local_send(Net *net, int to, NetKind kind, const void *bytes, size_t size, Error *err) {
    local_post(net, to, kind, bytes, size, err);
    pthread_mutex_lock(&hub.lock);
    while (hub.queue[net->stage][to][kind].first) {
        if (hub.closed[to]) bug("nobody receives the message", net->stage, to, kind);
        wait_for_news(net->stage, to, kind);
    }
    pthread_mutex_unlock(&hub.lock);
    return 0;
}

static int local_receive(Net *net, int from, NetKind kind, void *bytes, size_t size, Error *err) {
    CHECK(from >= 0 && from < hub.stages && from != net->stage);
    Queue *q = &hub.queue[from][net->stage][kind];
    pthread_mutex_lock(&hub.lock);
    (void)err;
    while (!(q->first && q->first->visible <= seconds_now())) {
        if (!q->first && hub.closed[from]) bug("there is no message", from, net->stage, kind);
        if (q->first)
            cond_wait_until(&hub.news, &hub.lock, q->first->visible);
        else
            wait_for_news(from, net->stage, kind);
    }
    Letter *letter = q->first;
    if (letter->size != size) bug("a message of another size", from, net->stage, kind);
    memcpy(bytes, letter->bytes, size);
    q->first = letter->next;
    free(letter);
    pthread_cond_broadcast(&hub.news);
    pthread_mutex_unlock(&hub.lock);
    return 0;
}

static void local_fail(Net *net, const Error *err) {
    fprintf(stderr, "local_net: stage %d: %s\n", net->stage, err->text);
    abort();
}

/* The last one to close looks what is left. */
static void local_close(Net *net) {
    pthread_mutex_lock(&hub.lock);
    hub.closed[net->stage] = true;
    pthread_cond_broadcast(&hub.news);
    bool last = !--hub.open;
    pthread_mutex_unlock(&hub.lock);
    free(net);
    if (!last) return;
    for (int from = 0; from < hub.stages; from++)
        for (int to = 0; to < hub.stages; to++)
            for (NetKind kind = 0; kind < NKINDS_OF_MESSAGES; kind++)
                if (hub.queue[from][to][kind].first) bug("nobody has received the message", from, to, kind);
    pthread_cond_destroy(&hub.news), pthread_mutex_destroy(&hub.lock);
}

void local_net_open(Net *net[], int stages, bool rendezvous, int delay_us) {
    CHECK(stages <= MAX_STAGES && !hub.open);
    memset(&hub, 0, sizeof hub);
    hub.delay_us = delay_us, hub.stages = hub.open = stages;
    pthread_mutex_init(&hub.lock, NULL), cond_open(&hub.news);
    for (int s = 0; s < stages; s++) {
        net[s] = xcalloc(1, sizeof **net);
        *net[s] = (Net){s, stages, stages, local_post, local_receive, local_post, local_fail, local_close};
        if (rendezvous) net[s]->send = local_send;
    }
}
