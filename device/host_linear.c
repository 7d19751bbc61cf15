/* host_linear.c: y = x w^T + b on this CPU, with weights in F16 or packed (the products of section 3; section 5).
 *
 * The lanes of a vector are outputs of one row of x, so that a sum stays in its lane (with F16 in its two lanes). A task
 * has some rows of x and some parts of the outputs, and goes through the columns of x and w in blocks:
 *
 *     for each block of columns
 *         copy the rows' part of x, so that it lies together       (rows, block)    in the second cache
 *         for each part of the outputs
 *             turn its part of w into a panel                      (block, part)    in the nearest cache
 *             for each few rows of x
 *                 for each column of the panel                     (few rows, part) sums in registers
 *                     sum[row][output] += x[row][column] panel[column][output]
 *                 add them to the task's sums                      (rows, part)     in the second cache
 *
 * Making a panel costs as much as a few rows' products, so a task has many rows where there are many; each number of w is
 * read from memory once for all of them, and x once for several parts. One or two rows do without a panel (F16).
 *
 * Contract: every output has one order of sums, whatever the rows, the task and the threads are. In a block of columns each
 * output adds its products in order, from 0: the even columns, the odd columns, and then these two (F16), or all columns
 * (packed weights). The blocks are added in order. Read next: host_attend.c. */
#include "device/host.h"

enum {
    ROWS = 192,             /* of a task at most */
    OUTPUTS = 256,          /* likewise; x is copied once for them */
    NV = VL == 16 ? NR : 2, /* weights in F16: vectors of a tile's row, for FEW rows; their sums fill the registers */
    FEW = 6,                /* rows of such a tile */
    HALF_N = NV * VL / 2,   /* the outputs of a part */
    HALF_K = 256,           /* and the columns of a block */
    DIRECT = 2,             /* rows that are multiplied without a panel */
    SHORT = 2048,           /* columns: a row of w that ends before the processor foresees what follows */
    PACKED_N = 64,          /* packed weights: so many outputs lie side by side in a column's group */
    PACKED_K = 64           /* a panel is 16 KB, of a nearest cache of 32 or 48, once it is unpacked */
};

/* The outputs col .. col+n: those from `first` on of group `group`, which has no more than a part's. */
typedef struct {
    int group, first, col, n;
} Part;

// ---------------------------------------------------------------------------------------------------------------
// Weights in F16. They lie row by row, a row having all columns of an output; a panel has them column by column. Columns
// are taken two at a time: then a pair of halves moves as one number of 32 bits, which halves the work, and stays a pair in
// the vectors until the sums are complete:
//
//     panel[t]    w[0][2t] w[0][2t+1] w[1][2t] w[1][2t+1] ...      widened on the way into registers
//     x           x[2t]    x[2t+1]    x[2t]    x[2t+1]    ...
// ---------------------------------------------------------------------------------------------------------------

/* v[t]: the t-th pair of n columns of VL rows of w, which are k apart; past row `last` that row again, whose sums are not
 * used. ahead: how far what is wanted later lies behind this, if the processor does not foresee it. */
INLINE void turn_square(V v[VL], const f16 *w, size_t k, int last, const int n, const ptrdiff_t ahead) {
    UNROLL
    for (int i = 0; i < VL; i++) {
        const f16 *from = w + imin(i, last) * k;
        if (ahead) __builtin_prefetch(from + ahead, 0, 2);
        v[i] = (V){0};
        memcpy(&v[i], from, n * sizeof *from);
    }
    v_transpose(v);
}

INLINE void panel_square(f16 *panel, const f16 *w, size_t k, int last, const int n, ptrdiff_t ahead) {
    V v[VL];
    turn_square(v, w, k, last, n, ahead);
    UNROLL
    for (int i = 0; i < VL; i++) memcpy(panel + i * 2 * HALF_N, &v[i], sizeof v[i]);
}

/* sum[i][o] += x[i] . w[o] over so many pairs of columns, for mr rows of x. */
INLINE void pair_tile(float *sum, const float *x, const f16 *panel, int pairs, const int mr) {
    V acc[FEW][NV] = {{{0}}}, b[NV];
    for (int t = 0; t < pairs; t++) {
        UNROLL
        for (int u = 0; u < NV; u++) b[u] = v_load_f16(panel + t * HALF_N * 2 + u * VL);
        UNROLL
        for (int i = 0; i < mr; i++) {
            V a = v_set_pair(x + i * HALF_K + 2 * t);
            UNROLL
            for (int u = 0; u < NV; u++) acc[i][u] = v_fma(a, b[u], acc[i][u]);
        }
    }
    UNROLL
    for (int i = 0; i < mr; i++) {
        UNROLL
        for (int u = 0; u < NV; u += 2) {
            float *to = sum + i * HALF_N + u * VL / 2;
            v_store(to, v_load(to) + v_add_pairs(acc[i][u], acc[i][u + 1]));
        }
    }
}

