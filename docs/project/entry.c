/* entry.c: answers the judge's questions with the functions of project.c, until there are no more.
 */
#include <unistd.h>

#include "ask.h"

static bool read_all(void *to, size_t bytes) {
    for (size_t had = 0; had < bytes;) {
        ssize_t n = read(0, (char *)to + had, bytes - had);
        if (n <= 0)
            return false;
        had += n;
    }
    return true;
}

static void write_all(const void *from, size_t bytes) {
    for (size_t had = 0; had < bytes;) {
        ssize_t n = write(ANSWERS_FD, (const char *)from + had, bytes - had);
        if (n <= 0)
            exit(0);
        had += n;
    }
}

/* Writes the answer to a question into `to`. Returns its bytes. */
static size_t answer(const Ask *ask, void *to, const void *given) {
    Matrix m = ask->matrix;
    switch (ask->kind) {
        case ASK_PACK:
            return pack(to, given, m);
        case ASK_UNPACK:
            unpack(to, given, ask->bytes, m);
            return (size_t)m.rows * m.cols * sizeof(float);
        case ASK_PAGES:
            choose_pages(to, given, (const int32_t *)given + ask->pages, ask->pages);
            return ask->pages;
        default:
            *(int32_t *)to = may_enter(given);
            return sizeof(int32_t);
    }
}

int main(void) {
    Ask ask;
    while (read_all(&ask, sizeof ask)) {
        size_t numbers = (size_t)ask.matrix.rows * ask.matrix.cols + ask.pages + 1;
        void *given = calloc(1, ask.bytes + 1), *to = calloc(numbers, sizeof(float));
        if (!given || !to || !read_all(given, ask.bytes))
            return 1;
        int32_t bytes = (int32_t)answer(&ask, to, given);
        write_all(&bytes, sizeof bytes);
        write_all(to, bytes);
        free(given);
        free(to);
    }
}
