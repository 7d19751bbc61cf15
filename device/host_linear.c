/* host_linear.c: computes y = x w^T + b on this CPU, with weights in F16 or packed (the products of
 * section 3; section 5).
 *
 * A task computes some rows of y and some parts of its columns, which are called outputs here. It
 * goes through the columns of x and w in blocks. A row of x and a row of w (F16) both lie along
 * these columns, so the elements of a vector are neighbouring columns and nothing is transposed:
 *
 *     for each block of columns
 *         for each few rows of x: copy their part of the block together          (nearest cache)
 *             for each few outputs
 *                 for each vector of columns
 *                     sum[row][output] += x[row][vector] * w[output][vector]     (registers)
 *                 keep these sums until the next block                           (second cache)
 *     add up the elements of each sum
 *
 * With one to six rows each number of w is read once, as fast as memory delivers it; more rows find
 * it in the second cache. Packed weights lie column by column: there the elements of a vector are
 * outputs, and the first few rows unpack a panel of weights for the others.
 *
 * Contract: every output has one order of sums, whatever the rows, the task and the threads are.
 * F16: element e of a sum's vector adds the products of columns e, e + VL, e + 2 VL ... in this
 * order, from 0, and v_sum4 adds the elements as a tree; blocks and tiles do not matter. Packed
 * weights: the integer sum of PANEL_K columns is exact, and becomes a float; these are added in
 * order. Element e of the sum of mins adds those of columns e, e + VL ... of PANEL_K columns, and
 * these in order. A factor x scale is off by half a unit at most, which is the largest |x| times
 * the largest |scale| of PANEL_K columns, over LARGEST. A row of y is NaN or infinite if its x is,
 * and an output if a min or a scale of its part is.
 *
 * Whoever changes an order or a rounding adds one to HOST_SUMS.
 * Read next: host_attend.c. */
#include "device/parts.h"

enum {
    PART = GROUP,  /* outputs that are dealt out together; packed weights have the numbers of a
                      column for so many outputs side by side */
    FEW = 6,       /* rows of x in a tile, at most */
    ROWS = 96,     /* rows of x in a task with F16 weights, at most: the sums of so many rows ... */
    OUTPUTS = 128, /* ... and outputs fit the second cache, and w is read once for all of them */
    WIDEN = VL == 4 && REGISTERS == 32, /* NEON: to make floats of halfs takes as many instructions
                                           as to load them, so all rows share the floats */
    COLUMNS = WIDEN ? 256 : 1024, /* columns of a block, F16: FEW rows of x take 24 KB of a nearest
                                     cache of 32 or 48 KB; floats of w, 128 KB of the second */
    PANEL_ROWS = 192,             /* like ROWS and OUTPUTS, for packed weights */
    PANEL_OUTPUTS = 256,
    PANEL_K = 128,    /* columns of a block of packed weights: PART outputs take 16 KB unpacked */
    SUMS = PART + VL, /* floats that a task keeps for a row and a part of packed weights */
    PANEL_MR = VL == 8 ? 2 : MR,     /* rows of x in a tile of packed weights, at most */
    DIRECT = VL == 4 ? 1 : PANEL_MR, /* rows that use packed weights while these are in registers;
                                        16 bytes of codes make 32 / VL vectors, and with VL 4 only a
                                        tile of one row has 8 */
    NEAR = VL == 4 ? 3 : 2, /* the cache for which weights are prefetched. The second one of x86 has
                               more requests in flight than the nearest */
};

/* LARGEST: the largest factor; 16 bits leave room for its rounding. A divisor below LEAST counts as
 * LEAST. */
static const float LARGEST = 32760, LEAST = 0x1p-100f;

// -------------------------------------------------------------------------------------------------
// Weights in F16
// -------------------------------------------------------------------------------------------------

/* A block: up to FEW rows of x times the rows of w for some outputs, over some columns. */
typedef struct {
    const float *x; /* (rows, nc), rows k apart */
    const f16 *w;   /* (outputs, nc), rows k apart */
    int k, outputs, nc;
    bool first, last; /* true for the first and the last block of the columns */
    int pass, passes; /* these rows of x are number `pass` of so many tiles of rows */
    const f16 *ahead; /* the weights of the block after this one */
    float *wide;      /* w as floats, as `widen` leaves them; NULL: each tile widens its own */
    float *copy;      /* the rows of x, as `interleave` leaves them */
    V *kept;          /* (outputs, rows): the sums, tile by tile, between two blocks */
    float *out;       /* (FEW, OUTPUTS): the finished sums */
} Block;

