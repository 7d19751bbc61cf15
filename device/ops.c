/* ops.c: ops as data (section 4.2).
 *
 * An op says what a device is to do: on which lane, with which views, and for which square
 * (i, j, k). This file has everything about ops that is the same for all devices: the names of
 * lanes and channels, a table of the views that each code reads and writes, the constructors with
 * their checks of shapes, and the bytes that an op counts for. The peaks, the byte counters, the
 * traces, the seconds of the sim and the order of ops all follow from it; a device only carries ops
 * out.
 * Read next: device.h. */
#include "device/parts.h"

const Channel lane_channel[NLANES] = {DTOC, CTOG, DTOC, CTOG, GTOC, CTOD, GTOC,
                                      CTOG, GPU,  GPU,  CPU,  NET,  NET};
const char *const lane_name[NLANES] = {
    "read weights", "load weights",   "read cache",   "load cache", "store",
    "write",        "attention down", "attention up", "project",    "finish",
    "attend",       "receive",        "send"};
const char *const channel_name[NCHANNELS] = {"ctog", "gtoc", "dtoc", "ctod", "gpu", "cpu", "net"};

/* A product reads the residual that it adds. This may be y itself: an op that writes a view comes
 * after all earlier ops that wrote it, so y needs no entry as an input. For the same reason an
 * embedding that adds to y only WRITES it. */
// clang-format off
const OpInfo op_info[NCODES] = {
    [OP_COPY] = {"copy", {UNUSED}},
    [OP_EMBED] = {"embed", {WRITES, READS, READS}},
    [OP_LAYERNORM] = {"layernorm", {WRITES, READS, READS, READS}},
    [OP_LINEAR] = {"linear", {WRITES, READS, READS, READS, READS}},
    [OP_UNPACK] = {"unpack", {WRITES, READS}},
    [OP_PACK] = {"pack", {WRITES, READS}},
    [OP_ATTEND_PREFILL] = {"attend_prefill", {WRITES, READS, READS, READS}},
    /*                          o       q       tokens  probs   k       v       pages  len */
    [OP_ATTEND] = {"attend",   {WRITES, READS,  UNUSED, UNUSED, READS,  READS,  READS, READS}},
    [OP_SELECT] = {"select",   {UNUSED, READS,  WRITES, WRITES, READS,  UNUSED, READS, READS}},
    [OP_WEIGH] = {"weigh",     {WRITES, UNUSED, READS,  READS,  UNUSED, READS,  READS, READS}},
    [OP_FETCH] = {"fetch", {WRITES, READS, READS, READS, READS, READS}},
    [OP_APPEND] = {"append", {WRITES, WRITES, READS, READS, READS, READS}},
    [OP_PICK] = {"pick", {WRITES, READS, READS, READS}},
    [OP_SCORE] = {"score", {WRITES, WRITES, READS, READS}},
    [OP_RECEIVE] = {"receive", {WRITES}},
    [OP_SEND] = {"send", {READS}},
};
// clang-format on

// -------------------------------------------------------------------------------------------------
// Constructors
//
// ops.h says what each op computes. The checks here hold for all devices: a wrong shape is a bug
// of who posts, and is found where the op is made. Fields that are not named become 0: absent
// views, no events to wait for.
// -------------------------------------------------------------------------------------------------

Op op_copy(Call call, const Move *moves, int n) {
    for (int i = 0; i < n; i++) {
        const Move *m = &moves[i];
        CHECK((Bytes)m->dst.rows * m->dst.cols == (Bytes)m->src.rows * m->src.cols);
        CHECK(m->dst.type == m->src.type || (m->src.file && m->dst.type == F16));
    }
    return (Op){.code = OP_COPY, .call = call, .moves = moves, .nmoves = n};
}

Op op_embed(Call call, Tensor y, Tensor table, Tensor idx, bool add) {
    int cols = table.type == U8 ? table.cols / GROUP_BYTES : table.cols;
    CHECK(y.cols == cols && y.ld == (size_t)cols && (!idx.rows || idx.cols == y.rows));
    return (Op){.code = OP_EMBED, .call = call, .embed = {y, table, idx}, .add = add};
}

Op op_layernorm(Call call, Tensor y, Tensor x, Tensor w, Tensor b) {
    CHECK(y.rows == x.rows && y.cols == x.cols && w.cols == x.cols && b.cols == x.cols);
    return (Op){.code = OP_LAYERNORM, .call = call, .layernorm = {y, x, w, b}};
}

