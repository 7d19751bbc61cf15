/* host_linear.c: y = x w^T + b on this CPU, with weights in F16 or packed (the products of section
 * 3; section 5).
 *
 * A task has some rows of x and some parts of the outputs, and goes through the columns of x and w
 * in blocks. Rows of x and of w (F16) both lie along the columns, so the lanes of a vector are
 * columns and nothing is turned:
 *
 *     for each block of columns
 *         for each few rows of x, whose part is copied so that it lies together     in the nearest
 *                                                                                   cache
 *             for each few outputs
 *                 for each vector of columns
 *                     sum[row][output] += x[row][vector] w[output][vector]           vectors, in
 *                                                                                    registers
 *                 keep these sums until the next block                               in the second
 *                                                                                    cache
 *     add up the lanes of each sum
 *
 * One to six rows read each number of w once, as fast as memory gives it; more rows find it in the
 * second cache. Packed weights lie column by column: there the lanes are outputs, and many rows get
 * a panel of unpacked numbers.
 *
 * Contract: every output has one order of sums, whatever the rows, the task and the threads are.
 * F16: sum l of VL adds the products of columns l, l + VL, l + 2 VL ... in this order, from 0, and
 * v_sum4 adds the sums, as a tree; blocks and tiles do not matter. Packed weights: in a block of
 * PANEL_K columns an output adds its products in order, from 0, and the blocks are added in order.
 * Whoever changes an order adds one to HOST_SUMS.
 * Read next: host_attend.c. */
#include "device/parts.h"

enum {
    PART = GROUP,     /* outputs that are dealt out together; packed weights have a column's side by
                         side */
    FEW = 6,          /* rows of a tile at most */
    ROWS = 96,        /* of a task at most, F16: the sums of so many rows ... */
    OUTPUTS = 128,    /* ... and outputs fit the second cache, and w is read once for them */
    COLUMNS = 1024,   /* of a block, F16: FEW rows of x are 24 KB, of a nearest cache of 32 or 48 */
    PANEL_ROWS = 192, /* the same of packed weights */
    PANEL_OUTPUTS = 256,
    PANEL_K = 64 /* a panel is 16 KB once it is unpacked */
};

// -------------------------------------------------------------------------------------------------
// Weights in F16
// -------------------------------------------------------------------------------------------------

/* Outputs of a tile of mr rows: the sums fill the registers, and there are enough of them that none
 * waits for itself. */
#define TILE_OUTPUTS(mr) (VL == 16 || mr < 4 ? 4 : 2)

/* sum[i * nr + j] += x[i] . w[j], lane by lane, over columns c .. end, whole vectors of them. What
 * few of the rows or outputs load is held in registers: a compiler that loads it again for each
 * product wants more loads than a cycle has. next: what is multiplied later and lies together; as
 * much of it is fetched. */
INLINE void add_products(V *sum, const float *x, const f16 *const w[4], int c, int end,
                         const f16 *next, const int mr, const int nr) {
    for (; c < end; c += VL, next += nr * VL) {
        V a[FEW], b[4];
        UNROLL
        for (int line = 0; line < nr * VL; line += 32)
            __builtin_prefetch(next + line);
        if (mr < nr || VL == 16) {
            UNROLL
            for (int i = 0; i < mr; i++)
                a[i] = v_hold(v_load(x + c * mr + i * VL));
            UNROLL
            for (int j = 0; j < nr; j++) {
                b[j] = v_hold(v_load_f16(w[j] + c));
                UNROLL
                for (int i = 0; i < mr; i++)
                    sum[i * nr + j] = v_fma(a[i], b[j], sum[i * nr + j]);
            }
        } else {
            UNROLL
            for (int j = 0; j < nr; j++)
                b[j] = v_hold(v_load_f16(w[j] + c));
            UNROLL
            for (int i = 0; i < mr; i++) {
                a[i] = v_hold(v_load(x + c * mr + i * VL));
                UNROLL
                for (int j = 0; j < nr; j++)
                    sum[i * nr + j] = v_fma(a[i], b[j], sum[i * nr + j]);
            }
        }
    }
}

