/* local_net.c: a network between threads of one process, for tests of what runs on one. tests.h says how it is opened.
 *
 * It is strict where MPI would let a fault pass: a message that nobody has received at the end, one of another size than is
 * expected, and a wait for a stage that has ended are bugs and abort, with a line that says whose. So does a stage that
 * fails. */
#include <pthread.h>
#include <time.h>

#include "tests.h"

enum { MAX_STAGES = 8 };

typedef struct Letter {
    struct Letter *next;
    size_t size;
    double visible;
    bool *taken; /* of a sender that waits for it; NULL: none does */
    uint8_t bytes[];
} Letter;

typedef struct {
    Letter *first, *last;
    double visible; /* the newest letter */
} Queue;

typedef struct {
    pthread_mutex_t lock; /* guards everything */
    pthread_cond_t news;
    int delay_us, stages, open;
    bool closed[MAX_STAGES];
    uint64_t random;
    Queue queue[MAX_STAGES][MAX_STAGES][NKINDS_OF_MESSAGES]; /* from, to */
} Hub;

typedef struct {
    Net base;
    Hub *hub;
} End;

static void bug(const char *what, int from, int to, NetKind kind) {
    static const char *const names[] = {"states", "tokens", "setup"};
    fprintf(stderr, "local_net: bug: %s from stage %d to stage %d (%s)\n", what, from, to, names[kind]);
    abort();
}

/* Puts a letter behind the others; later ones do not overtake it. A sender that waits does so until it is taken. */
static int send_one(Net *net, int to, NetKind kind, const void *bytes, size_t size, bool waits) {
    Hub *h = ((End *)net)->hub;
    CHECK(to >= 0 && to < h->stages && to != net->stage);
    bool taken = false;
    Queue *q = &h->queue[net->stage][to][kind];
    Letter *letter = xcalloc(1, sizeof *letter + size);
    letter->size = size, letter->taken = waits ? &taken : NULL;
    memcpy(letter->bytes, bytes, size);
    pthread_mutex_lock(&h->lock);
    letter->visible = fmax(q->visible, seconds_now() + (test_random(&h->random) + 1) / 2 * h->delay_us * 1e-6);
    q->visible = letter->visible;
    *(q->first ? &q->last->next : &q->first) = letter;
    q->last = letter;
    pthread_cond_broadcast(&h->news);
    while (waits && !taken) {
        if (h->closed[to]) bug("nobody receives the message", net->stage, to, kind);
        pthread_cond_wait(&h->news, &h->lock);
    }
    pthread_mutex_unlock(&h->lock);
    return 0;
}

static int local_send(Net *net, int to, NetKind kind, const void *bytes, size_t size, Error *err) {
    (void)err;
    return send_one(net, to, kind, bytes, size, true);
}

static int local_post(Net *net, int to, NetKind kind, const void *bytes, size_t size, Error *err) {
    (void)err;
    return send_one(net, to, kind, bytes, size, false);
}

static int local_receive(Net *net, int from, NetKind kind, void *bytes, size_t size, Error *err) {
    Hub *h = ((End *)net)->hub;
    CHECK(from >= 0 && from < h->stages && from != net->stage);
    Queue *q = &h->queue[from][net->stage][kind];
    pthread_mutex_lock(&h->lock);
    (void)err;
    while (!(q->first && q->first->visible <= seconds_now())) {
        if (!q->first && h->closed[from]) bug("there is no message", from, net->stage, kind);
        if (q->first)
            cond_wait_until(&h->news, &h->lock, q->first->visible);
        else
            pthread_cond_wait(&h->news, &h->lock);
    }
    Letter *letter = q->first;
    if (letter->size != size) bug("a message of another size", from, net->stage, kind);
    memcpy(bytes, letter->bytes, size);
    q->first = letter->next;
    if (letter->taken) *letter->taken = true;
    free(letter);
    pthread_cond_broadcast(&h->news);
    pthread_mutex_unlock(&h->lock);
    return 0;
}

static void local_fail(Net *net, const Error *err) {
    fprintf(stderr, "local_net: stage %d: %s\n", net->stage, err->text);
    abort();
}

/* The last one to close looks what is left. */
static void local_close(Net *net) {
    Hub *h = ((End *)net)->hub;
    pthread_mutex_lock(&h->lock);
    h->closed[net->stage] = true;
    pthread_cond_broadcast(&h->news);
    bool last = !--h->open;
    pthread_mutex_unlock(&h->lock);
    free(net);
    if (!last) return;
    for (int from = 0; from < h->stages; from++)
        for (int to = 0; to < h->stages; to++)
            for (NetKind kind = 0; kind < NKINDS_OF_MESSAGES; kind++)
                if (h->queue[from][to][kind].first) bug("nobody has received the message", from, to, kind);
    pthread_cond_destroy(&h->news), pthread_mutex_destroy(&h->lock);
    free(h);
}

void local_net_open(Net *net[], int stages, bool rendezvous, int delay_us) {
    Hub *h = xcalloc(1, sizeof *h);
    CHECK(stages <= MAX_STAGES);
    h->delay_us = delay_us, h->stages = h->open = stages;
    pthread_mutex_init(&h->lock, NULL), cond_open(&h->news);
    for (int s = 0; s < stages; s++) {
        End *end = xcalloc(1, sizeof *end);
        end->base = (Net){s, stages, stages, local_post, local_receive, local_post, local_fail, local_close};
        if (rendezvous) end->base.send = local_send;
        end->hub = h;
        net[s] = &end->base;
    }
}
