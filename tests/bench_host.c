/* bench_host.c: the host kernels beside their bounds, from one run: linear beside OpenBLAS's sgemm if that library is
 * there, decode attention beside a plain read of memory, prefill attention beside linear. Medians. */
#include <dlfcn.h>
#include <time.h>

#include "../flexgen.h"

static int threads;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static int compare(const void *a, const void *b) { return *(const double *)a < *(const double *)b ? -1 : 1; }

/* The median time of `call`, in seconds, over about half a second. */
#define SECONDS(out, call)                                                \
    do {                                                                  \
        double times_[200], end_ = now() + 0.5;                           \
        int runs_ = 0;                                                    \
        for (call; runs_ < 200 && (runs_ < 5 || now() < end_); runs_++) { \
            double begin_ = now();                                        \
            call;                                                         \
            times_[runs_] = now() - begin_;                               \
        }                                                                 \
        qsort(times_, runs_, sizeof *times_, compare);                    \
        out = times_[runs_ / 2];                                          \
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

static double linear_rate(int m, int n, int k, Sgemm *sgemm) {
    float *x = (float *)xcalloc((size_t)m * k, 4), *y = (float *)xcalloc((size_t)m * n, 4),
          *wide = (float *)xcalloc((size_t)n * k, 4);
    f16 *w = (f16 *)xcalloc((size_t)n * k, 2);
    double t, blas = 0, flops = 2.0 * m * n * k;
    fill(x, NULL, (size_t)m * k);
    fill(wide, w, (size_t)n * k);
    SECONDS(t, host_linear(y, F32, n, x, w, NULL, NULL, false, m, n, k));
    if (sgemm) SECONDS(blas, sgemm(101, 111, 112, m, n, k, 1, x, k, wide, k, 0, y, n));
    printf("linear %4d x %5d x %5d   %7.1f GFLOP/s", m, n, k, flops / t / 1e9);
    if (sgemm) printf("   sgemm %7.1f (%.0f%%)", flops / blas / 1e9, 100 * blas / t);
    printf("   weights %.1f GB/s\n", 2e-9 * n * k / t);
    free(x), free(y), free(w), free(wide);
    return flops / t;
}

static uint64_t sum_all(const uint64_t *a, size_t n) {
    uint64_t sum = 0;
#ifdef _OPENMP
#pragma omp parallel for reduction(+ : sum) num_threads(threads)
#endif
    for (size_t i = 0; i < n; i++) sum += a[i];
    return sum;
}

/* Bytes/s of summing a large array on every thread. */
static double read_rate(void) {
    size_t n = (size_t)32 << 20; /* 256 MB */
    uint64_t *a = (uint64_t *)xcalloc(n, 8), sum = 0;
    double t;
    memset(a, 1, n * 8);
    SECONDS(t, sum += sum_all(a, n));
    if (sum == 1) printf(" "); /* keeps the loop */
    free(a);
    return n * 8 / t;
}

static void attend_rate(int nseq, int context, int page_tokens, int h1, int nh, double read) {
    int max_pages = (context + page_tokens - 1) / page_tokens;
    size_t each = (size_t)max_pages * page_tokens * h1, all = each * nseq;
    f16 *k = (f16 *)xcalloc(all, 2), *v = (f16 *)xcalloc(all, 2);
    float *q = (float *)xcalloc((size_t)nseq * h1, 4), *o = (float *)xcalloc((size_t)nseq * h1, 4);
    int32_t *pages = (int32_t *)xcalloc((size_t)nseq * max_pages, 4), *len = (int32_t *)xcalloc(nseq, 4);
    double t;
    fill(q, NULL, (size_t)nseq * h1);
    fill(NULL, k, all), fill(NULL, v, all);
    for (int r = 0; r < nseq; r++) len[r] = context;
    for (int i = 0; i < nseq * max_pages; i++) pages[i] = i % nseq * max_pages + i / nseq; /* dealt in turns */
    SECONDS(t, host_attend(o, q, F32, k, v, pages, len, nseq, max_pages, page_tokens, h1, nh, (Quant){0}));
    double rate = 4.0 * nseq * context * h1 / t;
    printf("attend %3d x %4d tokens, pages of %3d, h1 %4d hd %3d   %5.1f GB/s   plain read %5.1f (%.0f%%)\n", nseq, context,
           page_tokens, h1, h1 / nh, rate / 1e9, read / 1e9, 100 * rate / read);
    free(k), free(v), free(q), free(o), free(pages), free(len);
}

static void prefill_rate(int nseq, int s, int h1, int nh, double linear) {
    size_t n = (size_t)nseq * s * h1;
    f16 *kv = (f16 *)xcalloc(n, 4);
    float *q = (float *)xcalloc(n, 4), *o = (float *)xcalloc(n, 4);
    int32_t *start = (int32_t *)xcalloc(nseq + 1, 4);
    double t;
    fill(q, NULL, n), fill(NULL, kv, 2 * n);
    for (int r = 0; r <= nseq; r++) start[r] = r * s;
    SECONDS(t, host_attend_prefill(o, q, kv, start, nseq, h1, nh));
    double rate = 2.0 * nseq * s * (s + 1.0) * h1 / t; /* q k^T and p v, the causal half */
    printf("prefill attention %2d x %4d tokens, h1 %4d hd %3d   %6.1f GFLOP/s (%.0f%% of linear)\n", nseq, s, h1, h1 / nh,
           rate / 1e9, 100 * rate / linear);
    free(kv), free(q), free(o), free(start);
}

static void row_rates(void) {
    enum { ROWS = 64, VOCAB = 50272, H1 = 4096 };
    float *x = (float *)xcalloc((size_t)ROWS * VOCAB, 4);
    f16 *w = (f16 *)xcalloc(H1, 2);
    int32_t ids[ROWS], zero[ROWS] = {0};
    Sampling s[] = {{0, 1, 0, 1}, {1, 1, 0, 1}, {1, 1, 50, 1}, {1, 0.9f, 0, 1}};
    const char *names[] = {"greedy", "softmax", "top-k 50", "top-p 0.9 (flat)"};
    double t;
    fill(x, NULL, (size_t)ROWS * VOCAB);
    for (int i = 0; i < 4; i++) {
        SECONDS(t, host_pick(ids, x, zero, zero, &s[i], ROWS, VOCAB));
        printf("pick %-17s %7.1f us a row\n", names[i], 1e6 * t / ROWS);
    }
    SECONDS(t, host_layernorm(x, x, w, w, 512, H1));
    printf("layernorm of %d       %7.1f us a row\n", H1, 1e6 * t / 512);
    free(x), free(w);
}

int main(int argc, char **argv) {
    void *blas = dlopen("libopenblas.so.0", RTLD_NOW);
    Sgemm *sgemm = NULL;
    if (blas) *(void **)&sgemm = dlsym(blas, "cblas_sgemm");
    threads = host_set_threads(argc > 1 ? atoi(argv[1]) : 0);
    printf("%s, %d threads%s\n", host_isa(), threads, sgemm ? "" : ", no OpenBLAS to compare with");
    double linear = linear_rate(2048, 2048, 2048, sgemm);
    linear_rate(16, 2048, 2048, sgemm);
    linear_rate(1, 8192, 8192, sgemm);
    linear_rate(4, 8192, 8192, sgemm);
    linear_rate(64, 4096, 4096, sgemm);
    linear_rate(512, 768, 3072, sgemm);
    double read = read_rate();
    attend_rate(8, 2048, 16, 4096, 32, read);
    attend_rate(1, 16384, 16, 4096, 32, read);
    attend_rate(48, 2048, 16, 768, 12, read);
    attend_rate(16, 2048, 64, 2560, 32, read);
    attend_rate(10, 2048, 16, 3072, 32, read);
    attend_rate(8, 2048, 16, 7168, 56, read);
    prefill_rate(2, 512, 768, 12, linear);
    prefill_rate(1, 2048, 4096, 32, linear);
    row_rates();
    return 0;
}