/* The products of nc columns of mr rows of x and of some rows of w, which are k apart; past row
 * `last` that row again. They add to what `kept` holds if the block is not the first, and stay
 * there if it is not the last; then out[i * OUTPUTS + j] is the sum of all lanes. */
INLINE void tile(V *kept, float *out, const float *x, const f16 *w, size_t k, int last, int nc,
                 bool first, bool end, const int mr) {
    const int nr = TILE_OUTPUTS(mr), all = mr * nr, whole = nc / VL * VL;
    const f16 *row[4];
    V sum[FEW * 4], rest[4] = {{0}}; /* which is loaded before the sums fill the registers */
    UNROLL
    for (int j = 0; j < nr; j++) {
        row[j] = w + imin(j, last) * k;
        if (whole < nc)
            rest[j] = v_load_f16_part(row[j] + whole, nc - whole);
    }
    UNROLL
    for (int i = 0; i < mr; i++) {
        UNROLL
        for (int s = i * nr; s < (i + 1) * nr; s++)
            sum[s] = first ? (V){0} : kept[s];
    }
    for (int j = 0, c = 0, until; j < nr; j++, c = until) { /* the next rows one after the other */
        until = whole / VL * (j + 1) / nr * VL;
        add_products(sum, x, row, c, until, w + (nr + j) * k, mr, nr);
    }
    if (whole < nc) {
        UNROLL
        for (int i = 0; i < mr; i++) {
            const V a = v_load(x + whole * mr + i * VL);
            UNROLL
            for (int j = 0; j < nr; j++)
                sum[i * nr + j] = v_fma(a, rest[j], sum[i * nr + j]);
        }
    }
    if (!end) {
        UNROLL
        for (int i = 0; i < mr; i++) {
            UNROLL
            for (int s = i * nr; s < (i + 1) * nr; s++)
                kept[s] = sum[s];
        }
        return;
    }
    UNROLL
    for (int s = 0; s < all; s += 4) {
        const int more = s + 2 < all ? s + 2 : s; /* five rows of two */
        const V4 four = v_sum4(sum[s], sum[s + 1], sum[more], sum[more + 1]);
        UNROLL
        for (int d = 0; d < imin(4, all - s); d += nr)
            memcpy(out + (s + d) / nr * OUTPUTS, (const float *)&four + d, nr * sizeof *out);
    }
}

// -------------------------------------------------------------------------------------------------
// Packed weights. A column's outputs lie side by side already. For more than one tile of rows a
// panel is unpacked; one tile unpacks it into its registers.
// -------------------------------------------------------------------------------------------------

/* PANEL_K columns of a part: their codes and what these stand for, or their numbers. */
typedef struct {
    const uint8_t *codes; /* the first column's; the next are GROUP_BYTES apart */
    Table table[PANEL_K];
    _Alignas(64) float w[PANEL_K][PART];
} Panel;

/* The columns whose groups begin at `from`. */
static void load_columns(Panel *a, const uint8_t *from, bool unpacked) {
    a->codes = from + GROUP_HEADER;
    for (int c = 0; c < PANEL_K;
         c++) { /* apart from their use, because a table takes long to be ready */
        __builtin_prefetch(from + (PANEL_K + c) * GROUP_BYTES, 0,
                           2); /* the few lines that each use reads lie far apart */
        a->table[c] = t_load(from + c * GROUP_BYTES);
    }
    for (int c = 0; unpacked && c < PANEL_K; c++)
        for (int j = 0; j < PART; j += 32) {
            V out[32 / VL];
            t_block(out, &a->table[c], a->codes + c * GROUP_BYTES + j / 2);
            for (int u = 0; u < 32 / VL; u++)
                v_store(a->w[c] + j + u * VL, out[u]);
        }
}

