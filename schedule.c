/* schedule.c: the block schedule with overlapping (sections 4.1 and 4.2, Figure 4).
 *
 * Generation is a grid of squares (token i, layer j, GPU batch k). A sweep computes one token for every batch in flight:
 * for each layer j, for each batch k, in the order of Figure 4, call for call. Layer l, behind the decoder layers, is the
 * head: final norm, logits, the next token. Who is in flight changes only between sweeps (admit); admission.c says which
 * prompts enter, and is all that the schedules differ in. Every call only posts ops on lanes; what an op needs is in its
 * `after` events, so nothing else is ever waited for. The one wait for data is for batch k's new tokens, when (layer 0, k)
 * of the next sweep is posted: there a sequence is found to have ended; or between the sweeps, where it is known to end.
 * compute(j, k) is project, attend, finish; three workspaces rotate, so that while the CPU attends for batch k, the GPU
 * finishes batch k-1 and projects batch k+1. Read next: opt_model.c for the halves of a layer, lanes.c for what a lane is.
 */
#include "device/device.h"
#include "io/io.h"

/* A sequence in flight; its seat is its place in Run.seqs. */
typedef struct {
    int prompt;    /* index into the task */
    int home;      /* its GPU batch */
    Tier kv, act;  /* where its KV pages rest, and in this sweep its activations */
    int s, n;      /* prompt length, tokens wanted */
    int generated; /* tokens known so far */
    int posted;    /* tokens whose computation has been posted: generated, or one more */
    int heads;     /* rows of its newest step that the head wants: the last ones */
    int npages;
    int *pages; /* its pages in the pool of kv */
    int32_t *tokens;
} Sequence;

/* A batch's index tables, I32, once on the CPU and mirrored on the GPU in the same layout. Even and odd sweeps have tables
 * of their own. */
typedef struct {
    Tensor all;                                /* the whole block of them */
    Tensor ids, positions, row_seq, row_token; /* (1, rows): token, position + 2; sequence, place in it */
    Tensor start, len, prompt, at; /* (1, nseq): first row (and the end), tokens with the new one; for sampling */
    Tensor pages, staged;          /* (nseq, max_pages): in the home pool, in staging */
    Tensor head, target;           /* (1, heads): rows that the head wants; of a scored task what follows them */
} Tables;

/* A page that passes through staging this sweep: its place there is its rank in the list. past: it holds tokens of earlier
 * sweeps. */
typedef struct {
    int page;
    bool past;
} Staged;

/* One GPU batch in flight. Rows are the tokens of this sweep, sequence after sequence; sequences are ordered by the tier of
 * their KV, and the tiers of their activations never fall back, so each tier's rows are one range. */
typedef struct {
    Sequence **seq;
    int nseq, rows, heads;
    Sequence **joining;   /* members that have prefilled elsewhere, from its next begin on */
    int njoining, number; /* number: of its latest admission, counted over the run */
    bool in_flight;
    bool prefill, waiting; /* waiting: its newest tokens are posted, not yet known */
    int sweep;             /* the sweep that its rows and tables are for */
    int kv_seqs[NTIERS], kv_rows[NTIERS], act_seqs[NTIERS], act_rows[NTIERS], act_heads[NTIERS];
    Staged *staged[NTIERS]; /* the CPU's and the disk's pages, in page order */
    int nstaged[NTIERS];
    Tables cpu, gpu;
    Event tables_up, picked;
    Event finished; /* its newest square */
    Event gathered, projected, down, attended;
    Event act_loaded, act_stored[2]; /* stored on the CPU (STORE), on disk (D_WRITE) */
    Event cache_loaded[2][2];        /* on the GPU, on the CPU; of even, of odd layers: a batch alone loads one ahead */
    Event *cache_stored[2];          /* [l]: on the CPU (ATTEND), on disk (D_WRITE) */
    Event tables_read[2][2];         /* the last stores that read the tables of even, of odd sweeps */
    int act_in, act_out, cache_in; /* layer whose activations were asked for last, stored last; whose cache was asked for */
} Batch;

/* Who used a rotating buffer last: the events after which it is free. */
typedef struct {
    Event by[4];
} Release;

/* A layer's weights on their way through a staging slot. */
typedef struct {
    int slot;        /* -1: all of it rests on the GPU */
    Event loaded;    /* its last part has arrived there */
    Event disk_free; /* its slot on the CPU tier is free */
} LayerLoad;

typedef struct {
    const Plan *plan;
    const Task *task;
    Device *device;
    const Listener *listener;
    RunStats *stats;
    Error *err;
    int l, K;               /* decoder layers; batches in flight in this sweep */
    long base;              /* squares of the sweeps before this one */
    int i;                  /* this sweep */
    Batch *batch, **flight; /* [slots]; the K that this sweep computes */
    Admission admission;
    Sequence *seqs; /* [seats of a block] */
    int nseqs;
    int *entered;  /* seats that admission has filled */
    long admitted; /* batches so far */
    PagePool pool[NTIERS];
    Move *moves;
    Release ws[3]; /* of the workspaces, and of the buffers on the CPU that rotate with them */
    Event kv_slot[2], disk_kv_slot[2], act_in_slot[2], act_out_slot[2], logits_free;
    long streamed;        /* layers that have streamed so far: their slots alternate */
    LayerLoad now, next;  /* the layer that computes, the one that loads beside it */
    bool next_is_layer0;  /* next is layer 0 of the coming sweep */
    bool unpacked;        /* so are the weights of the layer that computes */
    Event slot_used[2];   /* the last op that computes with a weight slot on the GPU */
    Event slot_raised[2]; /* the last copy out of a weight slot on the CPU tier */
    Event last[NLANES];   /* the newest op of each lane */
    bool failed;
    bool now_prefill;   /* some batch of this sweep enters, in prefill */
    int began;          /* batches that take part in this sweep */
    bool prefill_sweep; /* the sweep whose tokens are being collected had a batch in prefill */
    int uncollected;    /* its batches whose tokens are not known yet */
    double swept_at;
} Run;

// ---------------------------------------------------------------------------------------------------------------
// Views and ops
// ---------------------------------------------------------------------------------------------------------------

static Tensor view(Tier tier, Type type, size_t offset, int rows, int cols) {
    return (Tensor){.tier = tier, .type = type, .offset = offset, .rows = rows, .cols = cols, .ld = (size_t)cols};
}

static Op new_op(Run *s, Lane lane, Kind kind, int j, int k) {
    const Batch *b = s->flight[k];
    return (Op){.lane = lane,
                .kind = kind,
                .prefill = kind == WEIGHT ? s->now_prefill : b->prefill,
                .i = s->i,
                .j = j,
                .k = k,
                .batch = b->number};
}

static void after(Op *op, Event e) {
    if (!e.seq) return;
    for (int n = 0; n < op->nafter; n++) {
        if (op->after[n].lane != e.lane) continue;
        if (e.seq > op->after[n].seq) op->after[n] = e; /* lanes are in order: the later event says it all */
        return;
    }
    CHECK(op->nafter < (int)(sizeof op->after / sizeof *op->after));
    op->after[op->nafter++] = e;
}

static void after_release(Op *op, const Release *r) {
    for (int n = 0; n < 4; n++) after(op, r->by[n]);
}

/* --no-overlap: every post is waited for at once. That is the only difference. */
static Event posted(Run *s, Event e) {
    if (e.seq) s->last[e.lane] = e;
    if (!s->plan->policy.overlap && e.seq && s->device->wait(s->device, e, s->err)) s->failed = true;
    return e;
}

/* Rows of a rotating workspace. */
static Tensor workspace(const Run *s, size_t region, Type type, long square, int max_rows, int rows, int cols) {
    size_t slot = (size_t)(square % s->plan->nws) * max_rows * cols * type_bytes(type);
    return view(TIER_GPU, type, region + slot, rows, cols);
}