/* Copies mr rows of x: the first vector of each row, then the second of each, and so on, with zeros
 * behind the last column. */
INLINE void interleave(const Block *b, const int mr) {
    float *to = b->copy;
    int c = 0;
    for (; c + VL <= b->nc; c += VL) {
        UNROLL
        for (int i = 0; i < mr; i++, to += VL)
            v_store(to, v_load(b->x + i * b->k + c));
    }
    for (int i = 0; c < b->nc && i < mr; i++)
        v_store(to + i * VL, v_load_part(b->x + i * b->k + c, b->nc - c));
}

/* Returns the outputs of a tile of mr rows. The sums fill the registers, and there are enough of
 * them that no addition waits for the one before it. */
INLINE int tile_outputs(const int mr) { return REGISTERS == 32 || mr < 4 ? 4 : 2; }

/* Copies the weights as floats: for each four outputs, the first vector of each, then the second of
 * each, and so on. */
static void widen(const Block *b) {
    float *to = b->wide;
    for (int o = 0; o < b->outputs; o += 4)
        for (int c = 0; c < b->nc; c += VL)
            for (int j = o; j < o + 4; j++, to += VL) {
                const f16 *row = b->w + (size_t)imin(j, b->outputs - 1) * b->k;
                v_store(to, v_load_f16_part(row + c, b->nc - c));
            }
}

/* Adds x[i] * w[j] to sum[i * 4 + j], element by element, over so many vectors of columns. */
INLINE void add_wide(V *sum, const float *x, const float *w, int vectors, const int mr) {
    PRAGMA(GCC unroll 2)
    for (; vectors > 0; vectors--, x += mr * VL, w += 4 * VL) {
        V weight[4], a[FEW];
        UNROLL
        for (int j = 0; j < 4; j++)
            weight[j] = v_load(w + j * VL);
        UNROLL
        for (int i = 0; i < mr; i++) {
            if (i % 2 == 0) { /* two that lie side by side are one instruction */
                a[i] = v_load(x + i * VL);
                if (i + 1 < mr)
                    a[i + 1] = v_load(x + (i + 1) * VL);
            }
            UNROLL
            for (int j = 0; j < 4; j++)
                sum[i * 4 + j] = v_fma(a[i], weight[j], sum[i * 4 + j]);
        }
    }
}

/* Adds x[i] * w[j] to sum[i * nr + j], element by element, over part p of the nr parts of the
 * block's whole vectors. w[j] are the rows of the tile's outputs. Of the rows and the outputs,
 * those of which there are fewer are loaded first and held in registers: a compiler that loads them
 * again for each product wants more loads than a cycle has. Meanwhile row p of `next` is
 * prefetched. */
INLINE void add_products(V *sum, const Block *b, const f16 *const w[4], const f16 *next, int p,
                         const int mr) {
    int nr = tile_outputs(mr), vectors = b->nc / VL, end = vectors * (p + 1) / nr * VL;
    const float *x = b->copy;
    int c = vectors * p / nr * VL;
    next += p * b->k;
    for (; VL == 4 && mr == 1 && c + 4 * VL <= end; c += 4 * VL, next += nr * 4 * VL) {
        for (int line = 0; line < nr * 4 * VL; line += 32)
            __builtin_prefetch(next + line);
        add_four(sum, x, w, c); /* NEON shares loads */
    }
    for (; c < end; c += VL, next += nr * VL) {
        V a[FEW], weight[4];
        UNROLL
        for (int line = 0; line < nr * VL; line += 32)
            __builtin_prefetch(next + line, 0, NEAR);
        if (mr < nr || REGISTERS == 32) {
            UNROLL
            for (int i = 0; i < mr; i++)
                a[i] = v_hold(v_load(x + c * mr + i * VL));
            UNROLL
            for (int j = 0; j < nr; j++) {
                weight[j] = v_hold(v_load_f16(w[j] + c));
                UNROLL
                for (int i = 0; i < mr; i++)
                    sum[i * nr + j] = v_fma(a[i], weight[j], sum[i * nr + j]);
            }
        } else {
            UNROLL
            for (int j = 0; j < nr; j++)
                weight[j] = v_hold(v_load_f16(w[j] + c));
            UNROLL
            for (int i = 0; i < mr; i++) {
                a[i] = v_hold(v_load(x + c * mr + i * VL));
                UNROLL
                for (int j = 0; j < nr; j++)
                    sum[i * nr + j] = v_fma(a[i], weight[j], sum[i * nr + j]);
            }
        }
    }
}

