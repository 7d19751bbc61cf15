/* ops.c: ops as data (section 4.2).
 *
 * An op says what is to be done, on which lane, with which views, and which square (i, j, k) it is
 * for. Here is what is the same for all devices: the names of lanes and channels, a table of what
 * each code reads and writes, the constructors with the checks of shapes, and what an op counts
 * for. Peaks, byte counters, traces, the sim's seconds and the order of ops all come from here; a
 * device only carries out.
 * Read next: lanes.c. */
#include "device/parts.h"

const Channel lane_channel[NLANES] = {DTOC, CTOG, DTOC, CTOG, GTOC, CTOD, GTOC,
                                      CTOG, GPU,  GPU,  CPU,  NET,  NET};
const char *const lane_name[NLANES] = {
    "read weights", "load weights",   "read cache",   "load cache", "store",
    "write",        "attention down", "attention up", "project",    "finish",
    "attend",       "receive",        "send"};
const char *const channel_name[NCHANNELS] = {"ctog", "gtoc", "dtoc", "ctod", "gpu", "cpu", "net"};

/* Views in the order of the op's struct. A product that adds its residual reads it; that it may be
 * y itself changes nothing, since who writes also comes after everyone who wrote before. An
 * embedding that adds reads y for the same reason.
 */
// clang-format off
const OpInfo op_info[NCODES] = {
    [OP_COPY] = {"copy", {{"", UNUSED}}},
    [OP_EMBED] = {"embed", {{"y", WRITES}, {"table", READS}, {"idx", READS}}},
    [OP_LAYERNORM] = {"layernorm", {{"y", WRITES}, {"x", READS}, {"w", READS}, {"b", READS}}},
    [OP_LINEAR] = {"linear", {{"y", WRITES}, {"x", READS}, {"w", READS}, {"b", READS}, {"residual", READS}}},
    [OP_UNPACK] = {"unpack", {{"w", WRITES}, {"packed", READS}}},
    [OP_PACK] = {"pack", {{"packed", WRITES}, {"kv", READS}}},
    [OP_ATTEND_PREFILL] = {"attend_prefill", {{"o", WRITES}, {"q", READS}, {"kv", READS}, {"start", READS}}},
    [OP_ATTEND] = {"attend", {{"o", WRITES}, {"q", READS}, {"tokens", UNUSED}, {"weights", UNUSED}, {"k", READS}, {"v", READS}, {"pages", READS}, {"len", READS}}},
    [OP_SELECT] = {"select", {{"o", UNUSED}, {"q", READS}, {"tokens", WRITES}, {"weights", WRITES}, {"k", READS}, {"v", UNUSED}, {"pages", READS}, {"len", READS}}},
    [OP_FETCH] = {"fetch", {{"v", WRITES}, {"pages", READS}, {"len", READS}, {"home_v", READS}, {"home_pages", READS}, {"tokens", READS}}},
    [OP_WEIGH] = {"weigh", {{"o", WRITES}, {"q", UNUSED}, {"tokens", READS}, {"weights", READS}, {"k", UNUSED}, {"v", READS}, {"pages", READS}, {"len", READS}}},
    [OP_APPEND] = {"append", {{"k", WRITES}, {"v", WRITES}, {"kv", READS}, {"seq", READS}, {"pos", READS}, {"pages", READS}}},
    [OP_PICK] = {"pick", {{"ids", WRITES}, {"logits", READS}, {"prompt", READS}, {"pos", READS}}},
    [OP_RECEIVE] = {"receive", {{"x", WRITES}}},
    [OP_SEND] = {"send", {{"x", READS}}},
    [OP_SCORE] = {"score", {{"logp", WRITES}, {"best", WRITES}, {"logits", READS}, {"target", READS}}},
};
// clang-format on

// -------------------------------------------------------------------------------------------------
// Constructors
// -------------------------------------------------------------------------------------------------