/* sum[i][j] += sum over columns c of x[i][c] w[c][j], in the order of c, for mr rows. */
INLINE void packed_tile(float *sum, const float *x, const Panel *w, const bool unpacked,
                        const int mr) {
    enum { BLOCKS = NR * VL / 32 ? NR * VL / 32 : 1, EACH = 32 / VL, ALL = BLOCKS * EACH };
    for (int j = 0; j < PART; j += ALL * VL) {
        V acc[6][ALL] = {{{0}}}, a[6], b[EACH];
        for (int c = 0; c < PANEL_K; c++) {
            UNROLL
            for (int i = 0; i < mr; i++)
                a[i] = v_set(x[i * PANEL_K + c]);
            UNROLL
            for (int d = 0; d < BLOCKS; d++) {
                if (!unpacked)
                    t_block(b, &w->table[c], w->codes + c * GROUP_BYTES + j / 2 + 16 * d);
                UNROLL
                for (int u = 0; u < EACH; u++) {
                    if (unpacked)
                        b[u] = v_load(w->w[c] + j + 32 * d + u * VL);
                    UNROLL
                    for (int i = 0; i < mr; i++)
                        acc[i][d * EACH + u] = v_fma(a[i], b[u], acc[i][d * EACH + u]);
                }
            }
        }
        UNROLL
        for (int i = 0; i < mr; i++) {
            UNROLL
            for (int u = 0; u < ALL; u++) {
                float *to = sum + i * PART + j + u * VL;
                v_store(to, v_load(to) + acc[i][u]);
            }
        }
    }
}

/* sum (rows, PART) += x (rows, PANEL_K) times columns from c on of the part of w, which has k. */
static void multiply_packed(float *sum, const float *x, int rows, const uint8_t *w, int k, int part,
                            int c) {
    Panel
        panel; /* set field by field: to fill all of it with zeros would take longer than its use */
    load_columns(&panel, w + ((size_t)part * k + c) * GROUP_BYTES, rows > MR);
    if (rows > MR)
        for (int i = 0; i < rows; i += MR)
            FOR_ROWS(imin(MR, rows - i), packed_tile, sum + i * PART, x + i * PANEL_K, &panel,
                     true);
    else
        FOR_ROWS(rows, packed_tile, sum, x, &panel, false);
}

// -------------------------------------------------------------------------------------------------
// Tasks
// -------------------------------------------------------------------------------------------------

/* Columns col .. col+nc of row r, from their sums. */
static void linear_finish(const Op *op, const float *sum, size_t r, size_t col, int nc) {
    const Tensor y = op->linear.y;
    const f16 *b = op->linear.b.at;
    const float *residual = op->linear.residual.at;
    size_t at = r * y.ld + col;
    for (int j = 0; j < nc; j += VL) {
        int n = nc - j;
        V v = v_load(sum + j);
        if (b)
            v += v_load_f16_part(b + col + j, n);
        if (op->relu)
            v = v_select(v < 0.0f, v_set(0), v);
        if (residual)
            v += v_load_part(residual + at + j, n);
        store_any(y.at, y.type, at + j, v, n);
    }
}

/* The first vector of n columns of each of mr rows of x, which are k apart, then the second of
 * each; zeros behind the last column. */
INLINE void interleave(float *to, const float *x, size_t k, int n, const int mr) {
    int c = 0;
    for (; c + VL <= n; c += VL) {
        UNROLL
        for (int i = 0; i < mr; i++, to += VL)
            v_store(to, v_load(x + i * k + c));
    }
    for (int i = 0; c < n && i < mr; i++)
        v_store(to + i * VL, v_load_part(x + i * k + c, n - c));
}

