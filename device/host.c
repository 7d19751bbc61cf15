/* host.c: the device that is this CPU. The arithmetic of one OPT layer and of the next token, as plain C on plain
 * pointers; each function is the specification of the CUDA launcher of the same name.
 *
 * Paper: section 3 (x.w_Q ... relu(t_out.w_1).w_2), section 4.2 (computation delegation: attention where the KV lives),
 * section 5 (packed KV, sparse attention).
 *
 * Contract. Batch invariance: an output element is computed by one fixed sequence of float operations, whatever the
 * other rows are, wherever its tile lies, however many threads run, whatever the page size. So every sum has one order:
 *   linear     within a block of KC, lane l of a vector adds the products l, l + VL, l + 2 VL ...; the lanes are
 *              added as a tree; the blocks are added in order. Tiles of any size and edge run this same sequence.
 *   attention  tokens go in blocks of BLOCK by their index in the sequence, with a running maximum (an online softmax);
 *              prefill and decode share every step, so decode of token t equals row t of prefill, bit for bit. Packed
 *              numbers pass through the same steps as F16.
 * Nothing is static but the number of threads and a scratch buffer per thread, so any lanes may call at once.
 * Read next: simd.h, the vectors that it is written with. */
#include <execinfo.h>
#include <math.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#include "device/device.h"
#include "device/simd.h"

// ---------------------------------------------------------------------------------------------------------------
// Threads, scratch
// ---------------------------------------------------------------------------------------------------------------

const char *host_isa(void) { return ISA; }

static int threads_now, threads_missing;
#ifdef _OPENMP
/* The loop below, its iterations dealt to the threads, if there is enough work. Which thread runs which never matters. */
#define PARALLEL_FOR(when, how) PRAGMA(omp parallel for num_threads(host_threads()) schedule(how) if (when))

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
#else
#define PARALLEL_FOR(when, how) (void)(when);
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

enum { ENOUGH = 1 << 17 }; /* multiplications (or as much other work) that pay for waking the threads */

static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;
static void scratch_init(void) { CHECK(pthread_key_create(&scratch_key, free) == 0); }

/* This thread's working memory, at least that many floats with anything in them. It grows to the largest need, so a
 * steady loop allocates nothing; it is freed when the thread ends. Valid until the thread asks again. */
static float *scratch(size_t floats) {
    static _Thread_local size_t have;
    pthread_once(&scratch_once, scratch_init);
    float *buffer = pthread_getspecific(scratch_key);
    if (have < floats) {
        buffer = xrealloc(buffer, floats, sizeof *buffer);
        CHECK(pthread_setspecific(scratch_key, buffer) == 0);
        have = floats;
    }
    return buffer;
}

static int ceil_div(int a, int b) { return (a + b - 1) / b; }
static int round_up(int a, int b) { return ceil_div(a, b) * b; }

// ---------------------------------------------------------------------------------------------------------------
// The two tiles that everything below is made of. They are inlined for each constant mr and unrolled, so that the
// sums stay in registers.
// ---------------------------------------------------------------------------------------------------------------

/* sum[j] += the lanes of acc[j]. */
INLINE void add_sums(float sum[NR], const V acc[NR]) {
    V4 s = v_sum4(acc[0], acc[1], acc[2], acc[3]), old;
    memcpy(&old, sum, sizeof old);
    s += old;
    memcpy(sum, &s, sizeof s);
}

/* sum[i][j] += x[i] . w[j] for mr rows of x and NR rows of w, over k. */
INLINE void dot_tile(float *sum, size_t sum_ld, const float *x, size_t x_ld, const f16 *const w[NR], int k, const int mr) {
    V acc[6][NR] = {{{0}}}, a[6];
    for (int p = 0; p < k; p += VL) {
        int n = k - p;
        if (n >= VL) {
            UNROLL
            for (int i = 0; i < mr; i++) a[i] = v_load(x + i * x_ld + p);
        } else {
            UNROLL
            for (int i = 0; i < mr; i++) a[i] = v_load_part(x + i * x_ld + p, n);
        }
        UNROLL
        for (int j = 0; j < NR; j++) {
            V b = n >= VL ? v_load_f16(w[j] + p) : v_load_f16_part(w[j] + p, n);
            UNROLL
            for (int i = 0; i < mr; i++) acc[i][j] = v_fma(a[i], b, acc[i][j]);
        }
    }
    UNROLL
    for (int i = 0; i < mr; i++) add_sums(sum + i * sum_ld, acc[i]);
}

/* Calls tile(..., mr) with each possible number of rows as a constant. */
#define FOR_ROWS(mr, tile, ...)            \
    do {                                   \
        if (mr == 1) tile(__VA_ARGS__, 1); \
        if (mr == 2) tile(__VA_ARGS__, 2); \
        if (mr == 3) tile(__VA_ARGS__, 3); \
        if (mr == 4) tile(__VA_ARGS__, 4); \
        if (mr == 5) tile(__VA_ARGS__, 5); \
        if (mr == 6) tile(__VA_ARGS__, 6); \
    } while (0)

static void dot_rows(float *sum, size_t sum_ld, const float *x, size_t x_ld, const f16 *const w[NR], int k, int mr) {
    FOR_ROWS(mr, dot_tile, sum, sum_ld, x, x_ld, w, k);
}

/* o[i] += sum over t < nt of p[i][t] v[t], in the order of t, for mr rows and nv vectors' worth of columns. The last
 * vector may be cut to `last` columns of v; o is padded. */