static Tensor ws_q(const Run *s, long sq, int rows) {
    return workspace(s, s->plan->q, s->plan->act_type, sq, s->plan->max_rows, rows, s->plan->config.h1);
}
static Tensor ws_o(const Run *s, long sq, int rows) {
    return workspace(s, s->plan->o, s->plan->act_type, sq, s->plan->max_rows, rows, s->plan->config.h1);
}
static Tensor ws_kv(const Run *s, long sq, int rows) {
    return workspace(s, s->plan->kvrow, F16, sq, s->plan->max_rows, rows, 2 * s->plan->config.h1);
}
/* The same as pages take it: where the cache is packed, new k, v are packed before they go anywhere. */
static Tensor kv_rows(const Run *s, Tier tier, size_t region, long sq, int max_rows, int rows) {
    const Plan *p = s->plan;
    bool packed = p->policy.cache_quant.bits;
    Tensor t = workspace(s, region, packed ? U8 : F16, sq, max_rows, rows, (int)(packed ? 2 * p->kv_row : p->kv_row));
    t.tier = tier, t.quant = p->policy.cache_quant;
    return t;
}
static Tensor ws_kv_rows(const Run *s, long sq, int rows) {
    const Plan *p = s->plan;
    return kv_rows(s, TIER_GPU, p->policy.cache_quant.bits ? p->kvpacked : p->kvrow, sq, p->max_rows, rows);
}
static Tensor ws_head_x(const Run *s, long sq, int rows) {
    return workspace(s, s->plan->head_x, s->plan->act_type, sq, s->plan->head_rows, rows, s->plan->config.h1);
}
/* Buffers on the CPU tier that rotate with the workspaces. */
static Tensor cpu_ws(const Run *s, size_t region, Type type, long sq, int max_rows, int rows, int cols) {
    Tensor t = workspace(s, region, type, sq, max_rows, rows, cols);
    t.tier = TIER_CPU;
    return t;
}

/* Where batch b's activations of one tier rest: row 0 is its first row of that tier. */
static Tensor act_home(const Run *s, const Batch *b, Tier tier) {
    int k = (int)(b - s->batch), h1 = s->plan->config.h1;
    size_t first = (size_t)s->plan->act_first[tier][k] * h1 * type_bytes(s->plan->act_type);
    return view(tier, s->plan->act_type, s->plan->act[tier] + first, b->act_rows[tier], h1);
}

/* What a batch's newest step gave, on GPU or CPU: the tokens chosen; of a scored task log-probabilities (F32) and greedy
 * choices (I32). */
static Tensor picked(const Run *s, const Batch *b, Tier side) {
    size_t first = (size_t)(b - s->batch) * s->plan->max_seqs;
    return view(side, I32, s->plan->picked[side] + first * 4, 1, b->nseq);
}
static Tensor scores(const Run *s, const Batch *b, Tier side, Type type) {
    size_t row = (size_t)s->plan->head_rows * 4, first = (b - s->batch) * 2 * row;
    return view(side, type, s->plan->scores[side] + first + (type == I32 ? row : 0), 1, b->heads);
}
/* Its logits where they are kept, of sequences first .. first+n-1. */
static Tensor cpu_logits(const Run *s, const Batch *b, int first, int n) {
    size_t row = (size_t)(b - s->batch) * s->plan->max_seqs + first, vocab = s->plan->config.vocab;
    return view(TIER_CPU, F32, s->plan->cpu_logits + row * vocab * 4, n, (int)vocab);
}

/* The hidden state while it is computed: in place where all of it rests on the GPU, else in the workspace. */
static Tensor hidden(const Run *s, const Batch *b, long sq) {
    if (b->act_rows[TIER_GPU] == b->rows) return act_home(s, b, TIER_GPU);
    return workspace(s, s->plan->x, s->plan->act_type, sq, s->plan->max_rows, b->rows, s->plan->config.h1);
}

/* Layer j of a tier's page pool, or of a staging slot laid out as a pool of one layer. */
static PageTable page_table(const Run *s, Tier tier, size_t region, int j, int npages, Tensor pages, Tensor len) {
    const Plan *p = s->plan;
    int page = p->policy.page_tokens, h1 = p->config.h1, rows = npages * page;
    size_t half = rows * p->kv_row;
    Quant quant = p->policy.cache_quant;
    PageTable t = {.pages = pages, .len = len, .page_tokens = page, .h1 = h1, .nh = p->config.nh};
    t.k = view(tier, quant.bits ? U8 : F16, region + j * 2 * half, rows, quant.bits ? (int)p->kv_row : h1);
    t.v = t.k;
    t.v.offset += half;
    t.k.quant = t.v.quant = quant;
    return t;
}

static PageTable pool_table(const Run *s, Tier tier, int j, Tensor pages, Tensor len) {
    return page_table(s, tier, s->plan->kv[tier], j, s->plan->npages[tier], pages, len);
}

/* side 0: on the GPU, where the GPU attends; 1: on the CPU, what comes from disk. */
static PageTable staged_table(const Run *s, int side, long sq, Tensor pages, Tensor len) {
    int npages = s->plan->staged_pages[side];
    size_t slot = (size_t)npages * s->plan->policy.page_tokens * s->plan->kv_row * 2;
    return page_table(s, (Tier)side, s->plan->kv_staging[side] + (sq % 2) * slot, 0, npages, pages, len);
}

/* The batch that computes square (j, k), k counted in flight order, wrapping to the neighbouring layers; NULL outside the
 * sweep. */
static Batch *at_square(const Run *s, int *j, int *k) {
    if (*k < 0) *k += s->K, *j -= 1;
    if (*k >= s->K) *k -= s->K, *j += 1;
    return *j < 0 || *j > s->l ? NULL : s->flight[*k];
}

// ---------------------------------------------------------------------------------------------------------------
// Weights
// ---------------------------------------------------------------------------------------------------------------

static bool more_to_come(const Run *s) {
    if (s->admission.next_prompt < s->task->count) return true;
    for (int k = 0; k < s->K; k++)
        for (int r = 0; r < s->flight[k]->nseq; r++)
            if (s->flight[k]->seq[r]->posted < s->flight[k]->seq[r]->n) return true;
    return false;
}

/* Appends a move; one that goes on where the last one ends, on both sides, becomes part of it. */
static int add_piece(Move *moves, int n, Tensor dst, Tensor src) {
    Move *last = n ? &moves[n - 1] : NULL;
    if (last && last->src.file == src.file && last->src.type == src.type &&
        last->src.offset + last->src.cols * type_bytes(src.type) == src.offset &&
        last->dst.offset + last->dst.cols * type_bytes(dst.type) == dst.offset) {
        last->src.cols += src.cols, last->src.ld = last->src.cols;
        last->dst.cols += dst.cols, last->dst.ld = last->dst.cols;
        return n;
    }
    moves[n] = (Move){dst, src};
    return n + 1;
}

/* Bytes first .. first+bytes-1 of layer j's disk slab, as moves into its staging slot on the CPU tier. */
static int disk_part(Run *s, int j, int slot, size_t first, size_t bytes) {
    const Plan *p = s->plan;
    int n = 0, tensors = j < s->l ? NROLES : 1;
    for (int i = 0; i < tensors; i++) {
        const WeightPlace *place = j < s->l ? &p->weight[j][p->slab_order[j][i]] : &p->global[p->head];
        Tensor src = place->home;
        if (src.tier != TIER_DISK) continue;
        size_t begin = j < s->l ? place->slab_offset - p->cpu_slab[j] : 0;
        size_t size = (size_t)src.rows * src.cols * (src.type == U8 ? 1 : 2);
        if (src.type == U8) src.type = F16; /* bytes, two at a time */
        size_t from = first > begin ? first - begin : 0, to = first + bytes < begin + size ? first + bytes - begin : size;
        if (first + bytes <= begin || from >= to) continue;
        src.rows = 1, src.cols = (int)((to - from) / 2), src.ld = src.cols;
        src.offset += from / 2 * type_bytes(src.type);
        n = add_piece(s->moves, n, view(TIER_CPU, F16, p->disk_staging[slot] + begin + from, 1, src.cols), src);
    }
    return n;
}

/* The k-th of K parts of layer j, into next's staging slot. What rests on disk passes through the CPU tier. */
static void load_part(Run *s, int j, int k, int K) {
    const Plan *p = s->plan;
    size_t cpu = p->cpu_slab[j], disk = p->disk_slab[j];
    if (!cpu && !disk) return;
    if (!k) { /* slots alternate among the layers that stream at all */
        s->next.slot = (int)(s->streamed++ % 2);
        s->next.disk_free = s->slot_raised[s->next.slot];
    }
    int slot = s->next.slot, n = 0;
    size_t gpu_slot = p->staging[slot], cpu_slot = p->disk_staging[slot];
    size_t c0 = cpu / 64 * k / K * 64, c1 = cpu / 64 * (k + 1) / K * 64; /* equal parts, cut at whole lines */
    size_t d0 = disk / 64 * k / K * 64, d1 = disk / 64 * (k + 1) / K * 64;
    Op op = new_op(s, W_LOAD, WEIGHT, j, k);
    after(&op, s->slot_used[slot]);
    Move up[2];
    if (c1 > c0)
        up[n++] = (Move){view(TIER_GPU, F16, gpu_slot + c0, 1, (int)((c1 - c0) / 2)),
                         view(TIER_CPU, F16, p->cpu_slab_offset[j] + c0, 1, (int)((c1 - c0) / 2))};
    if (d1 > d0) {
        Op read = new_op(s, W_READ, WEIGHT, j, k);
        after(&read, s->next.disk_free);
        int pieces = disk_part(s, j, slot, d0, d1 - d0);
        after(&op, posted(s, s->device->copy(s->device, &read, s->moves, pieces)));
        up[n++] = (Move){view(TIER_GPU, F16, gpu_slot + cpu + d0, 1, (int)((d1 - d0) / 2)),
                         view(TIER_CPU, F16, cpu_slot + d0, 1, (int)((d1 - d0) / 2))};
    }
    if (n) s->next.loaded = posted(s, s->device->copy(s->device, &op, up, n));
    if (d1 > d0) s->slot_raised[slot] = s->next.loaded;
}