/* Rows row .. row+rows of outputs col .. col+n. One row needs no blocks: all of it stays near. */
static void task_of_halves(const Op *op, int row, int rows, int col, int n) {
    const int k = op->linear.x.cols, depth = rows == 1 ? k : COLUMNS,
              x_floats = imin(rows, FEW) * round_up(depth, VL);
    const float *from = (const float *)op->linear.x.at + (size_t)row * k;
    const f16 *w = (const f16 *)op->linear.w.at + (size_t)col * k;
    float *x = scratch(x_floats + (size_t)(FEW + rows * VL) * OUTPUTS),
          *out = x + x_floats;                    /* x of FEW rows; (FEW, OUTPUTS) */
    V *kept = (V *)(void *)(out + FEW * OUTPUTS); /* (rows, OUTPUTS) */
    for (int c = 0; c < k; c += depth) {
        const int nc = imin(depth, k - c);
        for (int i = 0; i < rows; i += FEW) {
            const int mr = imin(FEW, rows - i), nr = TILE_OUTPUTS(mr);
            FOR_ROWS(mr, interleave, x, from + (size_t)i * k + c, k, nc);
            for (int o = 0; o < n; o += nr)
                FOR_ROWS(mr, tile, kept + i * OUTPUTS + o * mr, out + o, x, w + (size_t)o * k + c,
                         k, n - o - 1, nc, c == 0, c + nc == k);
            for (int r = 0; c + nc == k && r < mr; r++)
                linear_finish(op, out + r * OUTPUTS, row + i + r, col, n);
        }
    }
}

/* Rows row .. row+rows of the parts from `part` on. */
static void task_of_packed(const Op *op, int row, int rows, int part, int parts) {
    const int k = op->linear.x.cols;
    const float *from = (const float *)op->linear.x.at + (size_t)row * k;
    float *x = scratch((size_t)rows * (PANEL_K + parts * PART)), *sums = x + (size_t)rows * PANEL_K;
    memset(
        sums, 0,
        (size_t)rows * parts * PART * sizeof *sums); /* (parts, rows, PART); x is (rows, PANEL_K) */
    for (int c = 0; c < k; c += PANEL_K) {
        for (int i = 0; i < rows; i++)
            memcpy(x + i * PANEL_K, from + (size_t)i * k + c, PANEL_K * sizeof *x);
        for (int u = 0; u < parts; u++)
            multiply_packed(sums + u * rows * PART, x, rows, op->linear.w.at, k, part + u, c);
    }
    for (int u = 0; u < parts; u++)
        for (int i = 0; i < rows; i++)
            linear_finish(op, sums + (u * rows + i) * PART, row + i, (size_t)(part + u) * PART,
                          PART);
}

/* A product in tasks of so many rows and parts; `across` tasks have all parts of the same rows. */
typedef struct {
    const Op *op;
    int rows, parts, all, across;
} Tasks;

static void linear_tasks(const void *all, int first, int n) {
    const Tasks *t = all;
    const Tensor y = t->op->linear.y;
    for (int task = first; task < first + n; task++) {
        const int row = task / t->across * t->rows, rows = imin(t->rows, y.rows - row);
        const int part = task % t->across * t->parts, parts = imin(t->parts, t->all - part);
        if (t->op->linear.w.type == U8)
            task_of_packed(t->op, row, rows, part, parts);
        else
            task_of_halves(t->op, row, rows, part * PART, imin(parts * PART, y.cols - part * PART));
    }
}

void host_linear(const Op *op) {
    const Tensor y = op->linear.y;
    const bool packed = op->linear.w.type == U8;
    const int m = y.rows, k = op->linear.x.cols, all = ceil_div(y.cols, PART);
    const int most = packed ? PANEL_ROWS : ROWS,
              enough = 4 * host_threads(); /* to deal them out evenly */
    CHECK((y.type == F32 || y.type == F16) &&
          (!packed || (y.cols % GROUP == 0 && k % PANEL_K == 0)));
    int rows = round_up(ceil_div(m, ceil_div(m, most)), FEW),
        parts = m > FEW ? (packed ? PANEL_OUTPUTS : OUTPUTS) / PART : 1;
    while (parts > 1 && ceil_div(m, rows) * ceil_div(all, parts) < enough)
        parts /= 2;
    while (rows > 4 * FEW && ceil_div(m, rows) * all < enough)
        rows = round_up(rows / 2, FEW);
    const int across = ceil_div(all, parts), tasks = ceil_div(m, rows) * across;
    host_share((double)m * y.cols * k, tasks, linear_tasks, &(Tasks){op, rows, parts, all, across});
}
