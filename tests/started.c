/* started.c: see started.h. */
#include "tests/started.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

enum { TIMEOUT = 300 /* seconds, of a run that hangs */ };

With with;
char offload[300], capture[300];

void open_directories(void) {
    if (offload[0]) return;
    snprintf(offload, sizeof offload, "%s", temp_dir());
    snprintf(capture, sizeof capture, "%s", temp_dir());
    setenv("TMPDIR", offload, 1); /* the default --offload-dir */
    setenv("XDG_CACHE_HOME", temp_dir(), 1);
    setenv("CUDA_VISIBLE_DEVICES", "", 1); /* the host device, also where there is a GPU */
}

static void limit(int resource, rlim_t most) {
    if (most) CHECK(!setrlimit(resource, &(struct rlimit){most, most}));
}

/* In the child: limits, files, and off it goes. */
__attribute__((noreturn)) static void become(const char *const *argv) {
    redirect(0, with.input ? with.input : "/dev/null", O_RDONLY);
    if (with.pipe)
        CHECK(dup2(with.pipe, 1) == 1);
    else
        redirect(1, with.output ? with.output : in_dir(capture, "out"), O_WRONLY | O_CREAT | O_TRUNC);
    redirect(2, in_dir(capture, "err"), O_WRONLY | O_CREAT | O_TRUNC);
    limit(RLIMIT_AS, with.memory), limit(RLIMIT_FSIZE, with.file);
    if (with.fault) setenv("LD_PRELOAD", getenv("FAULTS_LIBRARY"), 1), setenv("FAULT", with.fault, 1);
    signal(SIGINT, SIG_DFL); /* a shell's background jobs ignore it, and so would the program */
    alarm(TIMEOUT);
    execvp(argv[0], (char *const *)argv);
    _exit(127);
}

pid_t start_program(const char *const *argv) {
    open_directories();
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (!pid) become(argv);
    return pid;
}

Result finish(pid_t pid) {
    struct rusage usage;
    int status;
    CHECK(wait4(pid, &status, 0, &usage) == pid);
    Result r = {.status = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status),
                .resident = usage.ru_maxrss * 1024};
    r.out = with.output || with.pipe ? xstrdup("") : contents(in_dir(capture, "out"), &r.out_len);
    r.err = contents(in_dir(capture, "err"), &r.err_len);
    memset(&with, 0, sizeof with);
    CU_ASSERT_EQUAL(count_files(offload), 0);
    return r;
}

void result_free(Result *r) { free(r->out), free(r->err); }