INLINE void weigh_tile(float *o, size_t o_ld, const float *p, size_t p_ld, const f16 *const *v, int d, int nt,
                       const int last, const int nv, const int mr) {
    V acc[6][4], a[6];
    UNROLL
    for (int i = 0; i < mr; i++) {
        UNROLL
        for (int u = 0; u < nv; u++) acc[i][u] = v_load(o + i * o_ld + d + u * VL);
    }
    for (int t = 0; t < nt; t++) {
        UNROLL
        for (int i = 0; i < mr; i++) a[i] = v_set(p[i * p_ld + t]);
        UNROLL
        for (int u = 0; u < nv; u++) {
            V b = v_load_f16_part(v[t] + d + u * VL, last);
            UNROLL
            for (int i = 0; i < mr; i++) acc[i][u] = v_fma(a[i], b, acc[i][u]);
        }
    }
    UNROLL
    for (int i = 0; i < mr; i++) {
        UNROLL
        for (int u = 0; u < nv; u++) v_store(o + i * o_ld + d + u * VL, acc[i][u]);
    }
}

INLINE void weigh_columns(float *o, size_t o_ld, const float *p, size_t p_ld, const f16 *const *v, int hd, int nt,
                          const int mr) {
    int d = 0;
    for (; d + 4 * VL <= hd; d += 4 * VL) weigh_tile(o, o_ld, p, p_ld, v, d, nt, VL, 4, mr);
    for (; d + VL <= hd; d += VL) weigh_tile(o, o_ld, p, p_ld, v, d, nt, VL, 1, mr);
    if (d < hd) weigh_tile(o, o_ld, p, p_ld, v, d, nt, hd - d, 1, mr);
}

static void weigh_rows(float *o, size_t o_ld, const float *p, size_t p_ld, const f16 *const *v, int hd, int nt, int mr) {
    if (mr == MR)
        weigh_columns(o, o_ld, p, p_ld, v, hd, nt, MR);
    else
        for (int i = 0; i < mr; i++) weigh_columns(o + i * o_ld, o_ld, p + i * p_ld, p_ld, v, hd, nt, 1);
}

// ---------------------------------------------------------------------------------------------------------------
// Rows: embed, layernorm, linear
// ---------------------------------------------------------------------------------------------------------------

INLINE V load_any(const void *p, Type type, size_t at, int n) {
    if (type == F16) return v_load_f16_part((const f16 *)p + at, n);
    if (type == F32) return v_load_part((const float *)p + at, n);
    VH upper = {0}; /* BF16 is the upper half of a float */
    memcpy(&upper, (const f16 *)p + at, (size_t)imin(n, VL) * sizeof(f16));
    return (V)(__builtin_convertvector(upper, VI) << 16);
}

INLINE void store_any(void *p, Type type, size_t at, V v, int n) {
    if (type == F32)
        v_store_part((float *)p + at, v, n);
    else
        v_store_f16_part((f16 *)p + at, v, n);
}

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

/* A task is a block of mc x nc outputs. KC columns of a tile's x and of a task's w stay in the caches. Few rows of x
 * read w from memory, so their tasks are narrow, which reads it nearly in sequence. */
enum { KC = 2048, MC = 96, NC = 256, NC_FEW = 16 };

/* Columns col .. col+nc of row r, from their sums. */
static void linear_finish(const Product *p, const float *sum, size_t r, size_t col, int nc) {
    size_t at = r * p->y_ld + col;
    for (int j = 0; j < nc; j += VL) {
        int n = nc - j;
        V v = v_load(sum + j);
        if (p->b) v += v_load_f16_part((const f16 *)p->b + col + j, n);
        if (p->relu) v = v_select(v < 0.0f, v_set(0), v);
        if (p->residual) v += v_load_part((const float *)p->residual + at + j, n);
        store_any(p->y, p->y_type, at + j, v, n);
    }
}

static void linear_task(const Product *p, int row, int mc, int col, int nc) {
    const float *x = (const float *)p->x + (size_t)row * p->k;
    float sum[MC * NC];
    int ld = round_up(nc, VL);
    memset(sum, 0, (size_t)mc * ld * sizeof *sum);
    for (int k0 = 0; k0 < p->k; k0 += KC) {
        for (int i = 0; i < mc; i += MR) {
            for (int j = 0; j < nc; j += NR) {
                const f16 *w[NR]; /* past the last column the last one again: its sums are not used */
                for (int u = 0; u < NR; u++) w[u] = (const f16 *)p->w + (size_t)(col + imin(j + u, nc - 1)) * p->k + k0;
                dot_rows(sum + i * ld + j, ld, x + (size_t)i * p->k + k0, p->k, w, imin(KC, p->k - k0), imin(MR, mc - i));
            }
        }
    }
    for (int i = 0; i < mc; i++) linear_finish(p, sum + i * ld, row + i, col, nc);
}

/* Of packed weights a task has the PART outputs that lie side by side in a column's group, or what is left of it, and some
 * rows. It takes KB columns at a time: within such a block each output adds its products in order from 0, and the blocks
 * are added in order. For more than one tile of rows a block is unpacked to where the nearest cache holds it; one tile
 * unpacks it into its registers. */
enum { PART = 64, KB = 64, MCP = 192 };

/* nc columns of a part: their codes and what these stand for, or their numbers. */
typedef struct {
    int nc;
    bool unpacked;
    const uint8_t *codes; /* the first column's; the next are `size` apart */
    size_t size;
    Table table[KB];
    float w[KB][PART]; /* zeros past the end of a group */
} Columns;

