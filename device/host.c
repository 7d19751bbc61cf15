/* host.c: the device that is this CPU: threads, embeddings and layer norms, new rows of the cache, the next token. With
 * host_linear.c (products) and host_attend.c (attention) it is the arithmetic of one OPT layer and of the next token, as
 * plain C on plain pointers; each function is the specification of the CUDA launcher of the same name.
 *
 * Contract. Batch invariance: an output element is computed by one fixed sequence of float operations, whatever the
 * other rows are, wherever its tile lies, however many threads run, whatever the page size. So every sum has one order,
 * which each file states. Nothing is static but the number of threads and a scratch buffer per thread, so any lanes may
 * call at once. Read next: host.h and simd.h, what these files share; host_linear.c. */
#include <execinfo.h>
#include <math.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#include "device/host.h"

// ---------------------------------------------------------------------------------------------------------------
// Threads, scratch
// ---------------------------------------------------------------------------------------------------------------

const char *host_isa(void) { return ISA; }

static int threads_now, threads_missing;
#ifdef _OPENMP
static void *pass(void *gate) {
    pthread_mutex_lock(gate);
    pthread_mutex_unlock(gate);
    return NULL;
}

/* How many of n threads can be started beside each other; none of them is left. A joined thread counts against the limits
 * of the system for a moment longer, until /proc (whose directory has a link for each) has forgotten it. OpenMP's threads
 * end with pthread_exit, for which the C library loads a part of itself, or aborts: better now, with backtrace, which needs
 * it too and can do without. */
static int startable(int n) {
    void *frame;
    if (!backtrace(&frame, 1)) return 0;
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    pthread_t *thread = xcalloc(n, sizeof *thread);
    struct stat before, tasks;
    const bool counted = stat("/proc/self/task", &before) == 0;
    int started = 0;
    pthread_mutex_lock(&gate);
    while (started < n && !pthread_create(&thread[started], NULL, pass, &gate)) started++;
    pthread_mutex_unlock(&gate);
    for (int t = 0; t < started; t++) pthread_join(thread[t], NULL);
    for (int ms = 0; ms < 100 && counted && !stat("/proc/self/task", &tasks) && tasks.st_nlink > before.st_nlink; ms++)
        usleep(1000);
    free(thread);
    return started;
}

/* OpenMP ends the program if it cannot start a thread, so it is tried before: those who load the weights, the lanes of the
 * GPU and ATTEND each have a team beside the lanes. Once there were too few, there are no more later. */
static int threads_there_are(int wanted) {
    enum { TEAMS = 3 };
    static int proven = 1;
    static bool limited;
    if (wanted > proven && !limited) {
        const int all = NLANES + TEAMS * (wanted - 1), started = startable(all);
        limited = started < all;
        proven = limited ? imax(proven, 1 + (started - NLANES) / TEAMS) : wanted;
    }
    return imin(wanted, proven);
}
#endif

int host_set_threads(int threads) {
#ifdef _OPENMP
    const int wanted = threads > 0 ? imin(threads, 1024) : omp_get_num_procs();
    threads_now = threads_there_are(wanted);
    threads_missing = wanted - threads_now;
#else
    (void)threads;
    threads_now = 1;
#endif
    return threads_now;
}

int host_threads(void) {
#ifdef _OPENMP
    if (!threads_now) return omp_get_num_procs();
#endif
    return imax(threads_now, 1);
}
int host_threads_missing(void) { return threads_missing; }
int host_all_threads(void) {
    enum { CALLERS = 4 }; /* the thread that loads weights, and the lanes PROJECT with FINISH, ATTEND and C_READ */
    return NLANES + CALLERS * (host_threads() - 1);
}

static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;
static void scratch_init(void) { CHECK(pthread_key_create(&scratch_key, free) == 0); }

float *scratch(size_t floats) {
    enum { LINE = 64 }; /* bytes that a cache moves together: a vector should lie in one */
    static _Thread_local size_t have;
    pthread_once(&scratch_once, scratch_init);
    float *buffer = pthread_getspecific(scratch_key);
    if (have < floats) {
        buffer = xrealloc(buffer, floats + LINE / sizeof *buffer, sizeof *buffer);
        CHECK(pthread_setspecific(scratch_key, buffer) == 0);
        have = floats;
    }
    return (float *)(((uintptr_t)buffer + LINE - 1) / LINE * LINE);
}