/* Layer j's tensors where they are while it computes. */
static void layer_weights(const Run *s, int j, Tensor w[NROLES]) {
    for (int r = 0; r < NROLES; r++) {
        const WeightPlace *place = &s->plan->weight[j][r];
        w[r] = place->home;
        if (w[r].tier == TIER_GPU) continue;
        w[r] = view(TIER_GPU, w[r].type == U8 ? U8 : F16, s->plan->staging[s->now.slot] + place->slab_offset, w[r].rows,
                    w[r].cols);
        w[r].quant = place->home.quant;
    }
}

/* Packed matrices become F16 where the device wants them so: once a layer and sweep, before its first batch. Those of each
 * half on the lane of that half, so that it has done with the layer before. */
static void unpack_weights(Run *s, int j, int k, Tensor w[NROLES]) {
    const Plan *p = s->plan;
    for (int r = 0; r < NROLES && p->unpacked_bytes; r++) {
        if (w[r].type != U8) continue;
        int rows, cols;
        opt_role_shape(&p->config, (Role)r, &rows, &cols);
        Tensor packed = w[r];
        w[r] = view(TIER_GPU, F16, p->unpacked + p->unpacked_at[r], rows, cols);
        if (s->unpacked) continue;
        Op op = new_op(s, r < O_W ? PROJECT : FINISH, WEIGHT, j, k);
        after(&op, s->now.loaded);
        posted(s, s->device->unpack(s->device, &op, w[r], packed));
    }
    s->unpacked = true;
}

static Tensor head_weights(const Run *s) {
    Tensor head = s->plan->global[s->plan->head].home;
    if (head.tier == TIER_GPU) return head;
    return view(TIER_GPU, F16, s->plan->staging[s->now.slot], head.rows, head.cols);
}

// ---------------------------------------------------------------------------------------------------------------
// KV pages of a batch
// ---------------------------------------------------------------------------------------------------------------

/* Gives every sequence of the batch the pages for this sweep's tokens, page by page across the batch, so that what is taken
 * together lies together. */
static void grow_pages(Run *s, Batch *b) {
    int page = s->plan->policy.page_tokens;
    for (bool grew = true; grew;) {
        grew = false;
        for (int r = 0; r < b->nseq; r++) {
            Sequence *q = b->seq[r];
            if (q->npages >= pages_for(q->s + q->generated, page)) continue;
            q->pages[q->npages++] = pool_take(&s->pool[q->kv]);
            grew = true;
        }
    }
}

static int by_page(const void *a, const void *b) { return ((const Staged *)a)->page - ((const Staged *)b)->page; }

/* Lists the pages of one tier that attention will want elsewhere, and writes their places in staging, from base on, into
 * the table. */
static void stage_pages(Run *s, Batch *b, Tier tier, int base, int32_t *table) {
    Staged *list = b->staged[tier];
    int n = 0;
    for (int r = 0; r < b->nseq; r++) {
        const Sequence *q = b->seq[r];
        if (q->kv != tier) continue;
        for (int e = 0; e < q->npages; e++)
            list[n++] = (Staged){q->pages[e], e * s->plan->policy.page_tokens < q->s + q->generated - 1};
    }
    qsort(list, n, sizeof *list, by_page);
    for (int r = 0; r < b->nseq; r++) {
        const Sequence *q = b->seq[r];
        if (q->kv != tier) continue;
        for (int e = 0; e < q->npages; e++) {
            Staged key = {q->pages[e], false}, *found = bsearch(&key, list, n, sizeof *list, by_page);
            table[(size_t)r * s->plan->max_pages + e] = base + (int)(found - list);
        }
    }
    b->nstaged[tier] = n;
}

/* Moves the listed pages that hold past tokens, runs of neighbours as one: from src, by page index if src is their home and
 * by place if it is staging, to dst, by place from base on. */
static int page_moves(Run *s, const PageTable *dst, int base, const PageTable *src, bool home, const Staged *list, int n) {
    int moves = 0, page = src->page_tokens;
    for (int i = 0, run; i < n; i += run) {
        run = 1;
        if (!list[i].past) continue;
        while (i + run < n && list[i + run].past && (!home || list[i + run].page == list[i].page + run)) run++;
        int from = (home ? list[i].page : i) * page, to = (base + i) * page;
        s->moves[moves++] = (Move){tensor_rows(dst->k, to, run * page), tensor_rows(src->k, from, run * page)};
        if (is_sparse(&s->plan->policy)) continue; /* of V only what is chosen */
        s->moves[moves++] = (Move){tensor_rows(dst->v, to, run * page), tensor_rows(src->v, from, run * page)};
    }
    return moves;
}

// ---------------------------------------------------------------------------------------------------------------
// A batch enters a sweep: its new tokens, its rows, its tables
// ---------------------------------------------------------------------------------------------------------------

static void end_sweep(Run *s) {
    double t = s->device->now(s->device), took = t - s->swept_at;
    s->swept_at = t;
    *(s->prefill_sweep ? &s->stats->prefill_s : &s->stats->decode_s) += took;
    s->stats->total_s += took;
    s->stats->sweeps++, s->stats->prefill_sweeps += s->prefill_sweep;
    if (s->listener->sweep) s->listener->sweep(s->listener->ctx, s->stats->sweeps, s->stats->generated);
}

/* One new token of a sequence, or in a scored task (id -1) the given one, which never ends it. Returns whether the sequence
 * goes on; if not, its pages are free again. */
static bool take_token(Run *s, Sequence *q, int32_t id) {
    const Listener *to = s->listener;
    bool eos = id >= 0 && id == s->plan->config.eos;
    if (s->task->scored) id = s->task->prompts[q->prompt].ids[q->s + q->generated];
    q->tokens[q->generated++] = id;
    s->stats->generated++;
    if (!s->prefill_sweep) s->stats->decoded++;
    int n = q->generated - eos;
    bool stop = eos || (to->token && to->token(to->ctx, q->prompt, q->tokens, n));
    if (!stop && q->generated < q->n) return true;
    for (int e = 0; e < q->npages; e++) pool_give(&s->pool[q->kv], q->pages[e]);
    q->npages = 0;
    admission_leave(&s->admission, (int)(q - s->seqs), q->generated);
    if (to->done(to->ctx, q->prompt, q->tokens, n, stop ? FINISH_STOP : FINISH_LENGTH, s->err)) s->failed = true;
    return false;
}

/* Tells the scores of the newest step, sequence by sequence; of those that the head gave besides, nothing. */
static void tell_scores(Run *s, const Batch *b) {
    const Listener *to = s->listener;
    if (!to->scored) return;
    const float *logp = s->device->host(s->device, scores(s, b, TIER_CPU, F32));
    const int32_t *best = s->device->host(s->device, scores(s, b, TIER_CPU, I32));
    for (int r = 0, row = 0; r < b->nseq && logp; r++) {
        const Sequence *q = b->seq[r];
        for (int e = 1; e <= q->heads; e++, row++) {
            int at = q->s + q->generated - q->heads + e;
            if (at >= s->task->prompts[q->prompt].from) to->scored(to->ctx, q->prompt, at, logp[row], best[row]);
        }
    }
}

/* Waits for the batch's newest tokens, hands them out, and lets the sequences that have ended go. */
static void collect(Run *s, Batch *b) {
    if (!b->waiting || s->failed) return;
    b->waiting = false;
    if (s->device->wait(s->device, b->picked, s->err)) {
        s->failed = true;
        return;
    }
    int going = 0;
    const int32_t *ids = s->task->scored ? NULL : s->device->host(s->device, picked(s, b, TIER_CPU));
    if (s->task->scored) tell_scores(s, b);
    for (int r = 0; r < b->nseq && !s->failed; r++) {
        Sequence *q = b->seq[r];
        if (s->task->keep_logits && s->listener->logits) {
            const float *logits = s->device->host(s->device, cpu_logits(s, b, r, 1));
            if (logits) s->listener->logits(s->listener->ctx, q->prompt, q->generated + 1, logits);
        }
        if (take_token(s, q, ids ? ids[r] : -1)) b->seq[going++] = q;
    }
    b->nseq = going;
    if (--s->uncollected == 0) end_sweep(s);
}