/* Returns what the tile of the outputs from o on prefetches, rows k apart. The first pass reads the
 * block and prefetches the next tile of it. The other passes find the block in the second cache, so
 * memory is idle, and each of their tiles prefetches a tile of the next block or nothing new. */
INLINE const f16 *prefetched(const Block *b, int o, const int nr) {
    if (b->pass == 0)
        return b->w + (o + nr) * b->k;
    bool mine = o / nr % (b->passes - 1) == b->pass - 1;
    return (mine ? b->ahead : b->w) + o * b->k;
}

/* Multiplies mr rows of x by the outputs from o on, over the block's columns; an output that does
 * not exist repeats the last one. The sums go on from `kept` unless the block is the first, and
 * return there unless it is the last; then out[i * OUTPUTS + o + j] is the sum of the elements. */
INLINE void tile(const Block *b, int o, const int mr) {
    int nr = tile_outputs(mr), all = mr * nr;
    int whole = b->wide ? b->nc : b->nc / VL * VL; /* `wide` has zeros behind the last column */
    V *kept = b->kept + o * mr;
    const f16 *row[4], *next = prefetched(b, o, nr);
    V sum[FEW * 4], rest[4] = {{0}}; /* the rest is loaded before the sums fill the registers */
    UNROLL
    for (int j = 0; j < nr; j++) {
        row[j] = b->w + imin(o + j, b->outputs - 1) * b->k;
        if (whole < b->nc)
            rest[j] = v_load_f16_part(row[j] + whole, b->nc - whole);
    }
    UNROLL
    for (int i = 0; i < mr; i++) { /* two loops, since UNROLL unrolls 16 rounds of a loop at most */
        UNROLL
        for (int s = i * nr; s < (i + 1) * nr; s++)
            sum[s] = b->first ? (V){0} : kept[s];
    }
    if (WIDEN && b->wide)
        add_wide(sum, b->copy, b->wide + o * round_up(b->nc, VL), ceil_div(b->nc, VL), mr);
    else
        for (int p = 0; p < nr; p++)
            add_products(sum, b, row, next, p, mr);
    if (whole < b->nc) {
        UNROLL
        for (int i = 0; i < mr; i++) {
            V a = v_load(b->copy + whole * mr + i * VL);
            UNROLL
            for (int j = 0; j < nr; j++)
                sum[i * nr + j] = v_fma(a, rest[j], sum[i * nr + j]);
        }
    }
    if (!b->last) {
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
        int more = s + 2 < all ? s + 2 : s; /* five rows of two outputs are ten sums */
        V4 four = v_sum4(sum[s], sum[s + 1], sum[more], sum[more + 1]);
        UNROLL
        for (int d = 0; d < imin(4, all - s); d += nr)
            memcpy(b->out + (s + d) / nr * OUTPUTS + o, (const float *)&four + d,
                   nr * sizeof *b->out);
    }
}

INLINE void multiply_block(const void *block, const int mr) {
    const Block *b = block;
    interleave(b, mr);
    for (int o = 0; o < b->outputs; o += tile_outputs(mr))
        tile(b, o, mr);
}

// -------------------------------------------------------------------------------------------------
// Packed weights. DIFFERS: the paper unpacks them before it multiplies. But the outputs of a part
// share the min and the scale of each column, so their sums are, for a row of x and output j,
//
//     sum of x[c] min[c]  +  sum of (x[c] scale[c]) code[c][j]
//
// The first sum is the same for all j. The factors x[c] scale[c] of the second serve all j too.
// They are rounded to integers of 16 bits. Integers are multiplied and added without rounding, and
// a vector has twice as many of them as of floats.
// -------------------------------------------------------------------------------------------------

