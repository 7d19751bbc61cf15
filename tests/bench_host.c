/* bench_host.c: the host kernels beside their bounds, from one run: linear beside OpenBLAS's sgemm if that library is
 * there, decode attention beside a plain read of memory, prefill attention beside linear. Medians. */
#include <dlfcn.h>
#include <math.h>
#include <stdatomic.h>

#include "ops.h"

/* Zeros in large pages, as in the tiers, until free_rooms is called. */
static void *rooms[16];
static int nrooms;
static void *room(size_t n, size_t size) {
    const size_t page = 2 << 20, bytes = (n * size + page - 1) / page * page;
    void *p = rooms[nrooms++] = aligned_alloc(page, bytes);
    memory_enlarge(p, bytes);
    return memset(p, 0, bytes);
}
static void free_rooms(void) {
    while (nrooms) free(rooms[--nrooms]);
}

/* The median time of `call`, in seconds, over about half a second. */
#define SECONDS(out, call)                                                        \
    do {                                                                          \
        double times_[200], end_ = seconds_now() + 0.5;                           \
        int runs_ = 0;                                                            \
        for (call; runs_ < 200 && (runs_ < 5 || seconds_now() < end_); runs_++) { \
            double begin_ = seconds_now();                                        \
            call;                                                                 \
            times_[runs_] = seconds_now() - begin_;                               \
        }                                                                         \
        out = median(times_, runs_);                                              \
    } while (0)

static void fill(float *f, f16 *h, size_t n) {
    for (size_t i = 0; i < n; i++) {
        float x = (float)((i * 2654435761u >> 8 & 0xffff) / 65536.0 - 0.5);
        if (f) f[i] = x;
        if (h) h[i] = f32_to_f16(x);
    }
}

typedef void Sgemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a, int lda, const float *b,
                   int ldb, float beta, float *c, int ldc);

/* A product of F16 weights and of the same in 4 bits. Returns the FLOP/s of the first. */
static double linear_rate(int m, int n, int k, Sgemm *sgemm) {
    const size_t bytes = quant_matrix_bytes(n, k);
    float *x = room((size_t)m * k, 4), *y = room((size_t)m * n, 4), *wide = room((size_t)n * k, 4);
    f16 *w = room((size_t)n * k, 2);
    uint8_t *packed = room(bytes, 1);
    double t, blas, quick, flops = 2.0 * m * n * k;
    fill(x, NULL, (size_t)m * k);
    fill(wide, w, (size_t)n * k);
    for (int r = 0; r < n; r += GROUP) quant_pack_rows(packed + quant_matrix_bytes(r, k), w + (size_t)r * k, k);
    SECONDS(t, run(product(F32, y, F32, n, x, w, NULL, NULL, false, false, m, n, k)));
    SECONDS(quick, run(product(F32, y, F32, n, x, packed, NULL, NULL, true, false, m, n, k)));
    printf("linear %4d x %5d x %5d   %7.1f GFLOP/s", m, n, k, flops / t / 1e9);
    if (sgemm) {
        SECONDS(blas, sgemm(101, 111, 112, m, n, k, 1, x, k, wide, k, 0, y, n));
        printf("   sgemm %7.1f (%.0f%%)", flops / blas / 1e9, 100 * blas / t);
    }
    printf("   weights %.1f GB/s\n", 2e-9 * n * k / t);
    printf("linear packed %4d x %5d x %5d %7.1f GFLOP/s: %.2f times as fast   weights %.1f GB/s\n", m, n, k,
           flops / quick / 1e9, t / quick, bytes / quick / 1e9);
    free_rooms();
    return flops / t;
}

/* Bytes that all threads read or copy in pieces. */
typedef struct {
    uint8_t *dst; /* NULL: they are read */
    const uint8_t *src;
    size_t bytes; /* of a piece */
    int pieces;
} Plain;

static void read_pieces(const void *what, int first, int n) {
    static atomic_ullong all;
    const Plain *p = what;
    const uint64_t *a = (const uint64_t *)p->src;
    uint64_t sum = 0;
    for (size_t i = first * p->bytes / 8; i < (first + n) * p->bytes / 8; i++) sum += a[i];
    atomic_fetch_add(&all, sum);
}
static void copy_pieces(const void *what, int first, int n) {
    const Plain *p = what;
    memcpy(p->dst + first * p->bytes, p->src + first * p->bytes, n * p->bytes);
}

/* Prints how many bytes a second an op uses, which uses so many, beside the plain loop. They take turns, since a shared
 * machine's bandwidth changes: medians of both, and of the ratios of each turn. */
static void print_beside(Op op, double bytes, Plain plain) {
    enum { TURNS = 15 };
    double rate[TURNS], beside[TURNS], ratio[TURNS];
    for (int turn = 0; turn < TURNS; turn++) {
        double begin = seconds_now(), middle;
        host_share(INFINITY, plain.pieces, plain.dst ? copy_pieces : read_pieces, &plain);
        middle = seconds_now();
        run(op);
        rate[turn] = bytes / (seconds_now() - middle);
        beside[turn] = (double)plain.bytes * plain.pieces / (middle - begin), ratio[turn] = rate[turn] / beside[turn];
    }
    printf("   %5.1f GB/s   plain %s %5.1f (%.0f%%)\n", median(rate, TURNS) / 1e9, plain.dst ? "copy" : "read",
           median(beside, TURNS) / 1e9, 100 * median(ratio, TURNS));
}

/* Tables of pages dealt in turns. */
static int32_t *dealt_pages(int nseq, int max_pages) {
    int32_t *pages = room((size_t)nseq * max_pages, 4);
    for (int i = 0; i < nseq * max_pages; i++) pages[i] = i % max_pages * nseq + i / max_pages;
    return pages;
}

