/* test_team.c: loops that threads share. Every number of a loop is done once, by any team, whoever else calls, also in a
 * child. That results do not depend on the number of threads is in test_host.c. */
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/base.h"
#include "tests.h"

enum { MOST = 3000, BEHIND = 100 };

typedef struct {
    atomic_int times[MOST + BEHIND]; /* that each number was done, and of some that there are not */
    atomic_int parts;
} Numbers;

static void note(const void *what, int first, int n) {
    Numbers *a = (Numbers *)what;
    a->parts++;
    for (int i = first; i < first + n; i++) a->times[i]++;
}

/* Returns how many numbers of a loop were not done once. */
static int missed(Numbers *a, double work, int count) {
    int wrong = 0;
    memset(a, 0, sizeof *a);
    host_share(work, count, note, a);
    for (int i = 0; i < MOST + BEHIND; i++) wrong += a->times[i] != (i < count);
    return wrong;
}

TEST(every_number_is_done_once_by_any_team_and_little_by_the_caller_alone) {
    static const int counts[] = {0, 1, 2, 3, 31, 32, 33, 100, 1023, MOST};
    Numbers a;
    for (int threads = 1; threads <= 9; threads++) {
        CU_ASSERT_EQUAL(host_set_threads(threads), threads);
        CU_ASSERT_EQUAL(host_threads(), threads);
        CU_ASSERT_EQUAL(host_threads_missing(), 0);
        for (size_t i = 0; i < 2 * sizeof counts / sizeof *counts; i++) {
            CU_ASSERT_EQUAL(missed(&a, i % 2 ? INFINITY : 100, counts[i / 2]), 0);
            CU_ASSERT((threads > 1 && i % 2) || a.parts <= 1);
        }
    }
}

/* As many threads meet as a loop has parts. In each turn every thread fills its working memory, waits until all threads
 * have done so, and looks whether its numbers are still there. In the first turn there is nothing to fill: the threads only
 * wait until all of them have come. */
typedef struct {
    atomic_int here, wrong;
    int all;
} Meeting;

static void meet(const void *what, int first, int n) {
    Meeting *meeting = (Meeting *)what;
    for (int turn = 0; turn < 3; turn++) {
        const int size = turn * turn * 300;
        float *mine = scratch(size);
        meeting->wrong += (uintptr_t)mine % 64 != 0;
        for (int i = 0; i < size; i++) mine[i] = first;
        meeting->here++;
        while (meeting->here < (n + turn) * meeting->all) sched_yield(); /* n is 1 where each thread has a part */
        for (int i = 0; i < size; i++) meeting->wrong += mine[i] != first;
    }
}

static void hold_meeting(int all) {
    Meeting meeting = {.all = all};
    host_share(INFINITY, all, meet, &meeting);
    CU_ASSERT_EQUAL(meeting.wrong, 0);
}

TEST(all_of_the_team_take_part_asleep_or_not_each_with_working_memory_of_its_own) {
    host_set_threads(4);
    scratch(1000)[999] = 0; /* one thread has more than the others ask for */
    for (int turn = 0; turn < 5; turn++) {
        if (turn % 2) usleep(20000); /* by now they sleep */
        hold_meeting(4);
    }
}

static void nest(const void *what, int first, int n) {
    atomic_int *wrong = (atomic_int *)what;
    Numbers a;
    for (int i = first; i < first + n; i++) *wrong += missed(&a, INFINITY, 1 + i % 50);
}

static void *call(void *what) {
    atomic_int *wrong = what;
    Numbers a;
    for (int turn = 0; turn < 200; turn++) {
        *wrong += missed(&a, INFINITY, 1 + turn * 7 % MOST);
        if (turn % 10 == 0) host_share(INFINITY, 20, nest, wrong);
        if (turn % 100 == 0) usleep(1000);
    }
    return NULL;
}

TEST(several_threads_call_at_once_and_loops_hold_loops) {
    enum { CALLERS = 5 };
    atomic_int wrong = 0;
    pthread_t caller[CALLERS];
    host_set_threads(3);
    for (int t = 0; t < CALLERS; t++) CHECK(pthread_create(&caller[t], NULL, call, &wrong) == 0);
    for (int t = 0; t < CALLERS; t++) pthread_join(caller[t], NULL);
    CU_ASSERT_EQUAL(wrong, 0);
}

/* The loop of one caller has a helper that is slow until another caller's loops have come and gone. */
typedef struct {
    pthread_t caller;
    atomic_bool slow, others_gone, done, waited;
} Slow;

static void be_slow(const void *what, int first, int n) {
    Slow *a = (Slow *)what;
    (void)first, (void)n;
    if (pthread_equal(a->caller, pthread_self())) {
        while (!a->slow) sched_yield();
    } else if (!atomic_exchange(&a->slow, true)) {
        while (!a->others_gone) usleep(100);
        a->done = true;
    }
}

static void *call_slow(void *what) {
    Slow *a = what;
    a->caller = pthread_self();
    host_share(INFINITY, 2, be_slow, a);
    a->waited = a->done;
    return NULL;
}

TEST(who_leaves_another_loop_ends_no_wait) {
    Slow slow = {.done = false};
    pthread_t caller;
    host_set_threads(3);
    CHECK(pthread_create(&caller, NULL, call_slow, &slow) == 0);
    while (!slow.slow) usleep(100);
    for (int turn = 0; turn < 5; turn++) {
        usleep(2000);    /* by now the caller sleeps */
        hold_meeting(2); /* with the team's other helper, who then leaves */
    }
    usleep(2000); /* for one who has gone on too soon to be found out */
    slow.others_gone = true;
    pthread_join(caller, NULL);
    CU_ASSERT(slow.waited);
}

const char *test_missing(const char *name) {
#ifdef __SANITIZE_THREAD__
    if (strstr(name, "child")) return "ThreadSanitizer lets no child start threads";
#endif
    (void)name;
    return NULL;
}

/* It has none of its parent's threads. */
TEST(a_child_computes_alone_and_can_have_a_team_of_its_own) {
    Numbers a;
    host_set_threads(3);
    usleep(20000); /* all sleep */
    const pid_t pid = fork();
    if (!pid) {
        alarm(20); /* ends a child that hangs */
        int wrong = host_threads() != 1 || missed(&a, INFINITY, MOST) || a.parts != 1 || host_set_threads(2) != 2;
        for (int turn = 0; turn < 6; turn++, usleep(20000))
            wrong |= missed(&a, INFINITY, MOST); /* its helper awake or asleep */
        _exit(wrong);
    }
    int status;
    CU_ASSERT_EQUAL(waitpid(pid, &status, 0), pid);
    CU_ASSERT_EQUAL(status, 0);
}
