/* pipeline.c: the network between the stages of a pipeline of machines (section 4.4), over MPI.
 *
 * MPI's own blocking calls spin, and each would take a processor from the stage. Here one thread serves the network; it
 * alone calls MPI, begins what the others ask for, looks which of it is done, and sleeps between two looks. The others
 * sleep until theirs is done. A slowed wire is a time before which a message is not begun.
 *
 * Why nothing can be stuck here. A message arrives when its sender and its receiver have both asked for it: each stage's
 * thread then has its MPI_Isend or MPI_Irecv posted, and never waits for anything but the next look, so that MPI gets as
 * far as it can. Messages of a kind from one stage to another arrive in order, as MPI does for a communicator, and each
 * kind has one of its own, so that none waits for another kind's. So whoever waits waits for a stage that has not yet
 * asked. That stages do not wait for each other in a circle is up to those who ask: schedule.c.
 *
 * How it ends. Each stage takes leave of each other exactly once, when it is closed or when it has failed or learned of a
 * failure; with that it says why, and that it will receive nothing more. Only then may the others forget what they still
 * had to send it, and give the bytes back to their owner. So a failure reaches all, one leave-taking behind the other, and
 * when a stage has everybody's leave and has given its own, it is done. Read next: schedule.c. */
#include <math.h>
#include <mpi.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <time.h>

#include "device/net.h"
#include "util.h"

/* A message crosses in pieces of this size and a last one that is smaller, which may be empty; so one of another size than
 * expected shows, and none is too large for MPI's int. */
enum { PIECE = 4 << 20 };
enum { LEAVE = NKINDS_OF_MESSAGES, NKINDS }; /* a kind more */

/* Seconds between two looks: a share of the time since something last moved, since what has waited for long can wait a
 * little longer. On average a message is found late by half of that. */
static const double SHORTEST = 20e-6, LONGEST = 1e-3, SHARE = 1.0 / 8;

/* What is asked of the thread. One that nobody waits for has its bytes behind it, and the thread frees it. */
typedef struct Message {
    struct Message *next; /* of those that are not yet begun */
    bool receives, nobody_waits, done;
    int peer, kind;
    void *bytes;
    size_t size;
    double due; /* not to be begun before */
    int pieces; /* under way */
} Message;

/* With this a stage takes its leave. */
typedef struct {
    bool failed;
    Error error;
    uint64_t sent[NKINDS]; /* to this stage, by kinds */
} Leave;

/* What one stage and another have to do with each other. */
typedef struct {
    uint64_t sent[NKINDS], received[NKINDS];
    bool gone; /* it has taken its leave */
    Leave its, mine;
} Peer;

/* A piece that is under way; its MPI_Request is beside it. */
typedef struct {
    Message *message;
    size_t offset;
    int size;
} Piece;

typedef struct {
    Net base;
    pthread_t thread;
    pthread_mutex_t lock; /* guards all of the next five lines, and messages */
    pthread_cond_t asked, news;
    Message *first, **end; /* to be begun, in order */
    double wire_free;      /* when all that was sent so far has left on the slowed wire */
    bool opened, closing, failed;
    Error error; /* why it failed, with the stage */
    Peer *peer;  /* of each stage; sent is guarded as well, the rest is the thread's */
    double bytes_s, delay_s;

    /* the thread's alone */
    MPI_Comm comm[NKINDS];
    int npieces, capacity, nreceiving; /* of the pieces, those that receive and are no leave */
    MPI_Request *request;
    Piece *piece;
    MPI_Status *status;   /* of the pieces that have been found to be done, */
    int *index;           /* and which they are */
    bool cancelled, left; /* has given up receiving; has taken its leave */
    double moved;         /* when something last began or ended */
} Pipeline;

static void sleep_until(Pipeline *n, pthread_cond_t *cond, double until) {
    struct timespec t = {(time_t)until, (long)(1e9 * (until - floor(until)))};
    pthread_cond_timedwait(cond, &n->lock, &t);
}

// ---------------------------------------------------------------------------------------------------------------
// Failing; with the lock held, as everywhere up to the thread's loop
// ---------------------------------------------------------------------------------------------------------------

/* The first failure stays. */
static void note_failure(Pipeline *n, const Error *err) {
    if (n->failed) return;
    n->failed = true;
    n->error = *err;
    pthread_cond_broadcast(&n->news);
    pthread_cond_signal(&n->asked);
}

/* One of this stage. */
static void note_own(Pipeline *n, int code, const char *text) {
    Error err;
    fail(&err, code, "stage %d: %.*s", n->base.stage, (int)sizeof err.text - 20, text);
    note_failure(n, &err);
}

