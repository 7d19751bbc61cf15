/* pipeline.c: the network between the stages of a pipeline of machines (section 4.4), over MPI.
 *
 * MPI's own blocking calls spin, and each would take a processor from the stage. Here one thread
 * serves the network. It alone calls MPI: it begins the messages that the others ask for, looks
 * which of them are done, and sleeps between two looks. The other threads sleep until theirs is
 * done. A message on a slowed wire has a time before which it is not begun.
 *
 * Why there is no deadlock here. A message arrives when its sender and its receiver have both asked
 * for it: each stage's thread then has its MPI_Isend or MPI_Irecv posted, and never waits for
 * anything but the next look, so that MPI makes progress. Messages of a kind from one stage to
 * another arrive in order, as MPI guarantees for a communicator, and each kind has its own
 * communicator, so that none waits for another kind's. So a stage that waits waits for a stage that
 * has not yet asked.
 *
 * Nor do the stages of a run wait for each other in a circle. Messages are ordered by sweep i, then
 * stage p, then batch k. The hidden state (i, p, k) is sent when state (i, p - 1, k) has arrived
 * and the smaller states of its lane have been sent. The tokens of a batch follow the last stage's
 * states, and a flight's sweep begins with the tokens of its previous sweep: the last stage sends
 * these before it waits for any state of the new sweep. With overlap it only posts ops of one batch
 * before it sends the tokens of the next batch, and the queues have room for all of them
 * (device_open in lanes.c). Where it waits for ops (without overlap, or with --synchronize), it has
 * sent the tokens of all batches before the sweep (waits_in_sweep in branches/stages.c). So every
 * message waits only for smaller ones, and the smallest message that has not arrived can always be
 * sent. All stages agree on which messages exist, because that depends only on which batches are in
 * flight, and all stages receive the same tokens.
 *
 * How it ends. When a stage is closed it waits at a barrier for the others. One that fails says why
 * and aborts the job: the launcher ends all processes. No stage leaves anything behind that way:
 * the tiers are memory and a file without a name, and the tokens that a job has generated are in
 * its journal.
 * Read next: hardware.c. */
#include <math.h>
#include <mpi.h>

#include "device/parts.h"

/* Bytes. A message crosses in parts of this size and a last one that is smaller, which may be
 * empty; so a message of another size than expected is noticed, and no part is too large for MPI's
 * int. */
enum { PART = 4 << 20 };

/* Seconds between two looks: a share of the time since something last moved, since a message that
 * has waited for long can wait a little longer. On average a message is found late by half of that.
 */
static const double SHORTEST = 20e-6, LONGEST = 1e-3, SHARE = 1.0 / 8;

/* A message that the thread is asked to send or receive. One that nobody waits for has its bytes
 * behind it, and the thread frees it. */
typedef struct Message {
    struct Message *next; /* the next message that has not begun */
    bool receives, nobody_waits, done;
    int peer, kind;
    void *bytes;
    size_t size;
    double due; /* it may not begin before this time */
    int parts;  /* parts in flight */
} Message;

/* A part of a message in flight. */
typedef struct {
    Message *message;
    size_t offset;
    int size;
    MPI_Request request;
} Part;

/* This stage's end of the network. */
typedef struct {
    Net base;
    pthread_t thread;
    pthread_mutex_t lock; /* guards the next five lines, and messages */
    pthread_cond_t asked, news;
    Message *first, **end; /* messages that have not begun, in order */
    double wire_free;      /* time at which all messages so far have left on the slowed wire */
    bool opened, closing;
    int aborting; /* the exit status of a stage that has failed */
    double bytes_s, delay_s;

    /* for the thread alone */
    MPI_Comm comm[NKINDS_OF_MESSAGES];
    int nparts;
    Part *part;
    double moved; /* time at which something last began or ended */
} Pipeline;

// -------------------------------------------------------------------------------------------------
// The thread: messages begin and end; with the lock held
// -------------------------------------------------------------------------------------------------

static void abort_job(const Error *err) {
    fprintf(stderr, "%s: %s\n", speaker, err->text);
    MPI_Abort(MPI_COMM_WORLD, err->code);
}

/* Ends the job if MPI reports an error. */
static void check_mpi(int status) {
    char text[MPI_MAX_ERROR_STRING] = "";
    int len;
    Error err;
    if (status == MPI_SUCCESS)
        return;
    MPI_Error_string(status, text, &len);
    fail(&err, EXIT_FAILED, "the network failed: %s; look at what mpirun has printed", text);
    abort_job(&err);
}