/* Counts rows and their tiers, lays the views over the batch's block of tables. */
static void lay_out(Run *s, Batch *b, Tables *t, Tier side) {
    const Plan *p = s->plan;
    size_t at = p->tables[side] + (2 * (b - s->batch) + s->i % 2) * p->table_bytes, rows = (size_t)p->max_rows * 4,
           seqs = (size_t)p->max_seqs * 4;
    t->all = view(side, I32, at, 1, (int)(p->table_bytes / 4));
    t->ids = view(side, I32, at, 1, b->rows);
    t->positions = view(side, I32, at + rows, 1, b->rows);
    t->row_seq = view(side, I32, at + 2 * rows, 1, b->rows);
    t->row_token = view(side, I32, at + 3 * rows, 1, b->rows);
    at += 4 * rows;
    t->len = view(side, I32, at, 1, b->nseq);
    t->prompt = view(side, I32, at + seqs, 1, b->nseq);
    t->at = view(side, I32, at + 2 * seqs, 1, b->nseq);
    t->start = view(side, I32, at + 3 * seqs, 1, b->nseq + 1);
    at += 4 * seqs + 4;
    t->pages = view(side, I32, at, b->nseq, p->max_pages);
    t->staged = view(side, I32, at + seqs * p->max_pages, b->nseq, p->max_pages);
    at += 2 * seqs * p->max_pages;
    t->head = view(side, I32, at, 1, b->heads);
    t->target = view(side, I32, at + (size_t)p->head_rows * 4, 1, s->task->scored ? b->heads : 0);
}

static void fill_row(Run *s, Batch *b, int row, int r, int token) {
    const Sequence *q = b->seq[r];
    Device *d = s->device;
    ((int32_t *)d->host(d, b->cpu.ids))[row] =
        token < q->s ? s->task->prompts[q->prompt].ids[token] : q->tokens[token - q->s];
    ((int32_t *)d->host(d, b->cpu.positions))[row] = token + 2;
    ((int32_t *)d->host(d, b->cpu.row_seq))[row] = r;
    ((int32_t *)d->host(d, b->cpu.row_token))[row] = token;
}

/* Lists the rows that the head wants, and the tokens that are given behind them. */
static void fill_head(Run *s, Batch *b) {
    Device *d = s->device;
    int32_t *head = d->host(d, b->cpu.head), *target = s->task->scored ? d->host(d, b->cpu.target) : NULL;
    for (int r = 0, n = 0, row = 0; r < b->nseq; r++) {
        const Sequence *q = b->seq[r];
        row += b->prefill ? q->s : 1; /* the end of the sequence's rows */
        for (int e = q->heads; e > 0; e--, n++) {
            head[n] = row - e;
            if (target) target[n] = s->task->prompts[q->prompt].ids[q->s + q->generated - e + 1];
        }
    }
}

/* Writes the tables of this sweep, row by row and sequence by sequence. */
static void fill_tables(Run *s, Batch *b) {
    Device *d = s->device;
    int32_t *start = d->host(d, b->cpu.start), *len = d->host(d, b->cpu.len);
    int32_t *prompt = d->host(d, b->cpu.prompt), *at = d->host(d, b->cpu.at), *pages = d->host(d, b->cpu.pages);
    int32_t *staged = d->host(d, b->cpu.staged);
    int row = 0;
    for (int r = 0; r < b->nseq; r++) {
        const Sequence *q = b->seq[r];
        start[r] = row;
        int tokens = q->s + q->generated;
        for (int token = b->prefill ? 0 : tokens - 1; token < tokens; token++) fill_row(s, b, row++, r, token);
        len[r] = tokens;
        prompt[r] = q->prompt;
        at[r] = tokens;
        for (int e = 0; e < q->npages; e++) pages[(size_t)r * s->plan->max_pages + e] = q->pages[e];
    }
    start[b->nseq] = row;
    fill_head(s, b);
    b->nstaged[TIER_CPU] = b->nstaged[TIER_DISK] = 0;
    if (b->prefill) return; /* prefill attends to what it has just computed */
    bool delegated = s->plan->policy.cpu_attention;
    if (!delegated) stage_pages(s, b, TIER_CPU, 0, staged);
    stage_pages(s, b, TIER_DISK, delegated ? 0 : b->nstaged[TIER_CPU], staged);
}

/* Those that have prefilled elsewhere take their places among the others, in the order of seats. */
static void take_in(Batch *b) {
    for (int n = 0; n < b->njoining; n++) {
        int at = b->nseq++;
        for (; at > 0 && b->seq[at - 1] > b->joining[n]; at--) b->seq[at] = b->seq[at - 1];
        b->seq[at] = b->joining[n];
    }
    b->njoining = 0;
}

/* The batch's part in this sweep begins: what the sweep before chose for it is known now, and who has ended is out. */
static void begin(Run *s, Batch *b, int k) {
    collect(s, b);
    take_in(b);
    /* stores of the sweep before last (of the last one, after a pause) read the tables that this one writes */
    for (int e = 0; e < 2 && !s->failed; e++) {
        if (s->device->wait(s->device, b->tables_read[s->i % 2][e], s->err)) s->failed = true;
        if (b->sweep != s->i - 1 && s->device->wait(s->device, b->cache_stored[e][s->l - 1], s->err)) s->failed = true;
        b->tables_read[(s->i + 1) % 2][e] = b->cache_stored[e][s->l - 1];
    }
    b->sweep = s->i;
    b->rows = b->heads = 0;
    b->act_in = b->act_out = b->cache_in = -1;
    if (!b->nseq || s->failed) return;
    memset(b->kv_seqs, 0, sizeof b->kv_seqs), memset(b->kv_rows, 0, sizeof b->kv_rows);
    memset(b->act_seqs, 0, sizeof b->act_seqs), memset(b->act_rows, 0, sizeof b->act_rows);
    memset(b->act_heads, 0, sizeof b->act_heads);
    for (int r = 0; r < b->nseq; r++) {
        Sequence *q = b->seq[r];
        int rows = b->prefill ? q->s : 1;
        b->rows += rows;
        b->kv_seqs[q->kv]++, b->kv_rows[q->kv] += rows;
        q->heads = b->prefill ? head_rows(s->task, &s->task->prompts[q->prompt]) : 1;
        b->heads += q->heads;
        b->act_seqs[q->act]++, b->act_rows[q->act] += rows, b->act_heads[q->act] += q->heads;
        q->posted = q->generated + 1;
    }
    if (b->prefill) s->stats->prefill_tokens += b->rows;
    grow_pages(s, b);
    lay_out(s, b, &b->cpu, TIER_CPU);
    lay_out(s, b, &b->gpu, TIER_GPU);
    fill_tables(s, b);
    Op op = new_op(s, C_LOAD, OTHER, 0, k);
    b->tables_up = posted(s, s->device->copy(s->device, &op, &(Move){b->gpu.all, b->cpu.all}, 1));
    b->waiting = true;
    s->began++;
}

// ---------------------------------------------------------------------------------------------------------------
// The calls of Figure 4
// ---------------------------------------------------------------------------------------------------------------

static long square_number(const Run *s, int j, int k) { return s->base + (long)j * s->K + k; }
static bool all_on_gpu(const Batch *b) { return b->act_rows[TIER_GPU] == b->rows; }

/* Part k of the next layer's weights. Behind the head comes layer 0 of the next sweep, if there is one. */
static void load_weight(Run *s, int j, int k) {
    bool wraps = j > s->l;
    if (wraps && !more_to_come(s)) return;
    if (wraps) s->next_is_layer0 = true;
    load_part(s, wraps ? 0 : j, k, s->K);
}

/* The rows of the hidden state that rest on one tier, between `near` (their home, or staging for it) and `state`.
 * head_only: only the last rows of each sequence that the head wants; head_state: state has just those. store says which
 * way. */