Op op_linear(Call call, Tensor y, Tensor x, Tensor w, Tensor b, Tensor residual) {
    if (w.type == U8)
        CHECK((size_t)w.rows * w.cols == quant_matrix_bytes(y.cols, x.cols));
    else
        CHECK(x.cols == w.cols && y.cols == w.rows && w.type == F16);
    CHECK(y.rows == x.rows &&
          (!residual.rows || (residual.rows == y.rows && residual.cols == y.cols)));
    return (Op){.code = OP_LINEAR, .call = call, .linear = {y, x, w, b, residual}};
}

Op op_linear_relu(Call call, Tensor y, Tensor x, Tensor w, Tensor b) {
    Op op = op_linear(call, y, x, w, b, (Tensor){0});
    op.relu = true;
    return op;
}

Op op_unpack(Call call, Tensor w, Tensor packed) {
    CHECK(w.type == F16 && packed.type == U8);
    return (Op){.code = OP_UNPACK, .call = call, .unpack = {w, packed}};
}

Op op_pack(Call call, Tensor packed, Tensor kv, int nh) {
    CHECK(packed.type == U8 && packed.rows == kv.rows && kv.type == F16 && nh);
    int hd = kv.cols / 2 / nh;
    return (Op){.code = OP_PACK, .call = call, .pack = {packed, kv}, .nh = nh, .hd = hd};
}

Op op_attend_prefill(Call call, Tensor o, Tensor q, Tensor kv, Tensor start, int nh) {
    CHECK(o.rows == q.rows && o.cols == q.cols);
    CHECK(kv.rows == q.rows && kv.cols == 2 * q.cols && kv.ld == q.ld);
    CHECK(q.type == F16 && kv.type == F16 && start.type == I32);
    return (Op){.code = OP_ATTEND_PREFILL,
                .call = call,
                .prefilled = {o, q, kv, start},
                .nh = nh,
                .hd = q.cols / nh};
}

/* Checks the shapes of a page table. */
static void check_table(const PageTable *t) {
    CHECK(t->len.cols == t->pages.rows && t->pages.type == I32 && t->k.cols == t->v.cols);
}

/* Returns attention to a page table, or half of sparse attention, of which some views are absent:
 * view is {o, q, tokens, probs}. */
static Op attend(Call call, OpCode code, const Tensor view[4], const PageTable *t,
                 double sparsity) {
    Tensor o = view[0], q = view[1], tokens = view[2], probs = view[3];
    int nseq = t->len.cols;
    check_table(t);
    CHECK(imax(o.rows, q.rows) == nseq && (!q.rows || q.type == F16));
    CHECK(tokens.cols == probs.cols && tokens.cols % t->nh == 0);
    CHECK(!tokens.rows || tokens.rows == nseq);
    return (Op){.code = code,
                .call = call,
                .attend = {o, q, tokens, probs, t->k, t->v, t->pages, t->len},
                .nh = t->nh,
                .hd = imax(o.cols, q.cols) / t->nh,
                .page_tokens = t->page_tokens,
                .sparsity = sparsity};
}

Op op_attend(Call call, Tensor o, Tensor q, const PageTable *table) {
    CHECK(q.rows == o.rows && q.cols == o.cols);
    return attend(call, OP_ATTEND, (Tensor[4]){o, q}, table, 1);
}

Op op_select(Call call, Tensor tokens, Tensor probs, Tensor q, const PageTable *table,
             double sparsity) {
    return attend(call, OP_SELECT, (Tensor[]){{0}, q, tokens, probs}, table, sparsity);
}

Op op_weigh(Call call, Tensor o, Tensor tokens, Tensor probs, const PageTable *table,
            double sparsity) {
    return attend(call, OP_WEIGH, (Tensor[]){o, {0}, tokens, probs}, table, sparsity);
}

Op op_fetch(Call call, const PageTable *staged, const PageTable *home, Tensor tokens,
            double sparsity) {
    Tensor to = staged->v, from = home->v;
    check_table(staged);
    CHECK(lane_channel[call.lane] == DTOC && from.tier == TIER_DISK && to.tier == TIER_CPU);
    return (Op){.code = OP_FETCH,
                .call = call,
                .fetch = {to, staged->pages, staged->len, from, home->pages, tokens},
                .nh = staged->nh,
                .hd = 1,
                .page_tokens = staged->page_tokens,
                .sparsity = sparsity};
}