/* Up to PANEL_K columns of a part of the outputs. */
typedef struct {
    int columns;
    const uint8_t *codes;               /* the first column's; the next are GROUP_BYTES behind */
    float min[PANEL_K], scale[PANEL_K]; /* scale: as a share of `largest` */
    float largest;                      /* the largest scale */
    _Alignas(64) VP code[PANEL_K / 2][PART / VL]; /* the codes as numbers, once they are unpacked */
} Panel;

/* Loads the mins and scales of the columns whose groups begin at `from`. A min becomes NaN where
 * the scale is not finite. */
static void load_columns(Panel *p, const uint8_t *from) {
    uint32_t header[PANEL_K];
    V largest = v_set(LEAST);
    p->codes = from + GROUP_HEADER;
    PRAGMA(GCC unroll 16)
    for (int c = 0; c < p->columns; c++) {
        memcpy(header + c, from + c * GROUP_BYTES, GROUP_HEADER);
        __asm__("" : "+m"(header[c])); /* else GCC packs them in vectors, by five times the work */
    }
    for (int c = 0; c < p->columns; c += VL) {
        VI both;
        memcpy(&both, header + c, sizeof both);
        V scale = v_widen(__builtin_convertvector(both >> 16, VH));
        v_store(p->min + c, v_widen(__builtin_convertvector(both, VH)) + (scale - scale));
        v_store(p->scale + c, scale);
        largest = v_max(largest, v_max(scale, -scale));
    }
    p->largest = v_largest(largest);
    for (int c = 0; c < p->columns; c += VL)
        v_store(p->scale + c, v_load(p->scale + c) * (1 / p->largest));
}

/* Unpacks the codes of two columns, the first of which are at `codes`, for nv vectors of outputs.
 * quant.h tells which half of a byte belongs to which output. */
INLINE void unpack_pair(VP *to, const uint8_t *codes, const int nv) {
    UNROLL
    for (int v = 0; v < nv; v += 32 / VL, codes += 16) {
        VP both[16 / VL];
        p_load_16(both, codes, codes + GROUP_BYTES);
        UNROLL
        for (int u = 0; u < 16 / VL; u++) {
            to[v + u] = both[u] & 15;
            to[v + 16 / VL + u] = both[u] >> 4;
        }
    }
}

/* Rows of x times a panel. */
typedef struct {
    float *sum;        /* (rows, SUMS): the sums of codes, then a vector with those of mins */
    const float *x;    /* (rows, PANEL_K), as shares of `unit` */
    const float *unit; /* (rows) */
    Panel *panel;
} PackedTile;

/* Rounds x scale to integers of at most LARGEST, and adds x min to its sum. Floats around 1.5 2^23
 * are 1 apart, so their low bits are those of the nearest integer. */
INLINE void round_factors(const PackedTile *t, int16_t z[][PANEL_K], const int mr) {
    const Panel *p = t->panel;
    for (int i = 0; i < mr; i++) {
        float *to = t->sum + i * SUMS + PART;
        V sum = {0};
        PRAGMA(GCC unroll 4)
        for (int c = 0; c < p->columns; c += VL) {
            V x = v_load(t->x + i * PANEL_K + c);
            VI whole = (VI)v_fma(x, v_load(p->scale + c), v_set(0x1.8p23f));
            VH low = __builtin_convertvector(whole, VH);
            memcpy(z[i] + c, &low, sizeof low);
            sum = v_fma(x, v_load(p->min + c), sum);
        }
        v_store(to, v_fma(sum, v_set(t->unit[i]), v_load(to)));
    }
}

/* Adds mr rows of x times the panel to the sums. With `direct` it unpacks the codes, and with
 * `keep` it leaves them in the panel for the rows after these. The lines that it reads are
 * prefetched a panel ahead. */
