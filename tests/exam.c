/* exam.c: an exam, which is linked with a student's code: it answers the questions of a judge (exam.h).
 *
 *     exam <questions 3>answers
 *
 * Each question is answered in a process of its own, which may crash. What that prints is not the answer: it goes to where
 * the exam's standard output and error go. The judge is another program, with objects of its own, and knows what is right;
 * here nothing is known but the questions.
 *
 * The functions that ask the student's code are in exam_engine.c, and those for code that is not a part of libflexgen.a in
 * exam_lp.c, exam_mini.c and exam_kernels.c. */
#include "exam.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define SIZES(kind, type, answer) {sizeof(type), offsetof(type, answer)},
static const struct {
    size_t bytes, question; /* of the struct, and of its first part */
} size_of[NASKS] = {QUESTIONS(SIZES)};

void must(int done, const char *why) {
    if (done) return;
    fprintf(stderr, "%s\n", why);
    _exit(127);
}

/* Returns 0 at the end of the questions. */
static int read_all(void *to, size_t bytes) {
    for (size_t had = 0; had < bytes;) {
        const ssize_t n = read(0, (char *)to + had, bytes - had);
        if (n <= 0) return 0;
        had += n;
    }
    return 1;
}

static void write_all(const void *from, size_t bytes) {
    for (size_t had = 0; had < bytes;) {
        const ssize_t n = write(ANSWERS_FD, (const char *)from + had, bytes - had);
        if (n <= 0) exit(0);
        had += n;
    }
}

/* Has a process fill in the answer, and behind the case a byte that is 1 if the code has returned. Returns the status for
 * the reply. */
static int32_t answered(AskKind kind, char *c, const void *question) {
    int status = 0;
    const pid_t pid = fork();
    must(pid >= 0, "fork failed");
    if (!pid) {
        must(dup2(open("/dev/null", O_RDWR), 0) == 0, "/dev/null cannot be opened");
        close(ANSWERS_FD);
        setvbuf(stdout, NULL, _IOLBF,
                BUFSIZ); /* so that the log has the lines of both in their order, and all after a crash */
        exam_begin();
        works[kind].work(c);
        c[size_of[kind].bytes] = 1;
        fflush(NULL);
        _exit(0);
    }
    waitpid(pid, &status, 0);
    if (status) return status;
    if (!c[size_of[kind].bytes]) return ENDED;
    return memcmp(c, question, size_of[kind].question) ? CHANGED : 0;
}

int main(void) {
    Ask ask;
    while (read_all(&ask, sizeof ask)) {
        must(ask.kind >= 0 && ask.kind < NASKS && works[ask.kind].work, "this exam has no such question");
        const size_t bytes = size_of[ask.kind].bytes, question = size_of[ask.kind].question;
        char *copy = calloc(1, question);
        char *c = mmap(NULL, bytes + 1, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        must(copy && c != MAP_FAILED, "out of memory");
        must((size_t)ask.bytes == question && read_all(c, question), "this is no question");
        memcpy(copy, c, question);
        const Reply reply = {answered(ask.kind, c, copy), (int32_t)(bytes - question)};
        if (reply.status) memset(c + question, 0, bytes - question);
        write_all(&reply, sizeof reply);
        write_all(c + question, bytes - question);
        munmap(c, bytes + 1);
        free(copy);
    }
}
