/* stop.c: SIGINT, SIGTERM and SIGHUP end a run in order. Read next: memory.c. */
#include <signal.h>
#include <unistd.h>

#include "io/text.h"

static int caught;

static void note(int signal) {
    if (__atomic_exchange_n(&caught, signal, __ATOMIC_RELAXED)) _exit(EXIT_SIGNAL + signal);
}

void stop_catch(void) {
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    struct sigaction to = {.sa_handler = note}, before;
    sigemptyset(&to.sa_mask);
    for (int s = 0; s < 3; s++) /* what was ignored, as in a shell's background, stays so */
        if (sigaction(signals[s], NULL, &before) == 0 && before.sa_handler != SIG_IGN) sigaction(signals[s], &to, NULL);
}

const int *stop_signal(void) { return &caught; }

int stop_fail(Error *err, const char *what) {
    const int signal = __atomic_load_n(&caught, __ATOMIC_RELAXED);
    return fail(err, EXIT_SIGNAL + signal, "stopped by %s%s",
                signal == SIGINT   ? "SIGINT"
                : signal == SIGHUP ? "SIGHUP"
                                   : "SIGTERM",
                what);
}