/* Attention of nseq sequences of `context` tokens, of F16 and packed. Bytes are counted as of F16. */
static void attend_rate(int nseq, int context, int page_tokens, int h1, int nh) {
    enum { SLICE = 1 << 20, SLICES = 256 };
    const int max_pages = (context + page_tokens - 1) / page_tokens;
    const size_t rows = (size_t)nseq * max_pages * page_tokens, packed = nh * quant_bytes(h1 / nh);
    float *o = room((size_t)nseq * h1, 4);
    f16 *q = room((size_t)nseq * h1, 2);
    int32_t *pages = dealt_pages(nseq, max_pages), *len = room(nseq, 4);
    const Plain read = {NULL, memset(room(SLICES, SLICE), 1, (size_t)SLICES * SLICE), SLICE, SLICES};
    void *kv[2][2]; /* [packed][k, v] */
    fill(NULL, q, (size_t)nseq * h1);
    for (int r = 0; r < nseq; r++) len[r] = context;
    for (int part = 0; part < 2; part++) {
        f16 *x = (f16 *)(kv[0][part] = room(rows * h1, 2));
        uint8_t *bytes = (uint8_t *)(kv[1][part] = room(rows, packed));
        fill(NULL, x, rows * h1);
        for (size_t r = 0; r < rows; r++) quant_pack_heads(bytes + r * packed, x + r * h1, nh, h1 / nh);
    }
    for (int i = 0; i < 2; i++) {
        const PageTable table = paged(kv[i][0], kv[i][1], pages, len, nseq, max_pages, page_tokens, h1, nh, i);
        const Op op = attention(o, F32, q, h1, h1, table);
        printf("attend %3d x %5d tokens, %s pages of %3d, h1 %4d hd %3d", nseq, context, i ? "4-bit" : "F16  ", page_tokens,
               h1, h1 / nh);
        print_beside(op, 4.0 * nseq * context * h1, read);
    }
    free_rooms();
}

static void prefill_rate(int nseq, int s, int h1, int nh, double linear) {
    size_t n = (size_t)nseq * s * h1;
    f16 *qkv = room(3 * n, 2);
    float *o = room(n, 4);
    int32_t *start = room(nseq + 1, 4);
    double t;
    fill(NULL, qkv, 3 * n);
    for (int r = 0; r <= nseq; r++) start[r] = r * s;
    SECONDS(t, run(prefilling(F32, o, qkv, qkv + h1, start, nseq, nseq * s, h1, nh, 3 * h1)));
    double rate = 2.0 * nseq * s * (s + 1.0) * h1 / t; /* q k^T and p v, the causal half */
    printf("prefill attention %2d x %4d tokens, h1 %4d hd %3d   %6.1f GFLOP/s (%.0f%% of linear)\n", nseq, s, h1, h1 / nh,
           rate / 1e9, 100 * rate / linear);
    free_rooms();
}

/* The KV of a prefill, nseq prompts of s tokens, into pages, beside as many bytes in one piece. */
static void append_rate(int nseq, int s, int page_tokens, int h1) {
    const int rows = nseq * s, max_pages = (s + page_tokens - 1) / page_tokens;
    const size_t row = 2 * h1 * sizeof(f16), pages_bytes = (size_t)nseq * max_pages * page_tokens * row / 2;
    uint8_t *kv = room(rows, row);
    int32_t *seq = room(rows, 4), *pos = room(rows, 4);
    for (int r = 0; r < rows; r++) seq[r] = r / s, pos[r] = r % s;
    const PageTable table = paged(room(pages_bytes, 1), room(pages_bytes, 1), dealt_pages(nseq, max_pages), NULL, nseq,
                                  max_pages, page_tokens, h1, 1, false);
    printf("append %2d x %4d tokens, pages of %2d, h1 %4d", nseq, s, page_tokens, h1);
    print_beside(appending(table, kv, 2 * h1, false, 2 * h1, seq, pos, rows), (double)rows * row,
                 (Plain){room(rows, row), kv, row, rows});
    free_rooms();
}

int main(int argc, char **argv) {
    static const int products[][3] = {{16, 2048, 2048}, {1, 24576, 8192}, {4, 8192, 8192},  {8, 8192, 8192},
                                      {16, 8192, 8192}, {32, 8192, 8192}, {64, 4096, 4096}, {512, 768, 3072}};
    void *blas = dlopen("libopenblas.so.0", RTLD_NOW);
    Sgemm *sgemm = NULL;
    if (blas) *(void **)&sgemm = dlsym(blas, "cblas_sgemm");
    printf("%s, %d threads%s\n", host_isa(), host_set_threads(argc > 1 ? atoi(argv[1]) : 0),
           sgemm ? "" : ", no OpenBLAS to compare with");
    const double linear = linear_rate(2048, 2048, 2048, sgemm);
    for (size_t i = 0; i < sizeof products / sizeof *products; i++)
        linear_rate(products[i][0], products[i][1], products[i][2], sgemm);
    attend_rate(8, 2048, 16, 4096, 32);
    attend_rate(1, 16384, 16, 4096, 32);
    attend_rate(48, 2048, 16, 768, 12);
    attend_rate(16, 2048, 64, 2560, 32);
    attend_rate(10, 2048, 16, 3072, 32);
    attend_rate(8, 2048, 16, 7168, 56);
    prefill_rate(2, 512, 768, 12, linear);
    prefill_rate(1, 2048, 4096, 32, linear);
    append_rate(16, 512, 16, 768);
    append_rate(4, 2048, 16, 4096);
    return 0;
}