// ---------------------------------------------------------------------------------------------------------------
// Rows: embed, layernorm
// ---------------------------------------------------------------------------------------------------------------

void host_embed(const Lookup *l) {
    CHECK((l->y_type == F32 || l->y_type == F16) && (l->type == F16 || l->type == BF16 || l->type == F32));
    PARALLEL_FOR((size_t)l->rows * l->cols > ENOUGH, static)
    for (int r = 0; r < l->rows; r++) {
        for (int c = 0; c < l->cols; c += VL) {
            size_t at = (size_t)r * l->cols + c;
            V v = load_any(l->table, l->type, l->idx[r] * l->table_ld + c, l->cols - c);
            if (l->add) v = load_any(l->y, l->y_type, at, l->cols - c) + v;
            store_any(l->y, l->y_type, at, v, l->cols - c);
        }
    }
}

/* The sum over a row of (x - shift)^power, power 1 or 2. */
static float row_sum(const float *x, float shift, int power, int cols) {
    V sum = {0};
    int c = 0;
    for (; c + VL <= cols; c += VL) {
        V d = v_load(x + c) - shift;
        sum += power == 1 ? d : d * d;
    }
    float tail = 0;
    for (; c < cols; c++) tail += power == 1 ? x[c] - shift : (x[c] - shift) * (x[c] - shift);
    return v_sum(sum) + tail;
}