/* Bytes of a token's K, or V, in a page. */
static Bytes row_bytes(Tensor pages) { return pages.cols * type_bytes(pages.type); }

Op *op_copy(Op *op, const Move *moves, int n) {
    for (int i = 0; i < n; i++) {
        const Move *m = &moves[i];
        CHECK((Bytes)m->dst.rows * m->dst.cols == (Bytes)m->src.rows * m->src.cols);
        CHECK(m->dst.type == m->src.type || (m->src.file && m->dst.type == F16));
    }
    op->code = OP_COPY;
    op->moves = moves;
    op->nmoves = n;
    return op;
}

Op *op_embed(Op *op, Tensor y, Tensor table, Tensor idx, bool add) {
    CHECK(y.cols == table.cols && y.ld == (size_t)y.cols && (!idx.rows || idx.cols == y.rows));
    op->code = OP_EMBED;
    op->add = add;
    op->embed.y = y;
    op->embed.table = table;
    op->embed.idx = idx;
    return op;
}

Op *op_layernorm(Op *op, Tensor y, Tensor x, Tensor w, Tensor b) {
    CHECK(y.rows == x.rows && y.cols == x.cols && w.cols == x.cols && b.cols == x.cols);
    op->code = OP_LAYERNORM;
    op->layernorm.y = y;
    op->layernorm.x = x;
    op->layernorm.w = w;
    op->layernorm.b = b;
    return op;
}

Op *op_linear(Op *op, Tensor y, Tensor x, Tensor w, Tensor b, Tensor residual, bool relu) {
    if (w.type == U8)
        CHECK((size_t)w.rows * w.cols == quant_matrix_bytes(y.cols, x.cols));
    else
        CHECK(x.cols == w.cols && y.cols == w.rows && w.type == F16);
    CHECK(y.rows == x.rows &&
          (!residual.rows || (residual.rows == y.rows && residual.cols == y.cols)));
    op->code = OP_LINEAR;
    op->relu = relu;
    op->linear.y = y;
    op->linear.x = x;
    op->linear.w = w;
    op->linear.b = b;
    op->linear.residual = residual;
    return op;
}

Op *op_unpack(Op *op, Tensor w, Tensor packed) {
    CHECK(w.type == F16 && packed.type == U8);
    op->code = OP_UNPACK;
    op->unpack.w = w;
    op->unpack.packed = packed;
    return op;
}

Op *op_pack(Op *op, Tensor packed, Tensor kv, int nh) {
    CHECK(packed.type == U8 && packed.rows == kv.rows && kv.type == F16 && nh);
    op->code = OP_PACK;
    op->nh = nh;
    op->hd = kv.cols / 2 / nh;
    op->pack.packed = packed;
    op->pack.kv = kv;
    return op;
}

Op *op_attend_prefill(Op *op, Tensor o, Tensor q, Tensor kv, Tensor start, int nh) {
    CHECK(o.rows == q.rows && o.cols == q.cols && kv.rows == q.rows && kv.cols == 2 * q.cols &&
          kv.ld == q.ld);
    CHECK(q.type == F16 && kv.type == F16 && start.type == I32);
    op->code = OP_ATTEND_PREFILL;
    op->nh = nh;
    op->hd = q.cols / nh;
    op->prefilled.o = o;
    op->prefilled.q = q;
    op->prefilled.kv = kv;
    op->prefilled.start = start;
    return op;
}

/* What the ops on a page table have in common. h1: of a token. */
static void on_pages(Op *op, OpCode code, const PageTable *table, int h1) {
    CHECK(table->len.cols == table->pages.rows && table->pages.type == I32 &&
          table->k.cols == table->v.cols);
    op->code = code;
    op->nh = table->nh;
    op->hd = h1 / table->nh;
    op->page_tokens = table->page_tokens;
}