Op op_append(Call call, const PageTable *t, Tensor kv, Tensor seq, Tensor pos) {
    int hd = kv.cols / 2 / t->nh;
    check_table(t);
    if (kv.type == t->k.type)
        CHECK(kv.cols == 2 * t->k.cols);
    else
        CHECK(kv.type == F16 && (size_t)t->k.cols == t->nh * quant_bytes(hd));
    CHECK(seq.cols == kv.rows && pos.cols == kv.rows);
    return (Op){.code = OP_APPEND,
                .call = call,
                .append = {t->k, t->v, kv, seq, pos, t->pages},
                .nh = t->nh,
                .hd = hd,
                .page_tokens = t->page_tokens};
}

Op op_pick(Call call, Tensor ids, Tensor logits, Tensor prompt, Tensor pos, const Prompt *prompts) {
    CHECK(ids.cols == logits.rows && ids.type == I32 && logits.type == F32);
    return (Op){
        .code = OP_PICK, .call = call, .pick = {ids, logits, prompt, pos}, .prompts = prompts};
}

Op op_score(Call call, Tensor logp, Tensor best, Tensor logits, Tensor target) {
    CHECK(logp.cols == logits.rows && best.cols == logits.rows && target.cols == logits.rows);
    return (Op){.code = OP_SCORE, .call = call, .score = {logp, best, logits, target}};
}

/* Returns an op of a pipeline: x is a hidden state that is sent or received. */
static Op op_state(Call call, OpCode code, Tensor x) {
    CHECK(x.tier == TIER_CPU && x.ld == (size_t)x.cols);
    return (Op){.code = code, .call = call, .state = {x}};
}
Op op_receive(Call call, Tensor x) { return op_state(call, OP_RECEIVE, x); }
Op op_send(Call call, Tensor x) { return op_state(call, OP_SEND, x); }

// -------------------------------------------------------------------------------------------------
// The bytes and tokens that an op counts for
// -------------------------------------------------------------------------------------------------

/* Returns the bytes of a token's K, or V, in a page. */
static Bytes row_bytes(Tensor pages) { return pages.cols * type_bytes(pages.type); }

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
    bool selected = op->code == OP_FETCH || op->code == OP_WEIGH;
    long tokens = 0;
    for (int r = 0, n = op_lengths(op)->cols; r < n; r++) {
        tokens += selected ? sparse_tokens(op->sparsity, len[r]) : len[r];
        tokens -= op->code == OP_FETCH; /* its own token's V is not on disk */
    }
    return tokens;
}

Bytes op_count(LaneCount *count, const Op *op, const int32_t *len) {
    Channel channel = lane_channel[op->lane];
    Bytes moved = 0;
    switch (op->code) {
        case OP_COPY:
            for (int i = 0; i < op->nmoves; i++)
                moved += tensor_bytes(op->moves[i].src);
            break;
        case OP_EMBED: /* rows read from disk have crossed a link */
            if (channel == DTOC)
                moved = (Bytes)op->embed.y.rows * op->embed.table.cols *
                        type_bytes(op->embed.table.type);
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

// -------------------------------------------------------------------------------------------------
// How far ops reach into their regions
// -------------------------------------------------------------------------------------------------

void reach_open(Reach *reach, Bytes peak[NTIERS], const Plan *plan) {
    *reach = (Reach){.plan = plan, .peak = peak};
    for (int id = 0; id < NREGIONS; id++) /* the part in the checkpoint is in use from the start */
        for (int t = 0; t < NTIERS; t++)
            if (plan->region[id][t].offset == SIZE_MAX)
                peak[t] += plan->region[id][t].bytes;
}

void reach_note(Reach *reach, Tensor view) {
    Bytes span = tensor_span(view);
    if (!span || view.file)
        return;
    CHECK(view.region < NREGIONS && view.tier < NTIERS);
    const Region *region = &reach->plan->region[view.region][view.tier];
    Bytes *high = &reach->high[view.region][view.tier], end = view.offset - region->offset + span;
    CHECK(view.offset >= region->offset && end <= region->bytes);
    end = whole_lines(end);
    if (end > *high) {
        reach->peak[view.tier] += end - *high;
        *high = end;
    }
}

void reach_op(Reach *reach, const Op *op) {
    Use use;
    for (int n = 0; n < op_nviews(op); n++) {
        const Tensor *view = op_view(op, n, &use);
        if (use)
            reach_note(reach, *view);
    }
}