static int act_moves(Run *s, const Batch *b, Tier tier, bool head_only, Tensor near, Tensor state, bool head_state,
                     bool store) {
    int first_row = 0, first_seq = 0, head = 0, n = 0;
    for (int t = 0; t < (int)tier; t++) first_row += b->act_rows[t], first_seq += b->act_seqs[t], head += b->act_heads[t];
    if (!head_only || !b->prefill) {
        Tensor rows = tensor_rows(state, head_state ? head : first_row, b->act_rows[tier]);
        near.rows = b->act_rows[tier];
        s->moves[n++] = store ? (Move){near, rows} : (Move){rows, near};
        return n;
    }
    int row = 0;
    for (int r = first_seq; r < first_seq + b->act_seqs[tier]; r++) {
        int heads = b->seq[r]->heads;
        row += b->seq[r]->s;
        Tensor some = tensor_rows(near, row - heads, heads);
        Tensor others = tensor_rows(state, head_state ? head : first_row + row - heads, heads);
        s->moves[n++] = store ? (Move){some, others} : (Move){others, some};
        head += heads;
    }
    return n;
}

static Tensor act_staging(const Run *s, const Batch *b, int way, long sq) {
    size_t slot = (size_t)s->plan->max_act_rows[TIER_DISK] * s->plan->config.h1 * type_bytes(s->plan->act_type);
    return view(TIER_CPU, s->plan->act_type, s->plan->act_staging[way] + (sq % 2) * slot, b->act_rows[TIER_DISK],
                s->plan->config.h1);
}

static void store_activation(Run *s, int j, int k) {
    Batch *b = at_square(s, &j, &k);
    if (!b || j == s->l || !b->nseq) return;
    long sq = square_number(s, j, k);
    bool head_only = j + 1 == s->l;
    b->act_out = j;
    if (all_on_gpu(b)) return; /* it was computed in place */
    Tensor x = hidden(s, b, sq);
    if (b->act_rows[TIER_GPU]) {
        Op op = new_op(s, FINISH, ACTIVATION, j, k);
        int n = act_moves(s, b, TIER_GPU, false, act_home(s, b, TIER_GPU), x, false, true);
        b->finished = posted(s, s->device->copy(s->device, &op, s->moves, n));
    }
    Op op = new_op(s, STORE, ACTIVATION, j, k);
    after(&op, b->finished);
    if (b->act_rows[TIER_CPU]) {
        int n = act_moves(s, b, TIER_CPU, head_only, act_home(s, b, TIER_CPU), x, false, true);
        b->act_stored[0] = posted(s, s->device->copy(s->device, &op, s->moves, n));
    }
    if (b->act_rows[TIER_DISK]) {
        Tensor staging = act_staging(s, b, 1, sq);
        after(&op, s->act_out_slot[sq % 2]);
        int n = act_moves(s, b, TIER_DISK, head_only, staging, x, false, true);
        b->act_stored[0] = posted(s, s->device->copy(s->device, &op, s->moves, n));
        Op down = new_op(s, D_WRITE, ACTIVATION, j, k);
        after(&down, b->act_stored[0]);
        for (int m = 0; m < n; m++) { /* the same rows, from staging to the file */
            Tensor from = s->moves[m].dst, home = act_home(s, b, TIER_DISK);
            home = tensor_rows(home, (int)((from.offset - staging.offset) / (home.ld * type_bytes(home.type))), from.rows);
            s->moves[m] = (Move){home, from};
        }
        b->act_stored[1] = s->act_out_slot[sq % 2] = posted(s, s->device->copy(s->device, &down, s->moves, n));
    }
    s->ws[sq % s->plan->nws].by[0] = b->finished;
    s->ws[sq % s->plan->nws].by[1] = b->act_stored[0];
}

static void load_activation(Run *s, int j, int k) {
    Batch *b = at_square(s, &j, &k);
    if (!b || !j || b->sweep != s->i || !b->nseq || all_on_gpu(b) || b->act_in == j) return;
    if (b->act_out != j - 1) return; /* alone in flight: it is still being computed, and loads behind its own store */
    b->act_in = j;
    long sq = square_number(s, j, k);
    bool head = j == s->l;
    Tensor state = head ? ws_head_x(s, sq, b->heads) : hidden(s, b, sq);
    Op op = new_op(s, C_LOAD, ACTIVATION, j, k);
    after_release(&op, &s->ws[sq % s->plan->nws]);
    if (b->act_rows[TIER_CPU]) {
        after(&op, b->act_stored[0]);
        int n = act_moves(s, b, TIER_CPU, head, act_home(s, b, TIER_CPU), state, head, false);
        b->act_loaded = posted(s, s->device->copy(s->device, &op, s->moves, n));
    }
    if (b->act_rows[TIER_DISK]) {
        Tensor staging = act_staging(s, b, 0, sq), home = act_home(s, b, TIER_DISK);
        Op read = new_op(s, C_READ, ACTIVATION, j, k);
        after(&read, s->act_in_slot[sq % 2]);
        after(&read, b->act_stored[1]);
        int n = act_moves(s, b, TIER_DISK, head, home, state, head, false);
        for (int m = 0; m < n; m++) { /* from the file to the same rows of staging */
            Tensor from = s->moves[m].src;
            int row = (int)((from.offset - home.offset) / (home.ld * type_bytes(home.type)));
            s->moves[m] = (Move){tensor_rows(staging, row, from.rows), from};
        }
        after(&op, posted(s, s->device->copy(s->device, &read, s->moves, n)));
        n = act_moves(s, b, TIER_DISK, head, staging, state, head, false);
        b->act_loaded = s->act_in_slot[sq % 2] = posted(s, s->device->copy(s->device, &op, s->moves, n));
    }
}

/* Off the GPU: the sequences whose KV is on the CPU or on disk; they come last. */
static int off_rows(const Batch *b) { return b->rows - b->kv_rows[TIER_GPU]; }
static int off_seqs(const Batch *b) { return b->nseq - b->kv_seqs[TIER_GPU]; }

static Tensor cpu_kvrow(const Run *s, const Batch *b, long sq) {
    return kv_rows(s, TIER_CPU, s->plan->cpu_kvrow, sq, s->plan->off_rows, off_rows(b));
}

/* Puts new tokens' k and v, rows first .. first+n-1 of the batch, into the pages of a table. */
static Event append(Run *s, Op *op, const Tables *t, const PageTable *table, Tensor kv, int first, int n) {
    return posted(s, s->device->append(s->device, op, table, kv, tensor_cols(t->row_seq, first, n),
                                       tensor_cols(t->row_token, first, n)));
}

/* The new k and v of sequences whose pages are on the CPU or on disk go home. */
static void store_cache(Run *s, int j, int k) {
    Batch *b = at_square(s, &j, &k);
    if (!b || j == s->l || !b->nseq || !off_rows(b)) return;
    long sq = square_number(s, j, k);
    bool delegated = s->plan->policy.cpu_attention && !b->prefill; /* then they came down with the queries */
    int gpu = b->kv_rows[TIER_GPU], cpu = b->kv_rows[TIER_CPU], disk = b->kv_rows[TIER_DISK];
    Tensor rows = cpu_kvrow(s, b, sq);
    Release *release = &s->ws[sq % s->plan->nws];
    if (!delegated) {
        Op op = new_op(s, STORE, CACHE, j, k);
        after(&op, b->projected);
        Move m = {rows, tensor_rows(ws_kv_rows(s, sq, b->rows), gpu, off_rows(b))};
        b->down = release->by[1] = posted(s, s->device->copy(s->device, &op, &m, 1));
    }
    if (cpu && !delegated) {
        Op op = new_op(s, ATTEND, CACHE, j, k);
        after(&op, b->down);
        after(&op, b->cache_loaded[0][j % 2]); /* which reads the very page that this adds to */
        PageTable home = pool_table(s, TIER_CPU, j, b->cpu.pages, b->cpu.len);
        b->cache_stored[0][j] = release->by[2] = append(s, &op, &b->cpu, &home, tensor_rows(rows, 0, cpu), gpu, cpu);
    }
    if (disk) {
        Op op = new_op(s, D_WRITE, CACHE, j, k);
        after(&op, b->down);
        after(&op, b->cache_loaded[1][j % 2]);
        PageTable home = pool_table(s, TIER_DISK, j, b->cpu.pages, b->cpu.len);
        b->cache_stored[1][j] = release->by[3] =
            append(s, &op, &b->cpu, &home, tensor_rows(rows, cpu, disk), gpu + cpu, disk);
    }
}