static void end_message(Pipeline *n, Message *m) {
    m->done = true;
    pthread_cond_broadcast(&n->news);
    if (m->nobody_waits)
        free(m);
}

/* Begins all parts of a message. */
static void begin_message(Pipeline *n, Message *m) {
    for (size_t at = 0; at <= m->size; at += PART) {
        n->part = with_room(n->part, n->nparts, sizeof *n->part);
        Part *p = &n->part[n->nparts++];
        char *bytes = (char *)m->bytes + at;
        *p = (Part){.message = m, .offset = at, .size = m->size - at < PART ? m->size - at : PART};
        check_mpi(
            m->receives
                ? MPI_Irecv(bytes, p->size, MPI_BYTE, m->peer, 0, n->comm[m->kind], &p->request)
                : MPI_Isend(bytes, p->size, MPI_BYTE, m->peer, 0, n->comm[m->kind], &p->request));
        m->parts++;
    }
}

/* Begins all messages that are due. */
static void begin_due(Pipeline *n) {
    double t = seconds_now();
    for (Message *m, **at = &n->first; (m = *at);) {
        if (m->due > t) {
            at = &m->next;
            continue;
        }
        *at = m->next;
        begin_message(n, m);
        n->moved = t;
    }
    for (n->end = &n->first; *n->end;)
        n->end = &(*n->end)->next;
}

/* Ends a part that MPI is done with. */
static void end_part(Pipeline *n, const Part *p, int error, const MPI_Status *status) {
    Message *m = p->message;
    int count = p->size, class = MPI_SUCCESS;
    Error err;
    if (m->receives)
        MPI_Get_count(status, MPI_BYTE, &count);
    if (error != MPI_SUCCESS)
        MPI_Error_class(error, &class);
    if (class == MPI_ERR_TRUNCATE || count != p->size) {
        size_t sent = p->offset + count;
        fail(&err, EXIT_FAILED,
             "stage %d has sent a message of %zu byte%s%s instead of %zu; run the same program "
             "with the same flags on all "
             "stages",
             m->peer, sent, plural(sent), count >= PART ? " or more" : "", m->size);
        abort_job(&err);
    }
    check_mpi(error);
    if (!--m->parts)
        end_message(n, m);
}

// -------------------------------------------------------------------------------------------------
// The thread: its loop
// -------------------------------------------------------------------------------------------------

/* Lets MPI work, and ends the parts that are done. */
static void look(Pipeline *n) {
    int kept = 0;
    for (int i = 0; i < n->nparts; i++) {
        Part p = n->part[i];
        MPI_Status status;
        int over = 0;
        pthread_mutex_unlock(&n->lock); /* MPI copies large messages here */
        int error = MPI_Test(&p.request, &over, &status);
        pthread_mutex_lock(&n->lock);
        if (over || error != MPI_SUCCESS)
            end_part(n, &p, error, &status);
        else
            n->part[kept++] = p;
    }
    if (kept < n->nparts)
        n->moved = seconds_now();
    n->nparts = kept;
}

/* Sleeps until the next look, or until a thread asks for something. */
static void pause_a_while(Pipeline *n) {
    double t = seconds_now(), until = t + fmin(fmax(SHARE * (t - n->moved), SHORTEST), LONGEST);
    for (const Message *m = n->first; m; m = m->next)
        until = fmin(until, m->due);
    if (until > t)
        cond_wait_until(&n->asked, &n->lock, until);
}

/* Serves until there is nothing more to do, and all stages have come so far. */
static void serve(Pipeline *n) {
    MPI_Request all;
    int over = 0;
    while (!n->closing || n->nparts || n->first) {
        if (n->aborting)
            MPI_Abort(MPI_COMM_WORLD, n->aborting);
        begin_due(n);
        look(n);
        pause_a_while(n);
    }
    check_mpi(MPI_Ibarrier(MPI_COMM_WORLD, &all));
    while (!over) {
        check_mpi(MPI_Test(&all, &over, MPI_STATUS_IGNORE));
        pause_a_while(n);
    }
}

/* Opens MPI, serves, closes it. All blocking calls are made together with the other stages, at the
 * beginning and end. */
static void *thread_main(void *arg) {
    Pipeline *n = arg;
    int provided;
    sleep_exactly(); /* or every short pause would become long */
    MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided);
    /* copies of the communicator have it too */
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_rank(MPI_COMM_WORLD, &n->base.stage);
    MPI_Comm_size(MPI_COMM_WORLD, &n->base.stages);
    for (int k = 0; k < NKINDS_OF_MESSAGES; k++)
        MPI_Comm_dup(MPI_COMM_WORLD, &n->comm[k]);
    pthread_mutex_lock(&n->lock);
    n->moved = seconds_now();
    n->opened = true;
    pthread_cond_broadcast(&n->news);
    serve(n);
    pthread_mutex_unlock(&n->lock);
    MPI_Finalize();
    return NULL;
}