/* Attention, and both halves of sparse attention: which of the views they use is in op_info. */
static Op *attend(Op *op, OpCode code, Tensor o, Tensor q, Tensor tokens, Tensor weights,
                  const PageTable *table, double sparsity) {
    on_pages(op, code, table, imax(o.cols, q.cols));
    CHECK(imax(o.rows, q.rows) == table->len.cols && (!q.rows || q.type == F16));
    CHECK(tokens.cols == weights.cols && tokens.cols % table->nh == 0 &&
          (!tokens.rows || tokens.rows == table->len.cols));
    op->sparsity = sparsity;
    op->attend.o = o;
    op->attend.q = q;
    op->attend.tokens = tokens;
    op->attend.weights = weights;
    op->attend.k = table->k;
    op->attend.v = table->v;
    op->attend.pages = table->pages;
    op->attend.len = table->len;
    return op;
}

Op *op_attend(Op *op, Tensor o, Tensor q, const PageTable *table) {
    CHECK(q.rows == o.rows && q.cols == o.cols);
    return attend(op, OP_ATTEND, o, q, (Tensor){0}, (Tensor){0}, table, 1);
}
Op *op_select(Op *op, Tensor tokens, Tensor weights, Tensor q, const PageTable *table,
              double sparsity) {
    return attend(op, OP_SELECT, (Tensor){0}, q, tokens, weights, table, sparsity);
}
Op *op_weigh(Op *op, Tensor o, Tensor tokens, Tensor weights, const PageTable *table,
             double sparsity) {
    return attend(op, OP_WEIGH, o, (Tensor){0}, tokens, weights, table, sparsity);
}

Op *op_fetch(Op *op, const PageTable *staged, const PageTable *home, Tensor tokens,
             double sparsity) {
    CHECK(lane_channel[op->lane] == DTOC && home->v.tier == TIER_DISK &&
          staged->v.tier == TIER_CPU);
    on_pages(op, OP_FETCH, staged, staged->nh);
    op->sparsity = sparsity;
    op->fetch.v = staged->v;
    op->fetch.pages = staged->pages;
    op->fetch.len = staged->len;
    op->fetch.home_v = home->v;
    op->fetch.home_pages = home->pages;
    op->fetch.tokens = tokens;
    return op;
}

Op *op_append(Op *op, const PageTable *table, Tensor kv, Tensor seq, Tensor pos) {
    on_pages(op, OP_APPEND, table, kv.cols / 2);
    if (kv.type == table->k.type)
        CHECK(kv.cols == 2 * table->k.cols);
    else
        CHECK(kv.type == F16 && (size_t)table->k.cols == table->nh * quant_bytes(op->hd));
    CHECK(seq.cols == kv.rows && pos.cols == kv.rows);
    op->append.k = table->k;
    op->append.v = table->v;
    op->append.kv = kv;
    op->append.seq = seq;
    op->append.pos = pos;
    op->append.pages = table->pages;
    return op;
}

Op *op_pick(Op *op, Tensor ids, Tensor logits, Tensor prompt, Tensor pos,
            const Sampling *sampling) {
    CHECK(ids.cols == logits.rows && ids.type == I32 && logits.type == F32);
    op->code = OP_PICK;
    op->sampling = *sampling;
    op->pick.ids = ids;
    op->pick.logits = logits;
    op->pick.prompt = prompt;
    op->pick.pos = pos;
    return op;
}

Op *op_score(Op *op, Tensor logp, Tensor best, Tensor logits, Tensor target) {
    CHECK(logp.cols == logits.rows && best.cols == logits.rows && target.cols == logits.rows);
    op->code = OP_SCORE;
    op->score.logp = logp;
    op->score.best = best;
    op->score.logits = logits;
    op->score.target = target;
    return op;
}

