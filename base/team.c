/* team.c: the threads that compute.
 *
 * The whole process has one team. A thread that has a loop (a lane of the GPU, the lane of the
 * CPU's attention, the thread that loads weights) opens the loop and takes parts of it, and the
 * idle threads of the team take the other parts. So the threads that compute are never more than
 * one per processor and the callers, and all of them find work.
 *
 * A layer of a small model is a dozen loops of a tenth of a millisecond, and waking a sleeping
 * thread takes as long. So an idle thread looks for new loops for a while before it sleeps, and
 * meanwhile yields its processor to any thread that wants it. (OpenMP has a team for each thread
 * that calls; as soon as there are two, all sleep at once, and a loop of a tenth of a millisecond
 * took three.)
 * Read next: device/host.c. */
#include <sched.h>
#include <stdatomic.h>

#include "base/base.h"

static const double ENOUGH = 1 << 17; /* multiplications above which help pays */
static const double PATIENCE = 2e-4;  /* seconds of looking before a thread sleeps */

/* An open loop. */
typedef struct Loop {
    LoopPart part;
    const void *what;
    int count, at_once;
    atomic_int next;    /* the first number that nobody has taken */
    atomic_int helpers; /* threads of the team that are in it */
    struct Loop *other;
} Loop;

static struct {
    int threads, missing;
    pthread_t *helper; /* threads - 1 */
    pthread_mutex_t lock;
    pthread_cond_t open, left; /* there is a new loop, or the end; a helper has left one */
    Loop *loops;
    atomic_uint opened; /* loops so far */
    atomic_bool end;
    int asleep;
} team = {.threads = 1,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .open = PTHREAD_COND_INITIALIZER,
          .left = PTHREAD_COND_INITIALIZER};

// -------------------------------------------------------------------------------------------------
// Loops
// -------------------------------------------------------------------------------------------------

static void take_parts(Loop *loop) {
    int first;
    while ((first = atomic_fetch_add(&loop->next, loop->at_once)) < loop->count)
        loop->part(loop->what, first, imin(loop->at_once, loop->count - first));
}

/* Returns a loop with something left to take, or NULL. The caller holds the lock. */
static Loop *find_loop(void) {
    Loop *loop = team.loops;
    while (loop && atomic_load(&loop->next) >= loop->count)
        loop = loop->other;
    return loop;
}

/* Looks for a new loop for a while, then sleeps. The lock is free meanwhile. */
static void await_loop(void) {
    unsigned known = atomic_load(&team.opened);
    pthread_mutex_unlock(&team.lock);
    for (double until = seconds_now() + PATIENCE;
         atomic_load(&team.opened) == known && !atomic_load(&team.end) && seconds_now() < until;)
        sched_yield();
    pthread_mutex_lock(&team.lock);
    if (atomic_load(&team.opened) != known || atomic_load(&team.end))
        return;
    team.asleep++;
    pthread_cond_wait(&team.open, &team.lock);
    team.asleep--;
}

static void *help(void *unused) {
    pthread_mutex_lock(&team.lock);
    while (!atomic_load(&team.end)) {
        Loop *loop = find_loop();
        if (!loop) {
            await_loop();
            continue;
        }
        atomic_fetch_add(&loop->helpers, 1);
        pthread_mutex_unlock(&team.lock);
        take_parts(loop);
        pthread_mutex_lock(&team.lock);
        if (atomic_fetch_sub(&loop->helpers, 1) == 1)
            pthread_cond_broadcast(&team.left);
    }
    pthread_mutex_unlock(&team.lock);
    return unused;
}

/* Removes a loop of which nothing is left to take, so that nobody joins it any more, and waits for
 * the helpers that are still in it. */
static void close_loop(Loop *loop) {
    Loop **at = &team.loops;
    pthread_mutex_lock(&team.lock);
    while (*at != loop)
        at = &(*at)->other;
    *at = loop->other;
    pthread_mutex_unlock(&team.lock);
    for (double until = seconds_now() + PATIENCE;
         atomic_load(&loop->helpers) && seconds_now() < until;)
        sched_yield();
    pthread_mutex_lock(&team.lock);
    while (atomic_load(&loop->helpers))
        pthread_cond_wait(&team.left, &team.lock);
    pthread_mutex_unlock(&team.lock);
}

void host_share(double work, int count, LoopPart part, const void *what) {
    enum { EACH = 16 }; /* parts for a thread, since some come late or are interrupted */
    if (count <= 0)
        return;
    if (team.threads == 1 || count == 1 || work <= ENOUGH) {
        part(what, 0, count);
        return;
    }
    Loop loop = {.part = part,
                 .what = what,
                 .count = count,
                 .at_once = imax(1, count / (EACH * team.threads))};
    pthread_mutex_lock(&team.lock);
    loop.other = team.loops;
    team.loops = &loop;
    atomic_fetch_add(&team.opened, 1);
    if (team.asleep)
        pthread_cond_broadcast(&team.open);
    pthread_mutex_unlock(&team.lock);
    take_parts(&loop);
    close_loop(&loop);
}

// -------------------------------------------------------------------------------------------------
// The number of threads
// -------------------------------------------------------------------------------------------------

/* A child has none of its parent's threads, but copies of the conditions on which they sleep and of
 * the lock that one of them may hold: to wake them there, or to lock it, would wait for ever. */
static void leave_to_parent(void) {
    team.threads = 1;
    team.asleep = 0;
    team.lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    team.open = team.left = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
}

static void watch_forks(void) { CHECK(pthread_atfork(NULL, NULL, leave_to_parent) == 0); }

static void end_helpers(void) {
    pthread_mutex_lock(&team.lock);
    atomic_store(&team.end, true);
    pthread_cond_broadcast(&team.open);
    pthread_mutex_unlock(&team.lock);
    for (int t = 0; t < team.threads - 1; t++)
        pthread_join(team.helper[t], NULL);
    free(team.helper);
    atomic_store(&team.end, false);
}

int host_set_threads(int threads) {
    enum { MOST = 1024 };
    int wanted = threads > 0 ? imin(threads, MOST) : processors_allowed();
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    CHECK(!team.loops);
    pthread_once(&once, watch_forks);
    end_helpers();
    team.helper = xcalloc(wanted, sizeof *team.helper);
    team.threads = 1;
    while (team.threads < wanted &&
           !pthread_create(&team.helper[team.threads - 1], NULL, help, NULL))
        team.threads++;
    team.missing = wanted - team.threads;
    return team.threads;
}

int host_threads(void) { return team.threads; }
int host_threads_missing(void) { return team.missing; }

// -------------------------------------------------------------------------------------------------
// Working memory
// -------------------------------------------------------------------------------------------------

static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;
static void scratch_init(void) {
    if (pthread_key_create(&scratch_key, free))
        out_of_memory(1, sizeof scratch_key);
}

float *scratch(size_t floats) {
    enum { LINE = 64 }; /* bytes that a cache moves together: a vector should lie in one */
    static _Thread_local size_t have;
    pthread_once(&scratch_once, scratch_init);
    float *buffer = pthread_getspecific(scratch_key);
    if (have < floats) {
        buffer = xrealloc(buffer, floats + LINE / sizeof *buffer, sizeof *buffer);
        if (pthread_setspecific(scratch_key, buffer))
            out_of_memory(1, sizeof buffer);
        have = floats;
    }
    return (float *)(((uintptr_t)buffer + LINE - 1) / LINE * LINE);
}