static void note_mpi(Pipeline *n, int status) {
    char text[MPI_MAX_ERROR_STRING] = "";
    int len;
    Error err;
    if (status == MPI_SUCCESS) return;
    MPI_Error_string(status, text, &len);
    fail(&err, EXIT_FAILED, "the network failed: %s; look at what mpirun has printed", text);
    note_own(n, err.code, err.text);
}

static void note_size(Pipeline *n, const Piece *p, int count) {
    Error err;
    fail(&err, EXIT_FAILED,
         "stage %d has sent a message of %zu byte%s%s instead of %zu; run the same program with the same flags on all "
         "stages",
         p->message->peer, p->offset + count, plural((double)(p->offset + count)), count >= PIECE ? " or more" : "",
         p->message->size);
    note_own(n, err.code, err.text);
}

// ---------------------------------------------------------------------------------------------------------------
// The thread: messages begin and end
// ---------------------------------------------------------------------------------------------------------------

static void finish(Pipeline *n, Message *m) {
    m->done = true;
    pthread_cond_broadcast(&n->news);
    if (m->nobody_waits) free(m);
}

static void grow(Pipeline *n) {
    n->capacity = 2 * n->capacity + 16;
    n->request = xrealloc(n->request, n->capacity, sizeof *n->request);
    n->piece = xrealloc(n->piece, n->capacity, sizeof *n->piece);
    n->status = xrealloc(n->status, n->capacity, sizeof *n->status);
    n->index = xrealloc(n->index, n->capacity, sizeof *n->index);
}

static void begin(Pipeline *n, Message *m) {
    for (size_t at = 0; at <= m->size; at += PIECE) {
        if (n->npieces == n->capacity) grow(n);
        MPI_Request *request = &n->request[n->npieces];
        char *bytes = (char *)m->bytes + at;
        int size = m->size - at < PIECE ? (int)(m->size - at) : PIECE;
        int status = m->receives ? MPI_Irecv(bytes, size, MPI_BYTE, m->peer, 0, n->comm[m->kind], request)
                                 : MPI_Isend(bytes, size, MPI_BYTE, m->peer, 0, n->comm[m->kind], request);
        note_mpi(n, status);
        if (status) continue;
        n->piece[n->npieces++] = (Piece){m, at, size};
        n->nreceiving += m->receives && m->kind != LEAVE;
        m->pieces++;
    }
    if (!m->pieces) finish(n, m);
}

/* Begins what is due. When this stage has failed, everything that is not yet begun has ended instead. */
static void begin_due(Pipeline *n) {
    double t = seconds_now();
    for (Message *m, **at = &n->first; (m = *at);) {
        if (!n->failed && m->due > t) {
            at = &m->next;
            continue;
        }
        *at = m->next;
        if (n->failed)
            finish(n, m);
        else
            begin(n, m);
        n->moved = t;
    }
    for (n->end = &n->first; *n->end;) n->end = &(*n->end)->next;
}

/* One that nobody waits for; bytes NULL: it has room for them behind it. */
static Message *message_alone(bool receives, int peer, int kind, void *bytes, size_t size) {
    Message *m = xcalloc(1, sizeof *m + (bytes ? 0 : size));
    *m = (Message){.receives = receives, .nobody_waits = true, .peer = peer, .kind = kind, .bytes = bytes, .size = size};
    if (!bytes) m->bytes = m + 1;
    return m;
}

/* Everything that this stage had to receive is done or given up. */
static void take_leave(Pipeline *n) {
    n->left = true;
    for (int to = 0; to < n->base.stages; to++) {
        Peer *p = &n->peer[to];
        p->mine.failed = n->failed;
        if (n->failed) p->mine.error = n->error;
        memcpy(p->mine.sent, p->sent, sizeof p->sent);
        if (to != n->base.stage) begin(n, message_alone(false, to, LEAVE, &p->mine, sizeof p->mine));
    }
}

static void end_message(Pipeline *n, Message *m) {
    Peer *p = &n->peer[m->peer];
    if (m->receives) p->received[m->kind]++;
    if (m->receives && m->kind == LEAVE) {
        p->gone = true;
        if (p->its.failed) note_failure(n, &p->its.error);
    }
    finish(n, m);
}

/* A piece that MPI is done with. */
static void end_piece(Pipeline *n, const Piece *p, int error, const MPI_Status *status) {
    Message *m = p->message;
    int cancelled = 0, count = p->size, class = MPI_SUCCESS;
    if (m->receives) {
        MPI_Test_cancelled(status, &cancelled);
        MPI_Get_count(status, MPI_BYTE, &count);
        n->nreceiving -= m->kind != LEAVE;
    }
    if (error != MPI_SUCCESS) MPI_Error_class(error, &class);
    if (!cancelled && (class == MPI_ERR_TRUNCATE || count != p->size))
        note_size(n, p, count);
    else if (!cancelled)
        note_mpi(n, error);
    if (!--m->pieces) end_message(n, m);
}