// -------------------------------------------------------------------------------------------------
// Asking
// -------------------------------------------------------------------------------------------------

static bool is_slowed(const Pipeline *n, NetKind kind) {
    return kind != NET_SETUP && (n->bytes_s > 0 || n->delay_s > 0);
}

/* Hands a message to the thread. Returns when it leaves: on the slowed wire one message leaves
 * after the other. */
static double hand_in(Pipeline *n, Message *m) {
    double leaves = seconds_now();
    CHECK(m->peer >= 0 && m->peer < n->base.stages && m->peer != n->base.stage && !n->closing);
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

static int ask_and_wait(Pipeline *n, Message *m) {
    pthread_mutex_lock(&n->lock);
    hand_in(n, m);
    while (!m->done)
        pthread_cond_wait(&n->news, &n->lock);
    pthread_mutex_unlock(&n->lock);
    return 0;
}

/* Sends a copy; with wait, returns when it has left. */
static int send_copy(Pipeline *n, int to, NetKind kind, const void *bytes, size_t size, bool wait) {
    Message *m = xcalloc(1, sizeof *m + size);
    *m = (Message){.nobody_waits = true, .peer = to, .kind = kind, .bytes = m + 1, .size = size};
    if (size)
        memcpy(m->bytes, bytes, size);
    pthread_mutex_lock(&n->lock);
    double leaves = hand_in(n, m);
    while (wait && seconds_now() < leaves)
        cond_wait_until(&n->news, &n->lock, leaves);
    pthread_mutex_unlock(&n->lock);
    return 0;
}

static int pipeline_send(Net *net, int to, NetKind kind, const void *bytes, size_t size,
                         Error *err) {
    Pipeline *n = (Pipeline *)net;
    (void)err;
    /* sends a copy, since the message stays on the slowed wire while the next one leaves */
    if (is_slowed(n, kind))
        return send_copy(n, to, kind, bytes, size, true);
    return ask_and_wait(n,
                        &(Message){.peer = to, .kind = kind, .bytes = (void *)bytes, .size = size});
}

static int pipeline_receive(Net *net, int from, NetKind kind, void *bytes, size_t size,
                            Error *err) {
    (void)err;
    return ask_and_wait(
        (Pipeline *)net,
        &(Message){.receives = true, .peer = from, .kind = kind, .bytes = bytes, .size = size});
}

static int pipeline_post(Net *net, int to, NetKind kind, const void *bytes, size_t size,
                         Error *err) {
    (void)err;
    return send_copy((Pipeline *)net, to, kind, bytes, size, false);
}

static void pipeline_fail(Net *net, const Error *err) {
    Pipeline *n = (Pipeline *)net;
    pthread_mutex_lock(&n->lock);
    n->aborting = err->code;
    pthread_cond_signal(&n->asked);
    while (true)
        pthread_cond_wait(&n->news, &n->lock);
}

static void pipeline_close(Net *net) {
    Pipeline *n = (Pipeline *)net;
    pthread_mutex_lock(&n->lock);
    n->closing = true;
    pthread_cond_signal(&n->asked);
    pthread_mutex_unlock(&n->lock);
    pthread_join(n->thread, NULL);
    pthread_cond_destroy(&n->asked);
    pthread_cond_destroy(&n->news);
    pthread_mutex_destroy(&n->lock);
    free(n->part);
    free(n);
}

Net *net_open_mpi(double bytes_s, double delay_s, Error *err) {
    Pipeline *n = xcalloc(1, sizeof *n);
    n->base = (Net){.send = pipeline_send,
                    .receive = pipeline_receive,
                    .post = pipeline_post,
                    .fail = pipeline_fail,
                    .close = pipeline_close};
    n->bytes_s = bytes_s;
    n->delay_s = delay_s;
    n->end = &n->first;
    pthread_mutex_init(&n->lock, NULL);
    cond_open(&n->asked);
    cond_open(&n->news);
    int status = pthread_create(&n->thread, NULL, thread_main, n);
    if (status) {
        fail_to_start(err, status);
        free(n);
        return NULL;
    }
    pthread_mutex_lock(&n->lock);
    while (!n->opened)
        pthread_cond_wait(&n->news, &n->lock);
    pthread_mutex_unlock(&n->lock);
    if (n->base.stages > 1)
        return &n->base;
    pipeline_close(&n->base);
    return NULL;
}