static Op *op_state(Op *op, OpCode code, Tensor x) {
    CHECK(x.tier == TIER_CPU && x.ld == (size_t)x.cols);
    op->code = code;
    op->state.x = x;
    return op;
}
Op *op_receive(Op *op, Tensor x) { return op_state(op, OP_RECEIVE, x); }
Op *op_send(Op *op, Tensor x) { return op_state(op, OP_SEND, x); }

// -------------------------------------------------------------------------------------------------
// What an op counts for
// -------------------------------------------------------------------------------------------------

const Tensor *op_lengths(const Op *op) {
    switch (op->code) {
        case OP_ATTEND:
        case OP_SELECT:
        case OP_WEIGH:
            return &op->attend.len;
        case OP_FETCH:
            return &op->fetch.len;
        default:
            return NULL;
    }
}

long op_tokens(const Op *op, const int32_t *len) {
    long tokens = 0;
    for (int r = 0, n = op_lengths(op)->cols; r < n; r++) {
        if (op->code == OP_FETCH)
            tokens += sparse_tokens(op->sparsity, len[r]) - 1; /* its own is here */
        else
            tokens += op->code == OP_WEIGH ? sparse_tokens(op->sparsity, len[r]) : len[r];
    }
    return tokens;
}

Bytes op_count(LaneCount *count, const Op *op, const int32_t *len) {
    const Channel channel = lane_channel[op->lane];
    Bytes moved = 0;
    switch (op->code) {
        case OP_COPY:
            for (int i = 0; i < op->nmoves; i++)
                moved += tensor_bytes(op->moves[i].src);
            break;
        case OP_EMBED: /* rows read from disk have crossed a link */
            if (channel == DTOC)
                moved =
                    (Bytes)op->embed.y.rows * op->embed.y.cols * type_bytes(op->embed.table.type);
            break;
        case OP_APPEND:
            if (channel == CTOD)
                moved = tensor_bytes(op->append.kv);
            break;
        case OP_RECEIVE:
        case OP_SEND:
            moved = tensor_bytes(op->state.x);
            break;
        case OP_FETCH:
            moved = op_tokens(op, len) * row_bytes(op->fetch.v);
            break;
        case OP_ATTEND:
        case OP_SELECT:
        case OP_WEIGH:
            if (op->code != OP_WEIGH)
                count->read[0] += op_tokens(op, len) * row_bytes(op->attend.k);
            if (op->code != OP_SELECT)
                count->read[1] += op_tokens(op, len) * row_bytes(op->attend.v);
            break;
        default:
            break;
    }
    count->moved[op->kind] += moved;
    return moved;
}

void reach_open(Reach *reach, Bytes peak[NTIERS], const Plan *plan) {
    memset(reach->high, 0, sizeof reach->high);
    memcpy(reach->region, plan->region, sizeof reach->region);
    memset(peak, 0, NTIERS * sizeof *peak);
    for (int id = 0; id < NREGIONS;
         id++) /* what rests in the checkpoint is in use from the start */
        for (int t = 0; t < NTIERS; t++)
            if (plan->region[id][t].offset == SIZE_MAX)
                peak[t] += plan->region[id][t].bytes;
}

void reach_note(Reach *reach, Bytes peak[NTIERS], Tensor view) {
    Bytes span = tensor_span(view);
    if (!span || view.file)
        return;
    CHECK(view.region < NREGIONS && view.tier < NTIERS);
    const Region *region = &reach->region[view.region][view.tier];
    Bytes *high = &reach->high[view.region][view.tier];
    CHECK(view.offset >= region->offset && view.offset - region->offset + span <= region->bytes);
    Bytes end = whole_lines(view.offset - region->offset + span);
    if (end > *high) {
        peak[view.tier] += end - *high;
        *high = end;
    }
}

void reach_op(Reach *reach, Bytes peak[NTIERS], const Op *op) {
    Use use;
    for (int n = 0; n < op_nviews(op); n++) {
        const Tensor *view = op_view(op, n, &use);
        if (use)
            reach_note(reach, peak, *view);
    }
}