/* Pieces that are not to be waited for: what was to be sent to one who is gone, and has said that it receives no more. And
 * what one who is gone has not sent does not come. */
static void forget_gone(Pipeline *n) {
    Error err;
    for (int i = 0; i < n->npieces; i++) {
        if (n->request[i] == MPI_REQUEST_NULL) continue;
        Message *m = n->piece[i].message;
        Peer *p = &n->peer[m->peer];
        if (m->kind == LEAVE || !p->gone) continue;
        if (!m->receives) {
            MPI_Request_free(&n->request[i]);
            if (!--m->pieces) finish(n, m);
        } else if (p->received[m->kind] >= p->its.sent[m->kind] && !n->failed) {
            fail(&err, EXIT_FAILED, "stage %d has ended, and more was to come from it", m->peer);
            note_own(n, err.code, err.text);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------
// The thread: its loop
// ---------------------------------------------------------------------------------------------------------------

/* Lets MPI work, and ends what is done. */
static void look(Pipeline *n) {
    int ndone = 0, kept = 0, status = MPI_SUCCESS;
    pthread_mutex_unlock(&n->lock);                                  /* MPI copies large messages here */
    for (int i = 0; i < 2 && !ndone && status == MPI_SUCCESS; i++) { /* Open MPI looks first, and works then */
        status = MPI_Testsome(n->npieces, n->request, &ndone, n->index, n->status);
        if (ndone == MPI_UNDEFINED) ndone = 0; /* nothing is under way */
    }
    pthread_mutex_lock(&n->lock);
    for (int i = 0; i < ndone; i++)
        end_piece(n, &n->piece[n->index[i]], status == MPI_ERR_IN_STATUS ? n->status[i].MPI_ERROR : MPI_SUCCESS,
                  &n->status[i]);
    if (status != MPI_ERR_IN_STATUS) note_mpi(n, status);
    forget_gone(n);
    for (int i = 0; i < n->npieces; i++) {
        if (n->request[i] == MPI_REQUEST_NULL) continue;
        n->request[kept] = n->request[i];
        n->piece[kept++] = n->piece[i];
    }
    if (kept < n->npieces) n->moved = seconds_now();
    n->npieces = kept;
}

/* After a failure nothing is received any more; what MPI has already begun to receive comes to its end. */
static void give_up_receiving(Pipeline *n) {
    for (int i = 0; i < n->npieces && !n->cancelled; i++)
        if (n->piece[i].message->receives && n->piece[i].message->kind != LEAVE) MPI_Cancel(&n->request[i]);
    n->cancelled = true;
}

static bool is_over(const Pipeline *n) {
    bool all_gone = true;
    for (int i = 0; i < n->base.stages; i++) all_gone &= i == n->base.stage || n->peer[i].gone;
    return n->closing && n->left && all_gone && !n->npieces;
}

static void pause_a_while(Pipeline *n) {
    double t = seconds_now(), until = t + fmin(fmax(SHARE * (t - n->moved), SHORTEST), LONGEST);
    for (const Message *m = n->first; m; m = m->next) until = fmin(until, m->due);
    if (until > t) sleep_until(n, &n->asked, until);
}

static void serve(Pipeline *n) {
    for (int from = 0; from < n->base.stages; from++)
        if (from != n->base.stage) begin(n, message_alone(true, from, LEAVE, &n->peer[from].its, sizeof n->peer[from].its));
    while (!is_over(n)) {
        begin_due(n);
        if (n->failed) give_up_receiving(n);
        look(n);
        if ((n->failed || n->closing) && !n->left && !n->nreceiving) take_leave(n);
        pause_a_while(n);
    }
    n->failed = true; /* what nobody wants any more */
    begin_due(n);
}

/* Opens MPI, serves, closes it. All that blocks in it is done together with the other stages, at the beginning and end. */
static void *thread_main(void *arg) {
    Pipeline *n = arg;
    int provided;
    prctl(PR_SET_TIMERSLACK, 1); /* in ns; of the usual 50 us every short pause would become long */
    MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN); /* its copies have it too */
    MPI_Comm_rank(MPI_COMM_WORLD, &n->base.stage);
    MPI_Comm_size(MPI_COMM_WORLD, &n->base.stages);
    for (int k = 0; k < NKINDS; k++) MPI_Comm_dup(MPI_COMM_WORLD, &n->comm[k]);
    n->peer = xcalloc(n->base.stages, sizeof *n->peer);
    pthread_mutex_lock(&n->lock);
    n->moved = seconds_now();
    n->opened = true;
    pthread_cond_broadcast(&n->news);
    serve(n);
    pthread_mutex_unlock(&n->lock);
    MPI_Finalize();
    return NULL;
}

// ---------------------------------------------------------------------------------------------------------------
// Asking
// ---------------------------------------------------------------------------------------------------------------

static bool is_slowed(const Pipeline *n, NetKind kind) { return kind != NET_SETUP && (n->bytes_s > 0 || n->delay_s > 0); }

/* Hands it to the thread. Returns when it leaves: on the slowed wire one message leaves after the other. */
static double ask(Pipeline *n, Message *m) {
    double leaves = seconds_now();
    CHECK(m->peer >= 0 && m->peer < n->base.stages && m->peer != n->base.stage && !n->closing);
    if (!m->receives) n->peer[m->peer].sent[m->kind]++;
    if (!m->receives && is_slowed(n, m->kind)) {
        n->wire_free = fmax(n->wire_free, leaves) + (n->bytes_s > 0 ? m->size / n->bytes_s : 0);
        leaves = n->wire_free;
        m->due = leaves + n->delay_s;
    }
    *n->end = m;
    n->end = &m->next;
    pthread_cond_signal(&n->asked);
    return leaves;
}

static int report(const Pipeline *n, Error *err) {
    if (n->failed) *err = n->error;
    return n->failed ? -1 : 0;
}

static int ask_and_wait(Pipeline *n, Message *m, Error *err) {
    pthread_mutex_lock(&n->lock);
    if (!n->failed) {
        ask(n, m);
        while (!m->done) pthread_cond_wait(&n->news, &n->lock);
    }
    int status = report(n, err);
    pthread_mutex_unlock(&n->lock);
    return status;
}

/* Sends a copy; waits no longer than until it has left. */
static int send_copy(Pipeline *n, int to, NetKind kind, const void *bytes, size_t size, bool wait, Error *err) {
    Message *m = message_alone(false, to, kind, NULL, size);
    if (size) memcpy(m->bytes, bytes, size);
    pthread_mutex_lock(&n->lock);
    if (n->failed)
        free(m);
    else
        for (double leaves = ask(n, m); wait && !n->failed && seconds_now() < leaves;) sleep_until(n, &n->news, leaves);
    int status = report(n, err);
    pthread_mutex_unlock(&n->lock);
    return status;
}

static int pipeline_send(Net *net, int to, NetKind kind, const void *bytes, size_t size, Error *err) {
    Pipeline *n = (Pipeline *)net;
    /* a copy, since it stays on the slowed wire while the next one leaves */
    if (is_slowed(n, kind)) return send_copy(n, to, kind, bytes, size, true, err);
    return ask_and_wait(n, &(Message){.peer = to, .kind = kind, .bytes = (void *)bytes, .size = size}, err);
}

static int pipeline_receive(Net *net, int from, NetKind kind, void *bytes, size_t size, Error *err) {
    return ask_and_wait((Pipeline *)net,
                        &(Message){.receives = true, .peer = from, .kind = kind, .bytes = bytes, .size = size}, err);
}

static int pipeline_post(Net *net, int to, NetKind kind, const void *bytes, size_t size, Error *err) {
    return send_copy((Pipeline *)net, to, kind, bytes, size, false, err);
}

static void pipeline_fail(Net *net, const Error *err) {
    Pipeline *n = (Pipeline *)net;
    pthread_mutex_lock(&n->lock);
    note_own(n, err->code, err->text);
    pthread_mutex_unlock(&n->lock);
}

static void pipeline_close(Net *net) {
    Pipeline *n = (Pipeline *)net;
    pthread_mutex_lock(&n->lock);
    n->closing = true;
    pthread_cond_signal(&n->asked);
    pthread_mutex_unlock(&n->lock);
    pthread_join(n->thread, NULL);
    pthread_cond_destroy(&n->asked), pthread_cond_destroy(&n->news), pthread_mutex_destroy(&n->lock);
    free(n->request), free(n->piece), free(n->status), free(n->index), free(n->peer), free(n);
}

Net *net_open_mpi(double bytes_s, double delay_s, Error *err) {
    Pipeline *n = xcalloc(1, sizeof *n);
    n->base = (Net){.send = pipeline_send, .receive = pipeline_receive, .post = pipeline_post};
    n->base.fail = pipeline_fail, n->base.close = pipeline_close;
    n->bytes_s = bytes_s, n->delay_s = delay_s;
    n->end = &n->first;
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&n->lock, NULL);
    pthread_cond_init(&n->asked, &attr), pthread_cond_init(&n->news, &attr);
    pthread_condattr_destroy(&attr);
    if (pthread_create(&n->thread, NULL, thread_main, n)) {
        fail(err, EXIT_FAILED, "cannot start the thread for the network; see ulimit -u");
        free(n);
        return NULL;
    }
    pthread_mutex_lock(&n->lock);
    while (!n->opened) pthread_cond_wait(&n->news, &n->lock);
    pthread_mutex_unlock(&n->lock);
    if (n->base.stages > 1) return &n->base;
    pipeline_close(&n->base);
    return NULL;
}