/* The same of VL outputs, straight from w, for so few rows of x that a panel would not pay. */
INLINE void direct_tile(float *sum, const float *x, const f16 *w, size_t k, int last, int nc, const int mr) {
    const ptrdiff_t ahead = k <= SHORT ? VL * k : 0; /* the next rows */
    V acc[DIRECT][2] = {{{0}}};
    for (int c = 0; c < nc; c += 2 * VL) {
        V v[VL];
        if (c + 2 * VL <= nc)
            turn_square(v, w + c, k, last, 2 * VL, ahead);
        else
            turn_square(v, w + c, k, last, nc - c, ahead);
        UNROLL
        for (int t = 0; t < VL; t++) {
            VH half[2];
            memcpy(half, &v[t], sizeof half);
            V b[2] = {v_widen(half[0]), v_widen(half[1])};
            UNROLL
            for (int i = 0; i < mr; i++) {
                V a = v_set_pair(x + i * HALF_K + c + 2 * t);
                acc[i][0] = v_fma(a, b[0], acc[i][0]), acc[i][1] = v_fma(a, b[1], acc[i][1]);
            }
        }
    }
    UNROLL
    for (int i = 0; i < mr; i++) {
        float *to = sum + i * HALF_N;
        v_store(to, v_load(to) + v_add_pairs(acc[i][0], acc[i][1]));
    }
}

/* sum (rows, HALF_N) += x (rows, HALF_K) times columns c .. c+nc of the part; behind them x is 0 up to a whole square.
 * ahead: how far what is multiplied next lies behind this. */
static void multiply_halves(float *sum, const float *x, int rows, const Product *p, Part part, int c, int nc,
                            ptrdiff_t ahead) {
    _Alignas(64) f16 panel[HALF_K * HALF_N]; /* (HALF_K / 2, HALF_N) pairs */
    for (int o = 0; o < HALF_N; o += VL) {
        const int first = imin(o, part.n - 1), last = part.n - 1 - first;
        const f16 *w = (const f16 *)p->w + (size_t)(part.col + first) * p->k + c;
        if (rows <= DIRECT) {
            if (rows == 1) direct_tile(sum + o, x, w, p->k, last, nc, 1);
            if (rows == 2) direct_tile(sum + o, x, w, p->k, last, nc, 2);
            continue;
        }
        int done = 0;
        for (; done + 2 * VL <= nc; done += 2 * VL)
            panel_square(panel + done * HALF_N + 2 * o, w + done, p->k, last, 2 * VL, ahead);
        if (done < nc) panel_square(panel + done * HALF_N + 2 * o, w + done, p->k, last, nc - done, ahead);
    }
    for (int i = 0; rows > DIRECT && i < rows; i += FEW)
        FOR_ROWS(imin(FEW, rows - i), pair_tile, sum + i * HALF_N, x + i * HALF_K, panel, (nc + 1) / 2);
}

// ---------------------------------------------------------------------------------------------------------------
// Packed weights. A column's outputs lie side by side already. For more than one tile of rows a panel is unpacked; one tile
// unpacks it into its registers.
// ---------------------------------------------------------------------------------------------------------------

/* nc columns of a part: their codes and what these stand for, or their numbers. */
typedef struct {
    int nc;
    bool unpacked;
    const uint8_t *codes; /* the first column's; the next are `size` apart */
    size_t size;
    Table table[PACKED_K];
    _Alignas(64) float w[PACKED_K][PACKED_N]; /* zeros past the end of a group */
} Panel;