/* The past of sequences whose pages must come nearer: the disk's to the CPU, and all to the GPU where it attends. */
static void load_cache(Run *s, int j, int k) {
    Batch *b = at_square(s, &j, &k);
    if (!b || j == s->l || b->sweep != s->i || !b->nseq || b->prefill || b->cache_in >= j) return;
    if (b->cache_in < j - 1) load_cache(s, j - 1, k); /* alone in flight: asked for two layers ahead before the first */
    b->cache_in = j;
    bool delegated = s->plan->policy.cpu_attention;
    long sq = square_number(s, j, k);
    int cpu = b->nstaged[TIER_CPU], disk = b->nstaged[TIER_DISK];
    PageTable on_gpu = {.page_tokens = 0}, on_cpu = {.page_tokens = 0};
    Op up = new_op(s, C_LOAD, CACHE, j, k);
    after(&up, s->kv_slot[sq % 2]);
    if (!delegated && cpu + disk) on_gpu = staged_table(s, 0, sq, b->gpu.staged, b->gpu.len);
    if (!delegated && cpu) {
        PageTable home = pool_table(s, TIER_CPU, j, b->cpu.pages, b->cpu.len);
        after(&up, b->cache_stored[0][j]);
        int n = page_moves(s, &on_gpu, 0, &home, true, b->staged[TIER_CPU], cpu);
        b->cache_loaded[0][j % 2] = posted(s, s->device->copy(s->device, &up, s->moves, n));
    }
    if (!disk) return;
    on_cpu = staged_table(s, 1, sq, b->cpu.staged, b->cpu.len);
    PageTable home = pool_table(s, TIER_DISK, j, b->cpu.pages, b->cpu.len);
    Op read = new_op(s, C_READ, CACHE, j, k);
    after(&read, s->disk_kv_slot[sq % 2]);
    after(&read, b->cache_stored[1][j]);
    int n = page_moves(s, &on_cpu, 0, &home, true, b->staged[TIER_DISK], disk);
    b->cache_loaded[1][j % 2] = posted(s, s->device->copy(s->device, &read, s->moves, n));
    if (delegated) return;
    after(&up, b->cache_loaded[1][j % 2]);
    n = page_moves(s, &on_gpu, cpu, &on_cpu, false, b->staged[TIER_DISK], disk);
    b->cache_loaded[0][j % 2] = s->disk_kv_slot[sq % 2] = posted(s, s->device->copy(s->device, &up, s->moves, n));
}

// ---------------------------------------------------------------------------------------------------------------
// compute(j, k): project, attend, finish
// ---------------------------------------------------------------------------------------------------------------

/* Token rows are gathered where the table rests; only they move. */
static Tensor gather_tokens(Run *s, Batch *b, long sq, int k, Tensor x) {
    const Plan *p = s->plan;
    Tensor table = p->global[TOK_EMBED].home;
    if (table.tier == TIER_GPU) return (Tensor){.rows = 0};
    int embed = p->config.embed;
    Tensor rows = cpu_ws(s, p->gathered, p->act_type, sq, p->max_rows, b->rows, embed);
    Tensor arrive = embed == p->config.h1 ? x : workspace(s, p->embedded, p->act_type, sq, p->max_rows, b->rows, embed);
    Op gather = new_op(s, table.tier == TIER_DISK ? C_READ : ATTEND, OTHER, 0, k), up = new_op(s, C_LOAD, OTHER, 0, k);
    after_release(&gather, &s->ws[sq % p->nws]);
    after(&up, posted(s, s->device->embed(s->device, &gather, rows, table, b->cpu.ids, false)));
    b->gathered = posted(s, s->device->copy(s->device, &up, &(Move){arrive, rows}, 1));
    return arrive;
}

static void embed(Run *s, Batch *b, long sq, int k, Tensor x) {
    const Plan *p = s->plan;
    Tensor global[NGLOBALS], tokens = gather_tokens(s, b, sq, k, x), scratch = {.rows = 0};
    for (int g = 0; g < NGLOBALS; g++) global[g] = p->global[g].home;
    if (p->config.embed != p->config.h1)
        scratch = workspace(s, p->embedded, p->act_type, sq, p->max_rows, b->rows, p->config.embed);
    Op op = new_op(s, PROJECT, OTHER, 0, k);
    after_release(&op, &s->ws[sq % p->nws]);
    after(&op, b->tables_up);
    if (tokens.rows) after(&op, b->gathered);
    posted(s, opt_embed(s->device, op, &p->config, global, x, tokens, b->gpu.ids, b->gpu.positions, scratch));
}

static void project(Run *s, Batch *b, int j, int k, const Tensor w[NROLES]) {
    const Plan *p = s->plan;
    long sq = square_number(s, j, k);
    Tensor x = hidden(s, b, sq), norm = view(TIER_GPU, p->act_type, p->norm, p->chunk, p->config.h1);
    if (!j) embed(s, b, sq, k, x);
    Op op = new_op(s, PROJECT, OTHER, j, k);
    after_release(&op, &s->ws[sq % p->nws]);
    after(&op, b->finished);
    after(&op, b->act_loaded);
    after(&op, s->now.loaded);
    if (j && !all_on_gpu(b) && b->act_rows[TIER_GPU]) {
        Op copy = op;
        copy.kind = ACTIVATION;
        int n = act_moves(s, b, TIER_GPU, false, act_home(s, b, TIER_GPU), x, false, false);
        posted(s, s->device->copy(s->device, &copy, s->moves, n));
    }
    b->projected =
        posted(s, opt_project(s->device, op, &p->config, w, ws_q(s, sq, b->rows), ws_kv(s, sq, b->rows), x, norm));
    if (p->policy.cache_quant.bits) {
        Op pack = new_op(s, PROJECT, CACHE, j, k);
        Tensor rows = ws_kv_rows(s, sq, b->rows);
        b->projected = posted(s, s->device->pack(s->device, &pack, rows, ws_kv(s, sq, b->rows), p->config.nh));
    }
    if (b->kv_rows[TIER_GPU]) {
        Op store = new_op(s, PROJECT, CACHE, j, k);
        PageTable home = pool_table(s, TIER_GPU, j, b->gpu.pages, b->gpu.len);
        int rows = b->kv_rows[TIER_GPU];
        b->projected = append(s, &store, &b->gpu, &home, ws_kv_rows(s, sq, rows), 0, rows);
    }
}

/* Sparse attention (section 5): K is read whole, then V of the chosen tokens. home: where V is on disk, of which that alone
 * comes to the table's pages; NULL: it is in them. */
static Event attend_sparse(Run *s, Op *op, PageTable table, const PageTable *home, Tensor o, Tensor q) {
    const Plan *p = s->plan;
    const double sparsity = p->policy.sparsity;
    int side = op->lane == ATTEND, wide = p->config.nh * p->most_chosen;
    Tensor tokens = view((Tier)side, I32, p->chosen[side], q.rows, wide);
    Tensor weights = view((Tier)side, F32, p->weighing[side], q.rows, wide);
    Event selected = posted(s, s->device->select(s->device, op, tokens, weights, q, &table, sparsity));
    if (home) {
        Op fetch = *op;
        fetch.lane = C_READ, fetch.nafter = 0;
        after(&fetch, selected);
        after(op, posted(s, s->device->fetch(s->device, &fetch, &table, home, tokens, sparsity)));
    }
    return posted(s, s->device->weigh(s->device, op, o, tokens, weights, &table, sparsity));
}

/* Attention of sequences first .. first+n-1 of a decoding batch over one table, which holds all the batch's sequences. */
static Event attend_group(Run *s, Op *op, PageTable table, Tensor o, Tensor q, int first, int n) {
    table.pages = tensor_rows(table.pages, first, n);
    table.len = tensor_cols(table.len, first, n);
    if (is_sparse(&s->plan->policy)) return attend_sparse(s, op, table, NULL, o, q);
    return posted(s, s->device->attend(s->device, op, o, q, &table));
}

/* The same of those whose pages are on disk and staged on the CPU: with sparse attention, their K alone. */
static Event attend_disk(Run *s, Op *op, Batch *b, int j, PageTable near, Tensor o, Tensor q) {
    int first = b->nseq - b->kv_seqs[TIER_DISK], n = b->kv_seqs[TIER_DISK];
    if (!is_sparse(&s->plan->policy)) return attend_group(s, op, near, o, q, first, n);
    PageTable home = pool_table(s, TIER_DISK, j, tensor_rows(b->cpu.pages, first, n), tensor_cols(b->cpu.len, first, n));
    near.pages = tensor_rows(near.pages, first, n), near.len = tensor_cols(near.len, first, n);
    return attend_sparse(s, op, near, &home, o, q);
}

/* Computation delegation (section 4.2): queries and the new k, v go down, the CPU attends where the pages are, the result
 * comes up. */