/* The columns' numbers from `first` on, where they begin at byte `from`. */
static void load_columns(Columns *a, Quant quant, const uint8_t *from, int first, bool unpacked) {
    const int group = quant.group, n = imin(PART, group - first);
    const bool quick = quant.bits == 4 && group % 32 == 0;
    a->codes = from + 4 + first / 2;
    a->unpacked = unpacked || !quick || n < PART;
    for (int c = 0; quick && c < a->nc; c++) { /* apart from their use, because a table takes long to be ready */
        __builtin_prefetch(from + (KB + c) * a->size, 0, 2); /* the few lines that each use reads lie far apart */
        a->table[c] = t_load(from + c * a->size);
    }
    if (!a->unpacked) return;
    f16 *all = quick ? NULL : (f16 *)scratch(group);
    for (int c = 0; c < a->nc; c++) {
        float *to = a->w[c];
        if (n < PART) memset(to, 0, sizeof a->w[c]);
        if (!quick) {
            quant_unpack(all, 1, from + c * a->size, group, quant);
            for (int j = 0; j < n; j++) to[j] = f16_to_f32(all[first + j]);
            continue;
        }
        for (int j = 0; j < n; j += 32) {
            V out[32 / VL];
            t_block(out, &a->table[c], a->codes + c * a->size + j / 2);
            for (int u = 0; u < 32 / VL; u++) v_store(to + j + u * VL, out[u]);
        }
    }
}

/* sum[i][j] += sum over columns c of x[i][c] w[c][j], in the order of c, for mr rows. */
INLINE void part_tile(float *sum, const float *x, size_t x_ld, const Columns *w, const bool unpacked, const int mr) {
    enum { BLOCKS = NR * VL / 32 ? NR * VL / 32 : 1, EACH = 32 / VL, NV = BLOCKS * EACH };
    for (int j = 0; j < PART; j += NV * VL) {
        V acc[6][NV] = {{{0}}}, a[6], b[EACH];
        for (int c = 0; c < w->nc; c++) {
            UNROLL
            for (int i = 0; i < mr; i++) a[i] = v_set(x[i * x_ld + c]);
            UNROLL
            for (int d = 0; d < BLOCKS; d++) {
                if (!unpacked) t_block(b, &w->table[c], w->codes + c * w->size + j / 2 + 16 * d);
                UNROLL
                for (int u = 0; u < EACH; u++) {
                    if (unpacked) b[u] = v_load(w->w[c] + j + 32 * d + u * VL);
                    UNROLL
                    for (int i = 0; i < mr; i++) acc[i][d * EACH + u] = v_fma(a[i], b[u], acc[i][d * EACH + u]);
                }
            }
        }
        UNROLL
        for (int i = 0; i < mr; i++) {
            UNROLL
            for (int u = 0; u < NV; u++) {
                float *to = sum + i * PART + j + u * VL;
                v_store(to, v_load(to) + acc[i][u]);
            }
        }
    }
}

/* Part `part` of the columns' groups, and mc rows. */
static void packed_task(const Product *p, int row, int mc, int part) {
    const int k = p->k, parts = ceil_div(p->quant.group, PART), group = part / parts, first = part % parts * PART;
    const int col = group * p->quant.group + first, nc = imin(imin(PART, p->quant.group - first), p->n - col);
    float sum[MCP * PART];
    Columns w = {.size = quant_bytes(p->quant, p->quant.group)};
    if (nc <= 0) return; /* the last row of groups may have room for more than there is */
    memset(sum, 0, (size_t)mc * PART * sizeof *sum);
    for (int c = 0; c < k; c += KB) {
        w.nc = imin(KB, k - c);
        load_columns(&w, p->quant, (const uint8_t *)p->w + ((size_t)group * k + c) * w.size, first, mc > MR);
        const float *x = (const float *)p->x + (size_t)row * k + c;
        if (w.unpacked)
            for (int i = 0; i < mc; i += MR)
                FOR_ROWS(imin(MR, mc - i), part_tile, sum + i * PART, x + (size_t)i * k, k, &w, true);
        else
            FOR_ROWS(mc, part_tile, sum, x, k, &w, false);
    }
    for (int i = 0; i < mc; i++) linear_finish(p, sum + i * PART, row + i, col, nc);
}