/* The columns' numbers from `first` on, where they begin at byte `from`. all: room for a group. */
static void load_columns(Panel *a, Quant quant, const uint8_t *from, int first, bool unpacked, f16 *all) {
    const int group = quant.group, n = imin(PACKED_N, group - first);
    const bool quick = quant.bits == 4 && group % 32 == 0;
    a->codes = from + 4 + first / 2;
    a->unpacked = unpacked || !quick || n < PACKED_N;
    for (int c = 0; quick && c < a->nc; c++) { /* apart from their use, because a table takes long to be ready */
        __builtin_prefetch(from + (PACKED_K + c) * a->size, 0, 2); /* the few lines that each use reads lie far apart */
        a->table[c] = t_load(from + c * a->size);
    }
    if (!a->unpacked) return;
    for (int c = 0; c < a->nc; c++) {
        float *to = a->w[c];
        if (n < PACKED_N) memset(to, 0, sizeof a->w[c]);
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
INLINE void packed_tile(float *sum, const float *x, const Panel *w, const bool unpacked, const int mr) {
    enum { BLOCKS = NR * VL / 32 ? NR * VL / 32 : 1, EACH = 32 / VL, ALL = BLOCKS * EACH };
    for (int j = 0; j < PACKED_N; j += ALL * VL) {
        V acc[6][ALL] = {{{0}}}, a[6], b[EACH];
        for (int c = 0; c < w->nc; c++) {
            UNROLL
            for (int i = 0; i < mr; i++) a[i] = v_set(x[i * PACKED_K + c]);
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
            for (int u = 0; u < ALL; u++) {
                float *to = sum + i * PACKED_N + j + u * VL;
                v_store(to, v_load(to) + acc[i][u]);
            }
        }
    }
}

/* sum (rows, PACKED_N) += x (rows, PACKED_K) times columns c .. c+nc of the part. all: room for a group. */
static void multiply_packed(float *sum, const float *x, int rows, const Product *p, Part part, int c, int nc, f16 *all) {
    Panel w; /* set field by field: to fill all of it with zeros would take longer than its use */
    w.nc = nc, w.size = quant_bytes(p->quant, p->quant.group);
    const uint8_t *from = (const uint8_t *)p->w + ((size_t)part.group * p->k + c) * w.size;
    load_columns(&w, p->quant, from, part.first, rows > MR, all);
    if (w.unpacked)
        for (int i = 0; i < rows; i += MR)
            FOR_ROWS(imin(MR, rows - i), packed_tile, sum + i * PACKED_N, x + i * PACKED_K, &w, true);
    else
        FOR_ROWS(rows, packed_tile, sum, x, &w, false);
}

// ---------------------------------------------------------------------------------------------------------------
// Tasks
// ---------------------------------------------------------------------------------------------------------------

/* F16 has its parts one after the other. Packed weights have them within groups, of which the last may hold fewer outputs
 * than it has room for: n may be 0 or less. */
static Part find_part(const Product *p, int part) {
    const int width = p->quant.bits ? PACKED_N : HALF_N, group = p->quant.bits ? p->quant.group : HALF_N;
    const int each = ceil_div(group, width);
    Part a = {.group = part / each, .first = part % each * width};
    a.col = a.group * group + a.first;
    a.n = imin(imin(width, group - a.first), p->n - a.col);
    return a;
}

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

/* Rows row .. row+rows of the parts from `part` on. */
static void linear_task(const Product *p, int row, int rows, int part, int parts) {
    const int width = p->quant.bits ? PACKED_N : HALF_N, depth = p->quant.bits ? PACKED_K : HALF_K;
    float *x = scratch((size_t)rows * (depth + parts * width) + p->quant.group);        /* (rows, depth) */
    float *sums = x + (size_t)rows * depth, *all = sums + (size_t)rows * parts * width; /* (parts, rows, width) */
    memset(sums, 0, (size_t)rows * parts * width * sizeof *sums);
    for (int c = 0; c < p->k; c += depth) {
        const int nc = imin(depth, p->k - c);
        for (int i = 0; i < rows; i++) {
            memcpy(x + i * depth, (const float *)p->x + (size_t)(row + i) * p->k + c, nc * sizeof *x);
            memset(x + i * depth + nc, 0, (depth - nc) * sizeof *x);
        }
        for (int u = 0; u < parts; u++) {
            const Part at = find_part(p, part + u);
            if (at.n <= 0) continue;
            /* the same columns of the next part; behind the last part, the first part's next columns */
            const ptrdiff_t part_k = (ptrdiff_t)HALF_N * p->k, ahead = u + 1 < parts ? part_k : HALF_K - u * part_k;
            if (p->quant.bits)
                multiply_packed(sums + u * rows * width, x, rows, p, at, c, nc, (f16 *)all);
            else
                multiply_halves(sums + u * rows * width, x, rows, p, at, c, nc, ahead);
        }
    }
    for (int u = 0; u < parts; u++) {
        const Part at = find_part(p, part + u);
        for (int i = 0; i < rows; i++) linear_finish(p, sums + (u * rows + i) * width, row + i, at.col, at.n);
    }
}

/* A product in tasks of so many rows and parts; `across` tasks have all parts of the same rows. */
typedef struct {
    const Product *p;
    int rows, parts, all, across;
} Tasks;

static void run_tasks(const void *all, int first, int n) {
    const Tasks *t = all;
    for (int task = first; task < first + n; task++) {
        const int row = task / t->across * t->rows, part = task % t->across * t->parts;
        linear_task(t->p, row, imin(t->rows, t->p->m - row), part, imin(t->parts, t->all - part));
    }
}

void host_linear(const Product *p) {
    const int group = p->quant.bits ? p->quant.group : HALF_N, width = p->quant.bits ? PACKED_N : HALF_N;
    const int all = ceil_div(p->n, group) * ceil_div(group, width),
              enough = 4 * host_threads(); /* to deal them out evenly */
    CHECK((p->y_type == F32 || p->y_type == F16) && p->quant.bits <= 8 && group > 0);
    int rows = round_up(ceil_div(p->m, ceil_div(p->m, ROWS)), FEW), parts = p->m > FEW ? OUTPUTS / width : 1;
    while (parts > 1 && ceil_div(p->m, rows) * ceil_div(all, parts) < enough) parts /= 2;
    while (rows > 4 * FEW && ceil_div(p->m, rows) * all < enough) rows = round_up(rows / 2, FEW);
    const int across = ceil_div(all, parts), tasks = ceil_div(p->m, rows) * across;
    host_share((double)p->m * p->n * p->k, tasks, run_tasks, &(Tasks){p, rows, parts, all, across});
}