static void attend_on_cpu(Run *s, Batch *b, int j, int k, Tensor q, Tensor o) {
    const Plan *p = s->plan;
    long sq = square_number(s, j, k);
    int gpu = b->kv_seqs[TIER_GPU], cpu = b->kv_seqs[TIER_CPU], disk = b->kv_seqs[TIER_DISK], h1 = p->config.h1;
    Tensor down_q = cpu_ws(s, p->cpu_q, p->act_type, sq, p->off_seqs, cpu + disk, h1), kv = cpu_kvrow(s, b, sq);
    Tensor up_o = cpu_ws(s, p->cpu_o, p->act_type, sq, p->off_seqs, cpu + disk, h1);
    Op op = new_op(s, A_DOWN, CACHE, j, k);
    after(&op, b->projected);
    Move down[] = {{down_q, tensor_rows(q, gpu, cpu + disk)},
                   {kv, tensor_rows(ws_kv_rows(s, sq, b->rows), gpu, cpu + disk)}};
    b->down = posted(s, s->device->copy(s->device, &op, down, 2));
    op = new_op(s, ATTEND, CACHE, j, k);
    after(&op, b->down);
    Event attended = {ATTEND, 0};
    if (cpu) {
        PageTable home = pool_table(s, TIER_CPU, j, b->cpu.pages, b->cpu.len);
        append(s, &op, &b->cpu, &home, tensor_rows(kv, 0, cpu), gpu, cpu);
        attended = attend_group(s, &op, home, tensor_rows(up_o, 0, cpu), tensor_rows(down_q, 0, cpu), gpu, cpu);
        b->cache_stored[0][j] = attended;
    }
    if (disk) {
        PageTable near = staged_table(s, 1, sq, b->cpu.staged, b->cpu.len);
        after(&op, b->cache_loaded[1][j % 2]);
        append(s, &op, &b->cpu, &near, tensor_rows(kv, cpu, disk), gpu + cpu, disk);
        attended = attend_disk(s, &op, b, j, near, tensor_rows(up_o, cpu, disk), tensor_rows(down_q, cpu, disk));
        s->disk_kv_slot[sq % 2] = attended;
    }
    op = new_op(s, A_UP, CACHE, j, k);
    after(&op, attended);
    b->attended = posted(s, s->device->copy(s->device, &op, &(Move){tensor_rows(o, gpu, cpu + disk), up_o}, 1));
    s->ws[sq % p->nws].by[2] = attended;
}

static void attend(Run *s, Batch *b, int j, int k) {
    const Plan *p = s->plan;
    long sq = square_number(s, j, k);
    Tensor q = ws_q(s, sq, b->rows), o = ws_o(s, sq, b->rows);
    int gpu = b->kv_seqs[TIER_GPU], off = off_seqs(b);
    Op op = new_op(s, FINISH, CACHE, j, k);
    after(&op, b->projected);
    if (b->prefill) {
        posted(s, s->device->attend_prefill(s->device, &op, o, q, ws_kv(s, sq, b->rows), b->gpu.start, p->config.nh));
        return;
    }
    if (off && p->policy.cpu_attention) attend_on_cpu(s, b, j, k, q, o);
    if (gpu) {
        PageTable home = pool_table(s, TIER_GPU, j, b->gpu.pages, b->gpu.len);
        attend_group(s, &op, home, tensor_rows(o, 0, gpu), tensor_rows(q, 0, gpu), 0, gpu);
    }
    if (off && !p->policy.cpu_attention) {
        PageTable near = staged_table(s, 0, sq, b->gpu.staged, b->gpu.len);
        after(&op, b->cache_loaded[0][j % 2]);
        append(s, &op, &b->gpu, &near, tensor_rows(ws_kv_rows(s, sq, b->rows), gpu, off), gpu, off);
        s->kv_slot[sq % 2] = attend_group(s, &op, near, tensor_rows(o, gpu, off), tensor_rows(q, gpu, off), gpu, off);
    }
}

/* What a square used is free again after b->finished: its workspace, and for the last batch of a layer the slot of its
 * weights. */
static void square_done(Run *s, long sq, const Batch *b) {
    s->ws[sq % s->plan->nws].by[0] = b->finished;
    if (s->now.slot >= 0) s->slot_used[s->now.slot] = b->finished;
}

static void finish(Run *s, Batch *b, int j, int k, const Tensor w[NROLES]) {
    const Plan *p = s->plan;
    long sq = square_number(s, j, k);
    Tensor norm = view(TIER_GPU, p->act_type, p->norm2, p->chunk, p->config.h1);
    Tensor ffn = view(TIER_GPU, p->act_type, p->ffn, p->chunk, p->config.h2);
    Op op = new_op(s, FINISH, OTHER, j, k);
    after(&op, b->attended);
    b->finished = posted(s, opt_finish(s->device, op, &p->config, w, hidden(s, b, sq), ws_o(s, sq, b->rows), norm, ffn));
    square_done(s, sq, b);
}

/* Logits become the next token of each sequence; in a scored task, those of head rows from `first` on, the probability of
 * what is given and the greedy choice. */
static Event choose(Run *s, Batch *b, int k, Tensor logits, int first) {
    Op op = new_op(s, PROJECT, OTHER, s->l, k);
    int n = logits.rows;
    if (!s->task->scored)
        return posted(s, s->device->pick(s->device, &op, picked(s, b, TIER_GPU), logits, b->gpu.prompt, b->gpu.at,
                                         &s->task->sampling));
    Tensor logp = tensor_cols(scores(s, b, TIER_GPU, F32), first, n),
           best = tensor_cols(scores(s, b, TIER_GPU, I32), first, n);
    return posted(s, s->device->score(s->device, &op, logp, best, logits, tensor_cols(b->gpu.target, first, n)));
}

/* What has been chosen goes down, and the logits where they are wanted. */
static void bring_down(Run *s, Batch *b, int k, Tensor logits) {
    Op op = new_op(s, A_DOWN, OTHER, s->l, k);
    int n = 0;
    Move moves[2];
    after(&op, b->finished);
    if (s->task->scored) {
        moves[n++] = (Move){scores(s, b, TIER_CPU, F32), scores(s, b, TIER_GPU, F32)};
        moves[n++] = (Move){scores(s, b, TIER_CPU, I32), scores(s, b, TIER_GPU, I32)};
    } else {
        moves[n++] = (Move){picked(s, b, TIER_CPU), picked(s, b, TIER_GPU)};
        if (s->task->keep_logits) moves[n++] = (Move){cpu_logits(s, b, 0, b->nseq), logits};
    }
    b->picked = posted(s, s->device->copy(s->device, &op, moves, n));
    if (s->task->keep_logits) s->logits_free = b->picked;
}

/* Layer l: the rows that the head wants, the last of each sequence or in a scored task more, become logits, piece by piece.
 */
static void compute_head(Run *s, Batch *b, int k) {
    const Plan *p = s->plan;
    long sq = square_number(s, s->l, k);
    int resting = b->act_heads[TIER_GPU];
    Tensor x = ws_head_x(s, sq, b->heads), logits = {.rows = 0}, global[NGLOBALS];
    for (int g = 0; g < NGLOBALS; g++) global[g] = p->global[g].home;
    Op op = new_op(s, PROJECT, OTHER, s->l, k);
    after_release(&op, &s->ws[sq % p->nws]);
    after(&op, b->finished);
    after(&op, b->act_loaded);
    after(&op, s->now.loaded);
    if (resting) {
        Tensor rows = tensor_cols(b->gpu.head, 0, resting);
        posted(s, s->device->embed(s->device, &op, tensor_rows(x, 0, resting), act_home(s, b, TIER_GPU), rows, false));
    }
    after(&op, s->logits_free);
    for (int first = 0; first < b->heads; first += p->head_chunk) {
        int n = imin(p->head_chunk, b->heads - first);
        Tensor out = view(TIER_GPU, p->act_type, p->head_out, n, p->config.embed);
        logits = view(TIER_GPU, F32, p->logits, n, p->config.vocab);
        posted(s, opt_logits(s->device, op, &p->config, global, head_weights(s), logits, tensor_rows(x, first, n), out));
        b->finished = choose(s, b, k, logits, first);
        op.nafter = 0;
    }
    bring_down(s, b, k, logits);
    square_done(s, sq, b);
}

static void compute(Run *s, int j, int k) {
    Batch *b = s->flight[k];
    if (!j) begin(s, b, k);
    if (!b->nseq || s->failed) return;
    load_cache(s, j, k); /* for a batch that had no neighbour to ask in time */
    load_activation(s, j, k);
    if (j == s->l) {
        compute_head(s, b, k);
        return;
    }
    Tensor w[NROLES];
    layer_weights(s, j, w);
    unpack_weights(s, j, k, w);
    project(s, b, j, k, w);
    attend(s, b, j, k);
    finish(s, b, j, k, w);
}

/* Figure 4 waits for all devices here. DIFFERS: every op carries the events that it needs, so there is nothing left to wait
 * for; only an error ends the sweep. Without overlap each post has been waited for already. */
static bool synchronize(const Run *s) { return !s->failed; }