INLINE void multiply_panel(const PackedTile *t, const bool direct, const bool keep, const int mr) {
    Panel *p = t->panel;
    int nv = mr == 1 ? imin(8, PART / VL) : NR; /* vectors of outputs */
    _Alignas(64) int16_t z[FEW][PANEL_K];
    round_factors(t, z, mr);
    for (int j = 0; j < PART; j += nv * VL) {
        VI acc[FEW * NR] = {{0}};
        const uint8_t *codes = p->codes + j / 2;
        for (int c = 0; c < p->columns / 2; c++, codes += 2 * GROUP_BYTES) {
            VP w[8], *kept = p->code[c] + j / VL;
            if (direct) {
                unpack_pair(w, codes, nv);
                __builtin_prefetch(codes + PANEL_K * GROUP_BYTES, 0, 2);
                __builtin_prefetch(codes + (PANEL_K + 1) * GROUP_BYTES, 0, 2);
            } else {
                UNROLL
                for (int v = 0; v < nv; v++)
                    w[v] = kept[v];
            }
            if (keep) {
                UNROLL
                for (int v = 0; v < nv; v++)
                    kept[v] = w[v];
            }
            UNROLL
            for (int i = 0; i < mr; i++) {
                VP factors = p_set(z[i] + 2 * c);
                UNROLL
                for (int v = 0; v < nv; v++)
                    acc[i * nv + v] = p_dot(w[v], factors, acc[i * nv + v]);
            }
        }
        UNROLL
        for (int i = 0; i < mr; i++) {
            V unit = v_set(t->unit[i] * p->largest);
            UNROLL
            for (int v = 0; v < nv; v++) {
                float *to = t->sum + i * SUMS + j + v * VL;
                v_store(to, v_fma(__builtin_convertvector(acc[i * nv + v], V), unit, v_load(to)));
            }
        }
    }
}
INLINE void direct_tile(const void *t, const int mr) { multiply_panel(t, true, false, mr); }
INLINE void panel_tile(const void *t, const int mr) { multiply_panel(t, false, false, mr); }

/* Copies some columns of a row of x as shares of a unit, of which the largest is LARGEST. Returns
 * the unit. */
static float scale_row(float *to, const float *x, int columns) {
    V largest = v_set(LEAST);
    for (int c = 0; c < columns; c += VL)
        largest = v_max(largest, v_max(v_load(x + c), -v_load(x + c)));
    float unit = v_largest(largest) / LARGEST;
    for (int c = 0; c < columns; c += VL)
        v_store(to + c, v_load(x + c) * (1 / unit));
    return unit;
}

// -------------------------------------------------------------------------------------------------
// Tasks
// -------------------------------------------------------------------------------------------------

