/* bench_machine.c: what this machine can do at best, for scripts/bench.sh to put beside what flexgen does: multiply-adds of
 * floats, and of integers of 16 bits, on all threads, memcpy on one, and direct (O_DIRECT) transfers of the disk under DIR.
 * One "name value" a line, in units of 1e9 a second; a disk that takes no direct transfers gives 0. Medians.
 *
 *     bench_machine DIR [MEGABYTES]     the size of the file that is written and read (512), removed at the end */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdatomic.h>
#include <unistd.h>

#include "ops.h"

enum { RUNS = 5, PIECE = 16 << 20, READERS = 4 };

enum { CHAINS = 12, TIMES = 10 << 20 };

/* Chains of multiply-adds that need no memory: enough of them that none waits for its own last result. */
static void multiply_parts(const void *sums, int first, int n) {
    for (int i = first; i < first + n; i++) {
        V a[CHAINS], sum = {0};
        for (int c = 0; c < CHAINS; c++) a[c] = v_set((float)c);
        for (long t = 0; t < TIMES; t++)
            for (int c = 0; c < CHAINS; c++) a[c] = v_fma(a[c], v_set(0.999f), v_set(1e-3f));
        for (int c = 0; c < CHAINS; c++) sum += a[c];
        (*(V *const *)sums)[i] = sum; /* keeps the loop */
    }
}

/* The same of pairs of integers, of which VL are added to a vector. Each chain multiplies what its neighbour has added up,
 * so that no product can be used twice. */
static void multiply_pairs(const void *sums, int first, int n) {
    for (int i = first; i < first + n; i++) {
        VI a[CHAINS], sum = {0};
        for (int c = 0; c < CHAINS; c++) a[c] = c - (VI){0};
        for (long t = 0; t < TIMES; t++) {
            const VP codes = (VP)((VI){0} + ((int)t & 0xf000f));
            for (int c = 0; c < CHAINS; c++) a[c] = p_dot(codes, (VP)a[(c + 1) % CHAINS], a[c]);
        }
        for (int c = 0; c < CHAINS; c++) sum += a[c];
        memcpy(*(V *const *)sums + i, &sum, sizeof sum);
    }
}

/* Multiplications and additions a second. */
static double flop_rate(int threads, LoopPart part, int products) {
    double rates[RUNS];
    V *sums = aligned_alloc(sizeof *sums, threads * sizeof *sums);
    for (int r = 0; r < RUNS; r++) {
        double begin = seconds_now();
        host_share(INFINITY, threads, part, &sums);
        rates[r] = 2.0 * products * CHAINS * VL * TIMES * threads / (seconds_now() - begin);
    }
    free(sums);
    return median(rates, RUNS);
}

/* Bytes copied a second: each is read once and written once. */
static double copy_rate(void) {
    size_t n = (size_t)256 << 20;
    uint8_t *a = xcalloc(n, 1), *b = xcalloc(n, 1);
    double rates[RUNS];
    memset(a, 1, n), memset(b, 1, n);
    for (int r = 0; r < RUNS; r++) {
        double begin = seconds_now();
        memcpy(r & 1 ? a : b, r & 1 ? b : a, n);
        rates[r] = n / (seconds_now() - begin);
    }
    free(a), free(b);
    return median(rates, RUNS);
}

typedef struct {
    int fd;
    uint8_t *memory; /* READERS pieces */
    bool write;
    atomic_int *bad;
} Transfer;

static void transfer_pieces(const void *transfer, int first, int n) {
    const Transfer *t = transfer;
    for (int p = first; p < first + n; p++) {
        uint8_t *at = t->memory + (size_t)(p % READERS) * PIECE;
        const off_t offset = (off_t)p * PIECE;
        if ((t->write ? pwrite(t->fd, at, PIECE, offset) : pread(t->fd, at, PIECE, offset)) != PIECE) (*t->bad)++;
    }
}

static int disk_rates(const char *dir, int megabytes) {
    char path[4096];
    void *memory;
    int pieces = megabytes / 16;
    double rates[3][RUNS]; /* of writes, of reads, of several reads at a time */
    snprintf(path, sizeof path, "%s/flexgen-bench-XXXXXX", dir);
    int fd = mkstemp(path);
    if (fd < 0) return fprintf(stderr, "bench_machine: %s: %s\n", path, strerror(errno)), 1;
    unlink(path);
    CHECK(posix_memalign(&memory, 4096, (size_t)READERS * PIECE) == 0);
    memset(memory, 1, (size_t)READERS * PIECE);
    bool direct = fcntl(fd, F_SETFL, O_DIRECT) == 0, ok = direct;
    for (int r = 0; r < RUNS && ok; r++) {
        for (int way = 0; way < 3; way++) { /* each moves the whole file once */
            const bool write = way == 0;
            atomic_int bad = 0;
            host_set_threads(way == 2 ? READERS : 1);
            const double begin = seconds_now();
            host_share(INFINITY, pieces, transfer_pieces, &(Transfer){fd, memory, write, &bad});
            if (write) bad += fdatasync(fd) != 0;
            rates[way][r] = (double)pieces * PIECE / (seconds_now() - begin);
            ok = ok && !bad;
        }
    }
    if (direct && !ok) fprintf(stderr, "bench_machine: %s: %s; is the disk full?\n", dir, strerror(errno));
    printf("direct_write %.3f\n", ok ? median(rates[0], RUNS) / 1e9 : 0);
    printf("direct_read %.3f\n", ok ? median(rates[1], RUNS) / 1e9 : 0);
    printf("direct_read_%d %.3f\n", READERS, ok ? median(rates[2], RUNS) / 1e9 : 0);
    free(memory);
    close(fd);
    return direct && !ok;
}

int main(int argc, char **argv) {
    int megabytes = argc > 2 ? atoi(argv[2]) : 512, threads = host_set_threads(0);
    if (argc < 2 || megabytes < 16) return fprintf(stderr, "usage: bench_machine DIR [MEGABYTES]\n"), 2;
    printf("threads %d\n", threads);
    printf("multiply_add %.1f\n", flop_rate(threads, multiply_parts, 1) / 1e9);
    printf("integer_multiply_add %.1f\n", flop_rate(threads, multiply_pairs, 2) / 1e9);
    printf("memcpy %.2f\n", copy_rate() / 1e9);
    return disk_rates(argv[1], megabytes);
}