// ---------------------------------------------------------------------------------------------------------------
// The sweep, and admission between sweeps
// ---------------------------------------------------------------------------------------------------------------

/* The layer that has loaded beside the last one is the one to compute now. */
static void advance_weights(Run *s) {
    s->now = s->next;
    s->next = (LayerLoad){.slot = -1};
    s->unpacked = false;
}

static bool nobody_left(const Run *s) {
    for (int k = 0; k < s->K; k++)
        if (s->flight[k]->nseq) return false;
    return true;
}

/* One token for every batch in flight: Figure 4 from its second line on. */
static void sweep(Run *s) {
    if (!s->next_is_layer0) {
        s->streamed += s->streamed % 2; /* as the plan counts: a sweep begins with the first slot (where it matters) */
        load_part(s, 0, 0, 1);
    }
    s->next_is_layer0 = false;
    s->began = 0;
    for (int j = 0; j <= s->l; j++) {
        advance_weights(s);
        for (int k = 0; k < s->K; k++) {
            load_weight(s, j + 1, k);
            store_activation(s, j, k - 1);
            store_cache(s, j, k - 1);
            load_cache(s, j, k + 1);
            load_activation(s, j, k + 1);
            compute(s, j, k);
            if (!synchronize(s)) return;
        }
        if (nobody_left(s)) return; /* all have ended by themselves: known only now */
    }
    s->base += (long)(s->l + 1) * s->K;
    s->prefill_sweep = s->now_prefill;
    s->uncollected = s->began;
    s->i++;
}

/* The batch through which topups enter: they prefill together, and are in the batches of their seats from then on. */
static Batch *entrance(Run *s) { return &s->batch[s->plan->slots - 1]; }

static void fly(Run *s, Batch *b) {
    b->in_flight = true;
    s->flight[s->K++] = b;
}

static Event later(Event a, Event b) { return a.seq > b.seq ? a : b; }

/* Whoever has prefilled in the entrance moves on, and with them the events of their cache. */
static void leave_entrance(Run *s) {
    Batch *from = entrance(s);
    for (int r = 0; r < from->nseq; r++) {
        Sequence *q = from->seq[r];
        Batch *home = &s->batch[q->home];
        q->act = s->admission.seat[q - s->seqs].act;
        home->joining[home->njoining++] = q;
        for (int e = 0; e < 2; e++)
            for (int j = 0; j < s->l; j++)
                home->cache_stored[e][j] = later(home->cache_stored[e][j], from->cache_stored[e][j]);
        CHECK(home->in_flight); /* it was topped up because it had members */
    }
    from->nseq = 0;
}

/* The newest tokens of batches in which someone has all of them now, and of the entrance, are waited for; batches without
 * members are out. */
static void leave(Run *s) {
    int K = 0, flew = s->K;
    Batch *in = s->plan->policy.schedule == SCHEDULE_DIAGONAL ? entrance(s) : NULL;
    for (int k = 0; k < flew; k++) {
        Batch *b = s->flight[k];
        bool ends = b == in;
        for (int r = 0; r < b->nseq; r++) ends = ends || b->seq[r]->posted == b->seq[r]->n;
        if (ends) collect(s, b);
    }
    if (in && in->in_flight) leave_entrance(s);
    for (int k = 0; k < s->K; k++) {
        Batch *b = s->flight[k];
        b->in_flight = b->nseq || b->njoining;
        b->prefill = false;
        if (b->in_flight) s->flight[K++] = b;
    }
    s->K = K;
}

/* The sequence of a seat that has just been taken enters a batch. */
static void enter(Run *s, int seat, Batch *b) {
    const Seat *from = &s->admission.seat[seat];
    Sequence *q = &s->seqs[seat];
    const Prompt *prompt = &s->task->prompts[from->prompt];
    q->prompt = from->prompt, q->home = from->k, q->kv = from->kv, q->act = from->act;
    q->s = prompt->s, q->n = prompt->n;
    q->generated = q->posted = q->npages = 0;
    if (!b->in_flight) {
        fly(s, b);
        b->number = (int)s->admitted++;
        b->prefill = s->now_prefill = true;
    }
    b->seq[b->nseq++] = q;
}

/* Seats of several batches meet in the entrance: they are ordered by the tier of their KV, and activations dealt anew. */
static void order_entrance(Run *s) {
    Batch *b = entrance(s);
    int at = 0;
    Sequence **order = b->joining; /* nobody ever joins here */
    Seat *deal = xcalloc(b->nseq, sizeof *deal);
    deal_block(deal, &s->plan->policy, b->nseq);
    for (int t = 0; t < NTIERS; t++)
        for (int r = 0; r < b->nseq; r++)
            if ((int)b->seq[r]->kv == t) order[at++] = b->seq[r];
    for (int r = 0; r < at; r++) b->seq[r] = order[r], b->seq[r]->act = deal[r].act;
    free(deal);
}

/* Between sweeps: who has ended leaves, who waits may enter. In flight are the entrance, whose tokens are wanted first,
 * then the batches by age. False when everything is done. */
static bool admit(Run *s) {
    int topups, n;
    leave(s);
    s->now_prefill = false;
    if (s->failed) return false;
    n = admission_next(&s->admission, s->i, s->entered, &topups);
    for (int e = 0; e < topups; e++) enter(s, s->entered[e], entrance(s));
    if (topups) {
        order_entrance(s);
        memmove(s->flight + 1, s->flight, (s->K - 1) * sizeof *s->flight);
        s->flight[0] = entrance(s);
    }
    for (int e = topups; e < n; e++) enter(s, s->entered[e], &s->batch[s->admission.seat[s->entered[e]].k]);
    return s->K > 0;
}

static void run_open(Run *s) {
    const Plan *p = s->plan;
    int block = imin(block_size(&p->policy), s->task->count);
    size_t pages = (size_t)p->max_seqs * p->max_pages;
    s->l = p->config.l;
    s->batch = xcalloc(p->slots, sizeof *s->batch);
    s->flight = xcalloc(p->slots, sizeof *s->flight);
    s->seqs = xcalloc(block, sizeof *s->seqs);
    s->entered = xcalloc(block, sizeof *s->entered);
    admission_open(&s->admission, &p->policy, s->task, p->npages);
    s->moves = xcalloc(2 * pages + p->max_seqs + NROLES + 2, sizeof *s->moves);
    for (int i = 0; i < block; i++) {
        s->seqs[i].pages = xcalloc(p->max_pages, sizeof(int));
        s->seqs[i].tokens = xcalloc(s->admission.horizon, sizeof(int32_t));
    }
    s->nseqs = block;
    for (int k = 0; k < p->slots; k++) {
        Batch *b = &s->batch[k];
        b->seq = xcalloc(p->max_seqs, sizeof *b->seq);
        b->joining = xcalloc(p->max_seqs, sizeof *b->joining);
        for (int e = 0; e < 2; e++) b->cache_stored[e] = xcalloc(s->l, sizeof(Event));
        for (int t = TIER_CPU; t <= TIER_DISK; t++) b->staged[t] = xcalloc(pages, sizeof(Staged));
    }
    for (int t = 0; t < NTIERS; t++) pool_open(&s->pool[t], p->npages[t]);
}

static void run_close(Run *s) {
    for (int i = 0; i < s->nseqs; i++) free(s->seqs[i].pages), free(s->seqs[i].tokens);
    for (int k = 0; k < s->plan->slots; k++) {
        free(s->batch[k].seq), free(s->batch[k].joining);
        for (int e = 0; e < 2; e++) free(s->batch[k].cache_stored[e]);
        for (int t = 0; t < NTIERS; t++) free(s->batch[k].staged[t]);
    }
    for (int t = 0; t < NTIERS; t++) pool_close(&s->pool[t]);
    admission_close(&s->admission);
    free(s->batch), free(s->flight), free(s->seqs), free(s->entered), free(s->moves);
}

int schedule_run(const Plan *plan, const Task *task, Device *device, const Listener *listener, RunStats *stats,
                 Error *err) {
    Run s = {.plan = plan, .task = task, .device = device, .listener = listener, .stats = stats, .err = err};
    CHECK(!is_sparse(&plan->policy) || plan->policy.cpu_attention);
    *stats = (RunStats){0};
    s.now = s.next = (LayerLoad){.slot = -1};
    run_open(&s);
    s.swept_at = device->now(device);
    while (task->count && admit(&s)) sweep(&s);
    for (int lane = 0; lane < NLANES; lane++) /* the last stores, and weights that were loaded for nobody */
        if (!s.failed && device->wait(device, s.last[lane], err)) s.failed = true;
    run_close(&s);
    return s.failed ? -1 : 0;
}
