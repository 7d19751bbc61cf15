/* local_net.c: a network between threads of one process, for tests of what runs on one. tests.h says how it is opened.
 *
 * It is strict where MPI would let a fault pass: two threads that send or receive the same at once, a message that nobody
 * has received at the end, and a wait that nothing ends are bugs and abort, with a line that says whose. */
#include <pthread.h>
#include <time.h>

#include "tests.h"

enum { MAX_STAGES = 8, STUCK_S = 300 };

typedef struct Letter {
    struct Letter *next;
    const void *bytes; /* the copy behind it, or the sender's own */
    size_t size;
    double visible;
    bool copied, taken;
} Letter;

typedef struct {
    Letter *first, *last;
    bool sending, receiving;
    double visible; /* the newest letter */
} Queue;

typedef struct {
    pthread_mutex_t lock; /* guards everything */
    pthread_cond_t news;
    bool rendezvous, failed;
    Error error;
    int delay_us, stages, open;
    bool closed[MAX_STAGES];
    uint64_t random;
    Queue queue[MAX_STAGES][MAX_STAGES][NKINDS_OF_MESSAGES]; /* from, to */
} Hub;

typedef struct {
    Net base;
    Hub *hub;
} End;

/* With the lock held, as everywhere up to the functions of Net. */
static void sleep_until(Hub *h, double until) { cond_wait_until(&h->news, &h->lock, until); }

static void bug(const char *what, int from, int to, NetKind kind) {
    static const char *const names[] = {"states", "tokens", "setup"};
    fprintf(stderr, "local_net: bug: %s from stage %d to stage %d (%s)\n", what, from, to, names[kind]);
    abort();
}

static void note_failure(Hub *h, int stage, int code, const char *text) {
    if (h->failed) return;
    fail(&h->error, code, "stage %d: %.*s", stage, (int)sizeof h->error.text - 20, text);
    h->failed = true;
    pthread_cond_broadcast(&h->news);
}

static int report(const Hub *h, Error *err) {
    if (h->failed) *err = h->error;
    return h->failed ? -1 : 0;
}

/* Puts a letter behind the others; later ones do not overtake it. */
static void put(Hub *h, Queue *q, Letter *letter) {
    letter->visible = seconds_now() + (test_random(&h->random) + 1) / 2 * h->delay_us * 1e-6;
    if (letter->visible < q->visible) letter->visible = q->visible;
    q->visible = letter->visible;
    *(q->first ? &q->last->next : &q->first) = letter;
    q->last = letter;
    pthread_cond_broadcast(&h->news);
}

/* The sender of a letter that is not a copy waits until it is taken. On failure letters stay until the last end closes. */
static int send_one(Net *net, int to, NetKind kind, const void *bytes, size_t size, bool copied, Error *err) {
    End *end = (End *)net;
    Hub *h = end->hub;
    CHECK(to >= 0 && to < h->stages && to != net->stage);
    Queue *q = &h->queue[net->stage][to][kind];
    pthread_mutex_lock(&h->lock);
    if (q->sending) bug("two threads send at once", net->stage, to, kind);
    if (!h->failed) {
        Letter *letter = xcalloc(1, sizeof *letter + (copied ? size : 0));
        *letter = (Letter){.bytes = copied ? letter + 1 : bytes, .size = size, .copied = copied};
        if (copied && size) memcpy(letter + 1, bytes, size);
        put(h, q, letter);
        q->sending = true;
        for (double stuck = seconds_now() + STUCK_S; !copied && !letter->taken && !h->failed; sleep_until(h, stuck))
            if (seconds_now() > stuck || h->closed[to]) bug("nobody receives the message", net->stage, to, kind);
        q->sending = false;
        if (letter->taken) free(letter);
    }
    int status = report(h, err);
    pthread_mutex_unlock(&h->lock);
    return status;
}

static int local_send(Net *net, int to, NetKind kind, const void *bytes, size_t size, Error *err) {
    return send_one(net, to, kind, bytes, size, !((End *)net)->hub->rendezvous, err);
}

static int local_post(Net *net, int to, NetKind kind, const void *bytes, size_t size, Error *err) {
    return send_one(net, to, kind, bytes, size, true, err);
}

/* Takes the first letter out of its queue. */
static void take(Hub *h, Queue *q, void *bytes) {
    Letter *letter = q->first;
    if (letter->size) memcpy(bytes, letter->bytes, letter->size);
    q->first = letter->next;
    letter->taken = true;
    if (letter->copied) free(letter);
    pthread_cond_broadcast(&h->news);
}

static int local_receive(Net *net, int from, NetKind kind, void *bytes, size_t size, Error *err) {
    Hub *h = ((End *)net)->hub;
    char text[200];
    CHECK(from >= 0 && from < h->stages && from != net->stage);
    Queue *q = &h->queue[from][net->stage][kind];
    pthread_mutex_lock(&h->lock);
    if (q->receiving) bug("two threads receive at once", from, net->stage, kind);
    q->receiving = true;
    double stuck = seconds_now() + STUCK_S;
    while (!h->failed && !(q->first && q->first->visible <= seconds_now())) {
        if (seconds_now() > stuck || (!q->first && h->closed[from])) bug("there is no message", from, net->stage, kind);
        sleep_until(h, q->first ? q->first->visible : stuck);
    }
    q->receiving = false;
    if (!h->failed && q->first->size != size) {
        snprintf(text, sizeof text, "stage %d has sent a message of %zu bytes instead of %zu", from, q->first->size, size);
        note_failure(h, net->stage, EXIT_FAILED, text);
    }
    if (!h->failed) take(h, q, bytes);
    int status = report(h, err);
    pthread_mutex_unlock(&h->lock);
    return status;
}

static void local_fail(Net *net, const Error *err) {
    Hub *h = ((End *)net)->hub;
    pthread_mutex_lock(&h->lock);
    note_failure(h, net->stage, err->code, err->text);
    pthread_mutex_unlock(&h->lock);
}

static void clear(Hub *h, int from, int to, NetKind kind) {
    Queue *q = &h->queue[from][to][kind];
    if (q->first && !h->failed) bug("nobody has received the message", from, to, kind);
    for (Letter *letter = q->first, *next; letter; letter = next) {
        next = letter->next;
        free(letter);
    }
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
    for (int i = 0; i < h->stages * h->stages * NKINDS_OF_MESSAGES; i++)
        clear(h, i / NKINDS_OF_MESSAGES / h->stages, i / NKINDS_OF_MESSAGES % h->stages, i % NKINDS_OF_MESSAGES);
    pthread_cond_destroy(&h->news), pthread_mutex_destroy(&h->lock);
    free(h);
}

void local_net_open(Net *net[], int stages, bool rendezvous, int delay_us) {
    Hub *h = xcalloc(1, sizeof *h);
    CHECK(stages <= MAX_STAGES);
    h->rendezvous = rendezvous, h->delay_us = delay_us, h->stages = h->open = stages;
    pthread_mutex_init(&h->lock, NULL), cond_open(&h->news);
    for (int s = 0; s < stages; s++) {
        End *end = xcalloc(1, sizeof *end);
        end->base = (Net){s, stages, stages, local_send, local_receive, local_post, local_fail, local_close};
        end->hub = h;
        net[s] = &end->base;
    }
}