void host_linear(const Product *p) {
    const int group = p->quant.bits ? p->quant.group : 0, enough = 4 * host_threads(); /* tasks, to deal them out evenly */
    int mc = group ? MCP : MC, nc = p->m <= MC / 2 ? NC_FEW : NC;
    int row_tasks = ceil_div(p->m, mc),
        col_tasks = group ? ceil_div(p->n, group) * ceil_div(group, PART) : ceil_div(p->n, nc);
    CHECK((p->y_type == F32 || p->y_type == F16) && p->quant.bits <= 8 && !p->quant.bits == !group);
    for (; group && mc > MCP / 8 && row_tasks * col_tasks < enough; row_tasks = ceil_div(p->m, mc)) mc /= 2;
    for (; !group && nc > NC_FEW && row_tasks * col_tasks < enough; col_tasks = ceil_div(p->n, nc)) nc /= 2;
    /* whoever is free takes the next: a copy beside may keep one of the threads from its core */
    PARALLEL_FOR((double)p->m * p->n * p->k > ENOUGH, dynamic)
    for (int task = 0; task < row_tasks * col_tasks; task++) {
        int row = task / col_tasks * mc, col = task % col_tasks, rows = imin(mc, p->m - row);
        if (group)
            packed_task(p, row, rows, col);
        else
            linear_task(p, row, rows, col * nc, imin(nc, p->n - col * nc));
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Attention: softmax(q k^T / sqrt(hd)) v, one block of tokens after another (section 3); prefill
// ---------------------------------------------------------------------------------------------------------------

enum { BLOCK = 64 }; /* tokens */

/* What a query has seen: m the largest score, l the sum of e^(score - m), o the sum of e^(score - m) v. */
typedef struct {
    float m, l;
} Seen;

/* score[n] becomes e^(score - *m), where *m is first raised to the largest, and is 0 from there up to `room`, whole
 * vectors. Returns the sum. */
INLINE float exponentiate(float *score, int n, const int room, float *m) {
    V top = v_set(*m), sum = {0};
    for (int t = n; t < room; t++) score[t] = -INFINITY;
    for (int t = 0; t < room; t += VL) top = v_max(top, v_load(score + t));
    *m = v_largest(top);
    for (int t = 0; t < room; t += VL) {
        V p = v_exp(v_load(score + t) - *m);
        v_store(score + t, p);
        sum += p;
    }
    return v_sum(sum);
}

/* Turns n scores of a block into weights, and rescales what was seen before. */
static void softmax_block(float *score, int n, Seen *seen, float *o, int hd) {
    float before = seen->m, sum = exponentiate(score, n, BLOCK, &seen->m), scale = v_exp(v_set(before - seen->m))[0];
    if (scale != 1)
        for (int d = 0; d < hd; d += VL) v_store(o + d, v_load(o + d) * scale);
    seen->l = seen->l * scale + sum;
}

/* Element `at` of out and the hd-1 after it. */
static void attend_finish(void *out, Type type, size_t at, const float *o, Seen seen, int hd) {
    for (int d = 0; d < hd; d += VL) store_any(out, type, at + d, v_load(o + d) / seen.l, hd - d);
}

/* q[rows][hd] = in * hd^-1/2, as OPT scales it; row i of in begins at element at + i * in_ld. */
static void scale_q(float *q, const void *in, Type type, size_t at, size_t in_ld, int rows, int hd) {
    V scale = v_set(1 / sqrtf((float)hd));
    for (int i = 0; i < rows; i++)
        for (int d = 0; d < hd; d += VL)
            v_store_part(q + (size_t)i * hd + d, load_any(in, type, at + i * in_ld + d, hd - d) * scale, hd - d);
}

/* Queries of one head that attend_prefill takes together: each block of k and v is gathered once for all of them. */
enum { QUERIES = 96 };

typedef struct {
    float *q, *o; /* (QUERIES, hd) scaled; (QUERIES, hd padded) */
    f16 *k, *v;   /* (BLOCK, hd): the head's part of a block, row by row */
    float score[6 * BLOCK];
    const f16 *krow[BLOCK + NR], *vrow[BLOCK];
    Seen seen[QUERIES];
    int hd, hdp;
} PrefillTask;

/* Rows i .. i+mr of the queries, the first at position pos, meet tokens t0 .. t0+nt. */
static void prefill_tile(PrefillTask *a, int i, int mr, int pos, int t0, int nt) {
    nt = imin(nt, pos + mr - t0);
    if (nt <= 0) return;
    float *o = a->o + (size_t)i * a->hdp;
    memset(a->score, 0, sizeof a->score);
    for (int t = 0; t < nt; t += NR) dot_rows(a->score + t, BLOCK, a->q + (size_t)i * a->hd, a->hd, a->krow + t, a->hd, mr);
    int common = imax(0, imin(nt, pos + 1 - t0)); /* tokens that all of the rows may see */
    for (int r = 0; r < mr; r++) {
        int n = imin(nt, pos + r + 1 - t0);
        if (n > 0) softmax_block(a->score + r * BLOCK, n, &a->seen[i + r], o + r * a->hdp, a->hd);
    }
    weigh_rows(o, a->hdp, a->score, BLOCK, a->vrow, a->hd, common, mr);
    for (int r = 0; r < mr; r++) {
        int n = imin(nt, pos + r + 1 - t0);
        if (n > common)
            weigh_rows(o + r * a->hdp, a->hdp, a->score + r * BLOCK + common, BLOCK, a->vrow + common, a->hd, n - common,
                       1);
    }
}

/* Queries q0 .. q0+nq of one head of one sequence of s tokens; o, q, k, v point at its token 0. */
static void prefill_task(float *o, const float *q, const f16 *k, const f16 *v, int q0, int nq, int h1, int hd) {
    PrefillTask a = {.hd = hd, .hdp = round_up(hd, VL)};
    a.q = scratch((size_t)QUERIES * (hd + a.hdp) + BLOCK * hd);
    a.o = a.q + (size_t)QUERIES * hd;
    a.k = (f16 *)(a.o + (size_t)QUERIES * a.hdp);
    a.v = a.k + (size_t)BLOCK * hd;
    scale_q(a.q, q, F32, (size_t)q0 * h1, h1, nq, hd);
    memset(a.o, 0, (size_t)nq * a.hdp * sizeof *a.o);
    for (int i = 0; i < nq; i++) a.seen[i] = (Seen){-INFINITY, 0};
    for (int t0 = 0; t0 < q0 + nq; t0 += BLOCK) {
        int nt = imin(BLOCK, q0 + nq - t0);
        for (int t = 0; t < nt; t++) {
            size_t at = (size_t)(t0 + t) * 2 * h1;
            a.krow[t] = memcpy(a.k + (size_t)t * hd, k + at, (size_t)hd * sizeof *k);
            a.vrow[t] = memcpy(a.v + (size_t)t * hd, v + at, (size_t)hd * sizeof *v);
        }
        for (int t = nt; t < nt + NR; t++) a.krow[t] = a.krow[nt - 1]; /* fills the last tile; its scores are not used */
        for (int i = 0; i < nq; i += MR) prefill_tile(&a, i, imin(MR, nq - i), q0 + i, t0, nt);
    }
    for (int i = 0; i < nq; i++) attend_finish(o, F32, (size_t)(q0 + i) * h1, a.o + (size_t)i * a.hdp, a.seen[i], hd);
}

void host_attend_prefill(const Prefill *p) {
    const int h1 = p->h1, hd = h1 / p->nh;
    int longest = 0;
    for (int r = 0; r < p->nseq; r++) longest = imax(longest, p->start[r + 1] - p->start[r]);
    int blocks = ceil_div(longest, QUERIES);
    PARALLEL_FOR((double)longest * longest * h1 * p->nseq > ENOUGH, dynamic)
    for (int task = 0; task < p->nseq * p->nh * blocks; task++) {
        int r = task / (p->nh * blocks), h = task / blocks % p->nh, q0 = task % blocks * QUERIES;
        int s = p->start[r + 1] - p->start[r];
        size_t row = p->start[r], at = row * h1 + (size_t)h * hd;
        const f16 *k = (const f16 *)p->kv + row * 2 * h1 + (size_t)h * hd;
        if (q0 < s)
            prefill_task((float *)p->o + at, (const float *)p->q + at, k, k + h1, q0, imin(QUERIES, s - q0), h1, hd);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Decode attention to pages (section 4.2)
//
// A thread takes a task: some heads of one sequence. It goes through the sequence's tokens a block at a time. The page
// table says where a token's row of K and of V lies; of each row the task has the part of its heads, which lie side by
// side:
//
//     page table          rows of K                   of a task with 2 of 4 heads
//     t0 .. t3   ----->   t0 | h0 h1 [h2 h3] |                              t0   t1   t2   t3  ...
//     t4 .. t7   ---.     t1 | h0 h1 [h2 h3] |    q[h] . k[t] = score   h2   .    .    .    .
//                   |     ..                                            h3   .    .    .    .
//                   '->   t4 | h0 h1 [h2 h3] |
//
//     attend_task, for each block:   find_rows       where its tokens lie
//                                    score_block     score[h][t] = q[h] . k[t]
//                                    softmax_block   scores become weights
//                                    weigh_heads     o[h] += weight[h][t] v[t]
//     Sparse attention (section 5):
//     select_task                    the scores of all tokens; each head's largest, and what they weigh
//     weigh_task                     o[h], the weighted sum of each head's own tokens
//
// A head of K or V is F16, or packed. Packed numbers become vectors by a table in registers wherever runs of 16 lie in one
// group (`tables`); otherwise a head is unpacked to memory first. Both ways end in the sums that F16 passes through.
// ---------------------------------------------------------------------------------------------------------------

enum {
    HEADS = 16, /* that a task takes at most: more than one, so that a token's k is read in long runs */
    WEIGH = 8,  /* tokens whose v meet in registers */
};

/* A task: heads h .. h+nh-1 of sequence r, which has len tokens. */
typedef struct {
    const Attention *a;
    int r, h, nh, hd, len;
    const int32_t *pages;
    size_t head_bytes, group_bytes; /* of a head in a page, of a whole group in it */
    bool tables;
    size_t at;  /* the first head's first element in q and o */
    f16 *plain; /* (WEIGH, hd): heads that are unpacked */
} Heads;

/* Calls `run` for every task, on all threads if `tokens` of a sequence are enough work for that. */
static void for_tasks(const Attention *a, int tokens, void (*run)(Heads)) {
    const int most = imax(1, imin(imin(a->nh, HEADS), a->nseq * a->nh / host_threads())); /* heads: for enough tasks */
    const int parts = ceil_div(a->nh, most), hd = a->h1 / a->nh;
    const Quant quant = a->quant;
    CHECK(a->act_type == F32 || a->act_type == F16);
    PARALLEL_FOR((double)tokens * a->nseq * a->h1 > ENOUGH, dynamic)
    for (int i = 0; i < a->nseq * parts; i++) {
        Heads c = {.a = a, .r = i / parts, .h = i % parts * most, .hd = hd};
        c.nh = imin(most, a->nh - c.h), c.len = a->len[c.r], c.pages = a->pages + (size_t)c.r * a->max_pages;
        c.head_bytes = quant.bits ? quant_bytes(quant, hd) : hd * sizeof(f16);
        c.group_bytes = quant.bits ? quant_bytes(quant, quant.group) : 0;
        c.tables = quant.bits == 4 && quant.group % 32 == 0 && hd % 16 == 0;
        c.at = (size_t)c.r * a->h1 + c.h * hd;
        run(c);
    }
}

static int longest(const Attention *a) {
    int most = 0;
    for (int r = 0; r < a->nseq; r++) most = imax(most, a->len[r]);
    return most;
}

/* The k (base a->k) or v (base a->v) of token t: its part that the task has. */
static const uint8_t *find_row(const Heads *c, const void *base, int t) {
    const int page_tokens = c->a->page_tokens;
    size_t row = (size_t)c->pages[t / page_tokens] * page_tokens + t % page_tokens;
    return (const uint8_t *)base + (row * c->a->nh + c->h) * c->head_bytes;
}

/* A block's rows of K or V; room for NR more. */
typedef struct {
    int n;
    const uint8_t *at[BLOCK + NR];
} Rows;

/* Tokens t0 .. t0+BLOCK-1, or those that there are. */
static void find_rows(Rows *rows, const Heads *c, const void *base, int t0) {
    rows->n = imax(0, imin(BLOCK, c->len - t0));
    for (int t = 0; t < rows->n; t++) rows->at[t] = find_row(c, base, t0 + t);
}

/* Asks for a head of n rows, which begins at byte `at`. Pages lie anywhere, so the processor cannot foresee them; we know
 * them a block ahead: reading k asks for the same tokens' v, reading v asks for the next block's k. */
INLINE void prefetch_rows(const uint8_t *const *row, int n, size_t at, size_t bytes) {
    for (int t = 0; t < n; t++)
        for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(row[t] + at + i, 0, 2);
}

/* n <= WEIGH heads as F16. */
static void read_heads(const f16 **plain, const Heads *c, const uint8_t *const *head, int n) {
    for (int u = 0; u < n; u++) {
        plain[u] = c->a->quant.bits ? c->plain + (size_t)u * c->hd : (const f16 *)(const void *)head[u];
        if (c->a->quant.bits) quant_unpack(c->plain + (size_t)u * c->hd, 1, head[u], c->hd, c->a->quant);
    }
}

/* acc[j] += q . k[j], lane by lane, for `width` numbers of a group that begins at byte `group` of each k. */
INLINE void dot_packed(V acc[NR], const float *q, const uint8_t *const k[NR], size_t group, int first, const int width) {
    UNROLL
    for (int j = 0; j < NR; j++) {
        Table table = t_load(k[j] + group);
        UNROLL
        for (int d = 0; d < width; d += 32) {
            V b[32 / VL];
            t_block(b, &table, k[j] + group + 4 + (first + d) / 2);
            UNROLL
            for (int i = 0; i < imin(width, 32) / VL; i++) acc[j] = v_fma(v_load(q + first + d + i * VL), b[i], acc[j]);
        }
    }
}

/* score[j] += q . k[j] for NR heads of k. */
INLINE void dot_head(float *score, const Heads *c, const float *q, const uint8_t *const k[NR], const int hd,
                     const int packed) {
    if (!packed) {
        const f16 *plain[NR];
        read_heads(plain, c, k, NR);
        dot_tile(score, 0, q, 0, plain, hd, 1);
        return;
    }
    V acc[NR] = {{0}};
    size_t group = 0;
    for (int d = 0; d < hd; d += packed, group += c->group_bytes) {
        int n = imin(packed, hd - d), at = 0;
        for (; at + 64 <= n; at += 64) dot_packed(acc, q + d, k, group, at, 64);
        for (; at + 32 <= n; at += 32) dot_packed(acc, q + d, k, group, at, 32);
        if (at < n) dot_packed(acc, q + d, k, group, at, 16);
    }
    add_sums(score, acc);
}

/* o += sum over t < nt of p[t] v[t], in the order of t, for `width` columns of a group. */
INLINE void weigh_packed(float *o, const float *p, const uint8_t *const *v, size_t group, int first, int nt,
                         const int width) {
    V acc[64 / VL];
    UNROLL
    for (int i = 0; i < width / VL; i++) acc[i] = v_load(o + first + i * VL);
    for (int t = 0; t < nt; t++) {
        Table table = t_load(v[t] + group);
        V a = v_set(p[t]);
        UNROLL
        for (int d = 0; d < width; d += 32) {
            V b[32 / VL];
            t_block(b, &table, v[t] + group + 4 + (first + d) / 2);
            UNROLL
            for (int i = 0; i < imin(width, 32) / VL; i++) acc[d / VL + i] = v_fma(a, b[i], acc[d / VL + i]);
        }
    }
    UNROLL
    for (int i = 0; i < width / VL; i++) v_store(o + first + i * VL, acc[i]);
}

/* o[hd padded] += sum over t < nt <= WEIGH of p[t] v[t], in the order of t, for heads v[t]. */
INLINE void weigh_head(float *o, const Heads *c, const float *p, const uint8_t *const *v, int nt, const int hd,
                       const int packed) {
    if (!packed) {
        const f16 *plain[WEIGH];
        read_heads(plain, c, v, nt);
        weigh_columns(o, 0, p, 0, plain, hd, nt, 1);
        return;
    }
    size_t group = 0;
    for (int d = 0; d < hd; d += packed, group += c->group_bytes) {
        int n = imin(packed, hd - d), at = 0;
        for (; at + 64 <= n; at += 64) weigh_packed(o + d, p, v, group, at, nt, 64);
        for (; at + 32 <= n; at += 32) weigh_packed(o + d, p, v, group, at, nt, 32);
        if (at < n) weigh_packed(o + d, p, v, group, at, nt, 16);
    }
}

/* Calls name(..., hd, group) with the head size, and the numbers of a group where tables serve (else 0), as constants for
 * the usual ones, so that its loops are unrolled. */
#define FOR_HEAD_SIZE(c, name, ...)                                              \
    do {                                                                         \
        const int hd_ = (c)->hd, group_ = (c)->tables ? (c)->a->quant.group : 0; \
        if (group_ == 64 && hd_ == 64)                                           \
            name(__VA_ARGS__, 64, 64);                                           \
        else if (group_ == 64 && hd_ == 128)                                     \
            name(__VA_ARGS__, 128, 64);                                          \
        else if (!group_ && hd_ == 64)                                           \
            name(__VA_ARGS__, 64, 0);                                            \
        else if (!group_ && hd_ == 128)                                          \
            name(__VA_ARGS__, 128, 0);                                           \
        else                                                                     \
            name(__VA_ARGS__, hd_, group_);                                      \
    } while (0)

/* score[h * ld + t] = q[h] . k[t] of a block's rows k, while the rows `ahead` are on their way. */
INLINE void score_heads(float *score, size_t ld, const Heads *c, const float *q, Rows *k, const Rows *ahead, const int hd,
                        const int packed) {
    for (int t = k->n; t < k->n + NR; t++) k->at[t] = k->at[k->n - 1]; /* fills the last tile; its scores are not used */
    for (int h = 0; h < c->nh; h++) memset(score + h * ld, 0, (size_t)round_up(k->n, NR) * sizeof *score);
    for (int t = 0; t < k->n; t += NR) {
        size_t at = 0;
        for (int h = 0; h < c->nh; h++, at += c->head_bytes) {
            const uint8_t *head[NR];
            for (int u = 0; u < NR; u++) head[u] = k->at[t + u] + at;
            prefetch_rows(ahead->at + t, imin(NR, ahead->n - t), at, c->head_bytes);
            dot_head(score + h * ld + t, c, q + (size_t)h * hd, head, hd, packed);
        }
    }
}

static void score_block(float *score, size_t ld, const Heads *c, const float *q, Rows *k, const Rows *ahead) {
    FOR_HEAD_SIZE(c, score_heads, score, ld, c, q, k, ahead);
}

/* o[h * ld] += the weighted sum of a block's rows v, weights p (nh, BLOCK). */
INLINE void weigh_heads(float *o, int ld, const Heads *c, const float *p, const Rows *v, const Rows *ahead, const int hd,
                        const int packed) {
    for (int t = 0; t < v->n; t += WEIGH) {
        size_t at = 0;
        for (int h = 0; h < c->nh; h++, at += c->head_bytes) {
            const uint8_t *head[WEIGH];
            int n = imin(WEIGH, v->n - t);
            for (int u = 0; u < n; u++) head[u] = v->at[t + u] + at;
            prefetch_rows(ahead->at + t, imin(WEIGH, ahead->n - t), at, c->head_bytes);
            if (n == WEIGH) /* a constant */
                weigh_head(o + h * ld, c, p + h * BLOCK + t, head, WEIGH, hd, packed);
            else
                weigh_head(o + h * ld, c, p + h * BLOCK + t, head, n, hd, packed);
        }
    }
}

static void weigh_block(float *o, int ld, const Heads *c, const float *p, const Rows *v, const Rows *ahead) {
    FOR_HEAD_SIZE(c, weigh_heads, o, ld, c, p, v, ahead);
}

static void attend_task(Heads c) {
    const Attention *a = c.a;
    const int hdp = round_up(c.hd, VL);
    float *q = scratch((size_t)c.nh * (c.hd + hdp + BLOCK) + WEIGH * c.hd); /* (nh, hd) */
    float *o = q + (size_t)c.nh * c.hd, *score = o + (size_t)c.nh * hdp;    /* (nh, hdp), (nh, BLOCK) */
    Rows k, v;
    Seen seen[HEADS];
    c.plain = (f16 *)(score + (size_t)c.nh * BLOCK);
    scale_q(q, a->q, a->act_type, c.at, c.hd, c.nh, c.hd);
    memset(o, 0, (size_t)c.nh * hdp * sizeof *o);
    for (int h = 0; h < c.nh; h++) seen[h] = (Seen){-INFINITY, 0};
    find_rows(&k, &c, a->k, 0);
    for (int t0 = 0; t0 < c.len; t0 += BLOCK) {
        find_rows(&v, &c, a->v, t0);
        score_block(score, BLOCK, &c, q, &k, &v);
        find_rows(&k, &c, a->k, t0 + BLOCK);
        for (int h = 0; h < c.nh; h++) softmax_block(score + h * BLOCK, v.n, &seen[h], o + h * hdp, c.hd);
        weigh_block(o, hdp, &c, score, &v, &k);
    }
    for (int h = 0; h < c.nh; h++) attend_finish(a->o, a->act_type, c.at + h * c.hd, o + h * hdp, seen[h], c.hd);
}

void host_attend(const Attention *a) { for_tasks(a, longest(a), attend_task); }

// ---------------------------------------------------------------------------------------------------------------
// Sparse attention (section 5): the tokens with the largest scores, and their v alone
// ---------------------------------------------------------------------------------------------------------------

/* Whole numbers in the order of the scores, so that halving their range finds any of them; NaN is the smallest, and so is
 * what follows the last up to a whole vector. */
static void order_scores(int32_t *key, const float *score, int n) {
    for (int t = 0; t < n; t += VL) {
        V s = v_load_part(score + t, n - t); /* never -0: its sum began at 0 */
        VI bits = (VI)s, ordered = bits ^ (bits >> 31 & INT32_MAX);
        ordered = (VI)v_select(s == s, (V)ordered, (V)(bits * 0 + INT32_MIN));
        memcpy(key + t, &ordered, sizeof ordered);
    }
    for (int t = n; t < round_up(n, VL); t++) key[t] = INT32_MIN;
}

/* Bit i: whether key[i], i < VL, is at least `least`, which is above INT32_MIN. */
INLINE unsigned keys_from(const int32_t *key, int32_t least) {
    VI v;
    memcpy(&v, key, sizeof v);
    return v_bits(v >= least);
}

/* How many of n keys are at least that. */
static int count_keys(const int32_t *key, int n, int32_t least) {
    int count = 0;
    for (int t = 0; t < n; t += VL) count += __builtin_popcount(keys_from(key + t, least));
    return count;
}

/* The largest key that at least k of n reach, 1 <= k <= n; or another that just k reach. */
static int32_t kth_key(const int32_t *key, int n, int k) {
    int64_t low = INT32_MIN, high = (int64_t)INT32_MAX + 1; /* at least k reach low, fewer reach high */
    for (int reach = n; reach != k && high - low > 1;) {
        int64_t middle = low + (high - low) / 2;
        int m = count_keys(key, n, (int32_t)middle);
        if (m >= k)
            low = middle, reach = m;
        else
            high = middle;
    }
    return (int32_t)low;
}

/* The k largest of n scores, the earlier of equal ones, ascending. key: room for n, rounded up to VL. */
static void select_tokens(int32_t *tokens, int32_t *key, const float *score, int n, int k) {
    if (k == 0) return;
    order_scores(key, score, n);
    int32_t least = kth_key(key, n, k);
    int found = 0, equal = k - count_keys(key, n, least + 1); /* so many of those that equal it */
    for (int t = 0; t < n && found < k; t += VL) {
        for (unsigned bits = keys_from(key + t, least); bits && found < k; bits &= bits - 1) {
            int at = t + __builtin_ctz(bits);
            if (key[at] > least || equal-- > 0) tokens[found++] = at;
        }
    }
}

static void select_task(Heads c) {
    const Attention *a = c.a;
    const int chosen = sparse_tokens(a->sparsity, c.len);
    const size_t ld = round_up(c.len, BLOCK);
    float *q = scratch((size_t)c.nh * (c.hd + ld) + ld + NR * c.hd), *score = q + (size_t)c.nh * c.hd; /* (nh, ld) */
    int32_t *key = (int32_t *)(score + c.nh * ld);
    Rows k[2];
    c.plain = (f16 *)(key + ld);
    scale_q(q, a->q, a->act_type, c.at, c.hd, c.nh, c.hd);
    find_rows(&k[0], &c, a->k, 0);
    for (int t0 = 0, b = 0; t0 < c.len; t0 += BLOCK, b ^= 1) {
        find_rows(&k[b ^ 1], &c, a->k, t0 + BLOCK);
        score_block(score + t0, ld, &c, q, &k[b], &k[b ^ 1]);
    }
    for (int h = 0; h < c.nh; h++) {
        size_t row = ((size_t)c.r * a->nh + c.h + h) * a->most;
        select_tokens(a->tokens + row, key, score + h * ld, c.len - 1, chosen - 1);
        a->tokens[row + chosen - 1] = c.len - 1;
        float largest = -INFINITY,
              sum = exponentiate(score + h * ld, c.len, round_up(c.len, VL), &largest); /* over all tokens */
        for (int i = 0; i < chosen; i++) a->weights[row + i] = score[h * ld + a->tokens[row + i]] / sum;
    }
}

void host_select(const Attention *a) { for_tasks(a, longest(a), select_task); }

static void weigh_task(Heads c) {
    enum { AHEAD = 2 * WEIGH };
    const Attention *a = c.a;
    const size_t first = ((size_t)c.r * a->nh + c.h) * a->most;
    const int hdp = round_up(c.hd, VL), n = sparse_tokens(a->sparsity, c.len), all = c.nh * n;
    const uint8_t **head = (void *)scratch(all * (sizeof *head / sizeof(float)) + hdp + WEIGH * c.hd); /* (nh, n) */
    float *o = (float *)(head + all);
    c.plain = (f16 *)(o + hdp);
    for (int h = 0; h < c.nh; h++)
        for (int i = 0; i < n; i++)
            head[h * n + i] = find_row(&c, a->v, a->tokens[first + (size_t)h * a->most + i]) + h * c.head_bytes;
    prefetch_rows(head, imin(AHEAD, all), 0, c.head_bytes);
    for (int h = 0; h < c.nh; h++) {
        memset(o, 0, hdp * sizeof *o);
        for (int i = 0; i < n; i += WEIGH) {
            int now = h * n + i, count = imin(WEIGH, n - i);
            if (now + AHEAD < all) prefetch_rows(head + now + AHEAD, imin(count, all - now - AHEAD), 0, c.head_bytes);
            FOR_HEAD_SIZE(&c, weigh_head, o, &c, a->weights + first + (size_t)h * a->most + i, head + now, count);
        }
        attend_finish(a->o, a->act_type, c.at + h * c.hd, o, (Seen){0, 1}, c.hd); /* the weights are shares already */
    }
}

void host_weigh(const Attention *a) { for_tasks(a, sparse_tokens(a->sparsity, longest(a)), weigh_task); }

// ---------------------------------------------------------------------------------------------------------------
// New k and v, into pages
// ---------------------------------------------------------------------------------------------------------------

void host_pack(uint8_t *packed, const f16 *kv, int rows, int h1, int nh, Quant quant) {
    const size_t row = 2 * nh * quant_bytes(quant, h1 / nh); /* k's heads, then v's */
    PARALLEL_FOR((size_t)rows * h1 > ENOUGH / 8, static)
    for (int r = 0; r < rows; r++) /* what is not finite poisons its group alone */
        quant_pack_heads(packed + r * row, kv + (size_t)2 * r * h1, 2 * nh, h1 / nh, quant);
}

void host_append(const Append *a) {
    const size_t bytes = (size_t)a->width * sizeof(f16);
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