void host_layernorm(float *y, const float *x, const f16 *w, const f16 *b, int rows, int cols) {
    PARALLEL_FOR((size_t)rows * cols > ENOUGH, static)
    for (int r = 0; r < rows; r++) {
        const float *in = x + (size_t)r * cols;
        float *out = y + (size_t)r * cols;
        float mean = row_sum(in, 0, 1, cols) / cols;
        float scale = 1 / sqrtf(row_sum(in, mean, 2, cols) / cols + 1e-5f);
        for (int c = 0; c < cols; c += VL) {
            int n = cols - c;
            V v = (v_load_part(in + c, n) - mean) * scale;
            v_store_part(out + c, v * v_load_f16_part(w + c, n) + v_load_f16_part(b + c, n), n);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------
// New k and v, into pages
// ---------------------------------------------------------------------------------------------------------------

void host_pack(uint8_t *packed, const f16 *kv, int rows, int h1, int nh, Quant quant) {
    const size_t row = 2 * nh * quant_bytes(quant, h1 / nh); /* k's heads, then v's */
    PARALLEL_FOR((size_t)rows * h1 > ENOUGH / 8, static)
    for (int r = 0; r < rows; r++) /* what is not finite poisons its group alone */
        quant_pack_heads(packed + r * row, kv + (size_t)2 * r * h1, 2 * nh, h1 / nh, quant);
}

/* Row after row: a token's k goes to one place and its v to another, and both are written in order. */
void host_append(const Append *a) {
    const size_t bytes = (size_t)a->width * sizeof(f16);
    PARALLEL_FOR(!a->alone && a->rows * bytes > ENOUGH, static)
    for (int r = 0; r < a->rows; r++) {
        int page = a->pages[(size_t)a->seq[r] * a->max_pages + a->pos[r] / a->page_tokens];
        size_t at = ((size_t)page * a->page_tokens + a->pos[r] % a->page_tokens) * bytes;
        memcpy((uint8_t *)a->k + at, (const uint8_t *)a->kv + 2 * r * bytes, bytes);
        memcpy((uint8_t *)a->v + at, (const uint8_t *)a->kv + (2 * r + 1) * bytes, bytes);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// The next token
// ---------------------------------------------------------------------------------------------------------------

static int pick_greedy(const float *logits, int vocab) {
    V top = v_set(-INFINITY); /* no comparison with NaN is true, so none gets in */
    int i = 0;
    for (; i + VL <= vocab; i += VL) top = v_max(top, v_load(logits + i));
    float best = v_largest(top);
    for (; i < vocab; i++) best = best < logits[i] ? logits[i] : best;
    for (i = 0; i < vocab; i++)
        if (logits[i] == best) return i;
    return 0;
}

/* Whether token a comes before b: more probable, or as probable with a lower id. */
static bool before(const float *p, int a, int b) { return p[a] > p[b] || (p[a] == p[b] && a < b); }

static void heap_sink(int *heap, int n, int at, const float *p) {
    for (int child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && before(p, heap[child + 1], heap[child])) child++;
        if (before(p, heap[at], heap[child])) return;
        int swap = heap[at];
        heap[at] = heap[child], heap[child] = swap;
    }
}

/* Moves the first of n tokens behind the others, and returns it. */
static int heap_pop(int *heap, int n, const float *p) {
    int first = heap[0];
    heap[0] = heap[n - 1], heap[n - 1] = first;
    heap_sink(heap, n - 1, 0, p);
    return first;
}

/* Puts the first tokens of ids[vocab] in order of probability at its END, the most probable last, and returns how many:
 * top_k, or fewer whose mass reaches top_p of what top_k left. A heap, so that only what is kept gets sorted. */
static int pick_cut(int *ids, const float *p, double *mass, const Sampling *s, int vocab) {
    const bool cut_k = s->top_k > 0 && s->top_k < vocab;
    const int most = cut_k ? s->top_k : vocab;
    int sorted = 0, kept = 0;
    double sum = 0;
    for (int i = vocab / 2; i-- > 0;) heap_sink(ids, vocab, i, p);
    if (cut_k)
        for (*mass = 0; sorted < most;) *mass += p[heap_pop(ids, vocab - sorted++, p)];
    const double want = s->top_p < 1 ? s->top_p * *mass : INFINITY;
    while (kept < most && (kept == 0 || sum < want)) {
        if (kept == sorted) heap_pop(ids, vocab - sorted++, p);
        sum += p[ids[vocab - ++kept]];
    }
    *mass = sum;
    return kept;
}

static int pick_sample(const float *logits, double u, const Sampling *s, int vocab) {
    int best = pick_greedy(logits, vocab), padded = round_up(vocab, VL);
    float *p = scratch((size_t)padded * 2);
    int *ids = (int *)(p + padded);
    double mass = 0;
    for (int i = 0; i < vocab; i += VL) {
        V x = v_load_part(logits + i, vocab - i), d = (x - logits[best]) / s->temperature;
        v_store(p + i, v_select(d == d, v_exp(d), v_set(0))); /* NaN weighs nothing */
    }
    for (int i = 0; i < vocab; i++) ids[vocab - 1 - i] = i, mass += p[i];
    bool cut = (s->top_k > 0 && s->top_k < vocab) || s->top_p < 1;
    int kept = cut ? pick_cut(ids, p, &mass, s, vocab) : vocab;
    double sum = 0;
    for (int i = 0; i < kept; i++) {
        int id = ids[vocab - 1 - i];
        sum += p[id];
        if (sum > u * mass) return id;
    }
    return best; /* nothing has a weight: infinities, or no numbers at all */
}

void host_pick(int32_t *ids, const float *logits, const int32_t *prompt, const int32_t *pos, const Sampling *sampling,
               int rows, int vocab) {
    PARALLEL_FOR((size_t)rows * vocab > ENOUGH, static)
    for (int r = 0; r < rows; r++) {
        const float *row = logits + (size_t)r * vocab;
        ids[r] = sampling->temperature > 0
                     ? pick_sample(row, random_draw(sampling->seed, prompt[r], pos[r]), sampling, vocab)
                     : pick_greedy(row, vocab);
    }
}

/* The sum of e^(x[i] - top): short sums in float, and these in double. */
static double sum_exp(const float *x, float top, int n) {
    enum { SHORT = 64 * VL };
    double sum = 0;
    for (int i = 0; i < n; i += SHORT) {
        V part = {0};
        for (int at = i; at < imin(n, i + SHORT); at += VL) {
            V e = v_exp(v_load_part(x + at, n - at) - top);
            for (int lane = n - at; lane < VL; lane++) e[lane] = 0;
            part += e;
        }
        sum += v_sum(part);
    }
    return sum;
}

void host_score(float *logp, int32_t *best, const float *logits, const int32_t *target, int rows, int vocab) {
    PARALLEL_FOR((size_t)rows * vocab > ENOUGH, static)
    for (int r = 0; r < rows; r++) {
        const float *row = logits + (size_t)r * vocab;
        best[r] = pick_greedy(row, vocab);
        float top = row[best[r]];
        logp[r] = (float)((double)row[target[r]] - top - log(sum_exp(row, top, vocab)));
    }
}