/* Writes columns col .. col+nc of row r of y, from their sums. */
static void linear_finish(const Op *op, const float *sum, size_t r, size_t col, int nc) {
    Tensor y = op->linear.y;
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

/* Computes rows row .. row+rows of outputs col .. col+n. One row needs no blocks: all of it stays
 * in the nearest cache. */
static void task_of_halves(const Op *op, int row, int rows, int col, int n) {
    int k = op->linear.x.cols, depth = rows == 1 ? k : COLUMNS;
    int x_floats = imin(rows, FEW) * round_up(depth, VL);
    Block b = {.k = k, .outputs = n, .passes = ceil_div(rows, FEW)};
    const f16 *w = (const f16 *)op->linear.w.at + (size_t)col * k;
    int w_floats = WIDEN && rows > FEW ? OUTPUTS * COLUMNS : 0;
    b.copy = scratch(x_floats + w_floats + (FEW + rows * VL) * OUTPUTS);
    b.out = b.copy + x_floats;
    b.wide = w_floats ? b.out + FEW * OUTPUTS : NULL;
    V *kept = (V *)(void *)(b.out + FEW * OUTPUTS + w_floats); /* (rows, OUTPUTS) */
    for (int c = 0; c < k; c += depth) {
        b.nc = imin(depth, k - c);
        b.first = c == 0;
        b.last = c + b.nc == k;
        b.w = w + c;
        b.ahead = b.last ? w + (size_t)n * k : b.w + depth;
        if (b.wide)
            widen(&b);
        for (int i = 0; i < rows; i += FEW) {
            int mr = imin(FEW, rows - i);
            b.x = (const float *)op->linear.x.at + (size_t)(row + i) * k + c;
            b.kept = kept + i * OUTPUTS;
            b.pass = i / FEW;
            for_rows(multiply_block, &b, mr);
            for (int r = 0; b.last && r < mr; r++)
                linear_finish(op, b.out + r * OUTPUTS, row + i + r, col, n);
        }
    }
}

/* Computes rows row .. row+rows of some parts of the outputs, from `part` on. */
static void task_of_packed(const Op *op, int row, int rows, int part, int parts) {
    int k = op->linear.x.cols;
    const float *from = (const float *)op->linear.x.at + (size_t)row * k;
    const uint8_t *w = (const uint8_t *)op->linear.w.at + (size_t)part * k * GROUP_BYTES;
    float *x = scratch(rows * (PANEL_K + parts * SUMS + 1)); /* (rows, PANEL_K) */
    float *sums = x + rows * PANEL_K;                        /* (parts, rows, SUMS) */
    float *unit = sums + rows * parts * SUMS;                /* (rows) */
    memset(sums, 0, rows * parts * SUMS * sizeof *sums);
    for (int c = 0; c < k; c += PANEL_K) {
        Panel panel; /* not initialized: to fill it with zeros would take longer than its use */
        panel.columns = imin(PANEL_K, k - c);
        for (int i = 0; i < rows; i++)
            unit[i] = scale_row(x + i * PANEL_K, from + (size_t)i * k + c, panel.columns);
        for (int u = 0; u < parts; u++) {
            PackedTile t = {sums + u * rows * SUMS, x, unit, &panel};
            load_columns(&panel, w + ((size_t)u * k + c) * GROUP_BYTES);
            if (rows <= DIRECT)
                for_rows(direct_tile, &t, rows);
            else
                multiply_panel(&t, true, true, DIRECT);
            for (int i = DIRECT; i < rows; i += PANEL_MR) {
                t = (PackedTile){sums + (u * rows + i) * SUMS, x + i * PANEL_K, unit + i, &panel};
                for_rows(panel_tile, &t, imin(PANEL_MR, rows - i));
            }
        }
    }
    for (int i = 0; i < rows; i++)
        for (int u = 0; u < parts; u++) {
            float *sum = sums + (u * rows + i) * SUMS, of_mins = v_sum(v_load(sum + PART));
            for (int j = 0; j < PART; j += VL)
                v_store(sum + j, v_load(sum + j) + of_mins);
            linear_finish(op, sum, row + i, (part + u) * PART,
                          imin(PART, op->linear.y.cols - (part + u) * PART));
        }
}

/* A product, divided into tasks. */
typedef struct {
    const Op *op;
    int rows, parts; /* rows of x and parts of the outputs in a task */
    int all, across; /* parts of all outputs; tasks for all parts of the same rows */
} Tasks;

static void linear_tasks(const void *all, int first, int n) {
    const Tasks *t = all;
    Tensor y = t->op->linear.y;
    for (int task = first; task < first + n; task++) {
        int row = task / t->across * t->rows, rows = imin(t->rows, y.rows - row);
        int part = task % t->across * t->parts, parts = imin(t->parts, t->all - part);
        if (t->op->linear.w.type == U8)
            task_of_packed(t->op, row, rows, part, parts);
        else
            task_of_halves(t->op, row, rows, part * PART, imin(parts * PART, y.cols - part * PART));
    }
}

void host_linear(const Op *op) {
    Tensor y = op->linear.y;
    bool packed = op->linear.w.type == U8;
    int m = y.rows, k = op->linear.x.cols, all = ceil_div(y.cols, PART);
    int most = packed ? PANEL_ROWS : ROWS;
    /* Tasks that can be dealt out evenly. Few rows wait for memory, which reads several parts of
     * packed weights at a time faster than one, so their tasks are larger. */
    int enough = (m > FEW ? 4 : 2) * host_threads();
    CHECK((y.type == F32 || y.type == F16) && (!packed || k % GROUP == 0));
    int rows = round_up(ceil_div(m, ceil_div(m, most)), FEW);
    int parts = packed ? PANEL_OUTPUTS / PART : m > FEW ? OUTPUTS / PART : 1;
    while (parts > 1 && ceil_div(m, rows) * ceil_div(all, parts) < enough)
        parts--;
    while (rows > 4 * FEW && ceil_div(m, rows) * all < enough)
        rows = round_up(rows / 2, FEW);
    int across = ceil_div(all, parts), tasks = ceil_div(m, rows) * across;
    host_share((double)m * y.cols * k, tasks, linear_tasks, &(Tasks){op, rows, parts, all, across});
}
