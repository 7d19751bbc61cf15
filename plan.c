/* plan.c: what rests on which tier (section 4.2, "tensor placement"), and the plan of every byte.
 *
 * The plan comes first: from model, policy and task it lays out the GPU, the CPU and the disk tier
 * completely, before anything is allocated. Each tier is then one allocation, and the loop
 * allocates nothing.
 *   Weights      whole tensors of the decoder layers, placed by error diffusion (place_weights)
 *   KV cache     pages of page_tokens tokens of one sequence in one layer. A tier's pool lies as
 *                (layer, K|V, page, token, h1), so that one page index serves all layers, K and V
 *                lie apart, and neighbouring pages of a layer cross a link as one copy.
 *   Activations  rows of each GPU batch, by sequence
 * Sequences are dealt to the tiers within each GPU batch, so that the block as a whole has the
 * policy's fractions (deal_block). To count the rows and pages that all this takes, the plan walks
 * through the whole task before it runs.
 * Read next: device/depend.c. */
#include <limits.h>
#include <math.h>

#include "plan.h"
#include "io/io.h"

const char *const tier_name[NTIERS] = {"GPU", "CPU", "disk"};

// -------------------------------------------------------------------------------------------------
// The placement of weights
// -------------------------------------------------------------------------------------------------

void place_weights(Tier (*home)[NROLES], const OptConfig *config, double wg, double wc) {
    /* Large tensors come first; the small ones then even out what is left. */
    static const Role order[] = {FC1_W, FC2_W, Q_W, O_W, LN1_W, LN2_W};
    Diffusion d = {{wg, wc, fmax(0, 1 - wg - wc)}, {0}};
    if (d.share[TIER_DISK] < 1e-9) /* 0, but for rounding */
        d.share[TIER_DISK] = 0;
    for (int j = 0; j < config->l; j++) {
        for (size_t u = 0; u < sizeof order / sizeof order[0]; u++) {
            int rows, cols;
            Role r = order[u];
            const int joined =
                r == Q_W ? 3 : 1; /* with the biases behind them; q, k and v are one */
            opt_role_shape(config, r, &rows, &cols);
            Tier t = diffuse(&d, ((double)rows * cols + (rows == 1 ? cols : rows)) * joined);
            for (int same = 0; same < 2 * joined; same++)
                home[j][r + same] = t;
        }
    }
}

// -------------------------------------------------------------------------------------------------
// The walk: what a task will need
//
// Before a task runs, the plan walks it through admission as if no sequence stopped early. The plan
// needs maxima, such as the rows of a batch and the pages of a pool. The cost model
// (cost/runtime.c) needs sums: how many sweeps there are, and how much work they do. One walk
// counts both. A step of the walk is one sweep that sequences enter, together with all sweeps after
// it in which no sequence enters or leaves.
// -------------------------------------------------------------------------------------------------

/* The most that one GPU batch needs. "off" counts only sequences whose KV is not on the GPU. */
typedef struct {
    int rows, head_rows; /* token rows of its prefill; those of them that the head needs */
    int seqs;            /* sequences */
    int off_rows, off_seqs;
    int act_rows[NTIERS];  /* rows by the tier of their activations */
    int off_pages[NTIERS]; /* pages on CPU and disk when the sequences are longest */
} BatchNeed;

/* Makes *most at least n. */
static void raise_to(int *most, int n) { *most = imax(*most, n); }

/* Raises the plan's maxima to what batch k needs. */
static void note_batch(Plan *p, int k, const BatchNeed *b) {
    raise_to(&p->batches, k + 1);
    raise_to(&p->max_rows, b->rows);
    raise_to(&p->max_seqs, b->seqs);
    raise_to(&p->head_rows, b->head_rows);
    raise_to(&p->off_rows, b->off_rows);
    raise_to(&p->off_seqs, b->off_seqs);
    raise_to(&p->disk_act_rows, b->act_rows[TIER_DISK]);
    for (int t = 0; t < NTIERS; t++)
        raise_to(&p->act_rows[t][k], b->act_rows[t]);
    if (!p->policy.delegated)
        raise_to(&p->staged_pages[0], b->off_pages[TIER_CPU] + b->off_pages[TIER_DISK]);
    raise_to(&p->staged_pages[1], b->off_pages[TIER_DISK]);
}

/* Returns the number of pages of a prompt's sequence when they are loaded for the last time. A
 * sequence of one new token never loads any. */
static int loaded_pages(const Plan *p, const Prompt *q) {
    return q->n > 1 ? pages_for(q->s + q->n - 1, p->policy.page_tokens) : 0;
}

/* Adds to b a sequence of s prompt tokens in this seat. */
static void add_seat(BatchNeed *b, const Seat *seat, int s, int pages) {
    b->rows += s;
    b->seqs++;
    b->act_rows[seat->act] += s;
    if (seat->kv != TIER_GPU) {
        b->off_rows += s;
        b->off_seqs++;
        b->off_pages[seat->kv] += pages;
    }
}

/* Records what each batch of a block needs, when the whole block has just been seated. */
static void measure_block(Plan *p, const Task *task, const Seat *seats, int count) {
    for (int first = 0; first < count; first += p->policy.gbs) {
        BatchNeed b = {.rows = 0};
        for (int r = first; r < imin(first + p->policy.gbs, count); r++) {
            const Prompt *q = &task->prompts[seats[r].prompt];
            add_seat(&b, &seats[r], q->s, loaded_pages(p, q));
            b.head_rows += head_rows(task, q);
        }
        note_batch(p, seats[first].k, &b);
    }
}

/* Returns the largest number of rows of any gbs neighbouring prompts, and the largest number of
 * such rows that the head needs. */
static BatchNeed widest_window(const Task *task, int gbs) {
    BatchNeed most = {.seqs = gbs};
    int rows = 0, last = 0;
    for (int i = 0; i < task->count; i++) {
        const Prompt *in = &task->prompts[i], *out = i >= gbs ? in - gbs : NULL;
        rows += in->s - (out ? out->s : 0);
        last += head_rows(task, in) - (out ? head_rows(task, out) : 0);
        raise_to(&most.rows, rows);
        raise_to(&most.head_rows, last);
    }
    return most;
}

/* Records bounds for the batches of the diagonal schedule, where any sequence may take any seat. A
 * batch is at most as large as gbs of the longest prompts, but a prefill holds only prompts that
 * are neighbours in the input. Topups get a batch of their own, after the others. */
static void bound_batches(Plan *p, const Task *task, const Seat *seats, int count) {
    const int gbs = imin(p->policy.gbs, count);
    const double share[NTIERS] = {p->policy.hg, p->policy.hc,
                                  fmax(0, 1 - p->policy.hg - p->policy.hc)};
    BatchNeed topups = widest_window(task, gbs);
    const int s = p->max_prompt;
    int pages = 0, seqs[NTIERS];
    for (int i = 0; i < task->count; i++)
        raise_to(&pages, loaded_pages(p, &task->prompts[i]));
    for (int first = 0; first < count; first += gbs) {
        BatchNeed b = {.rows = 0};
        for (int r = first; r < imin(first + gbs, count); r++)
            add_seat(&b, &seats[r], s, pages);
        b.rows = imin(b.rows, topups.rows);
        b.head_rows = topups.head_rows;
        b.off_rows = imin(b.off_rows, topups.rows);
        for (int t = 0; t < NTIERS; t++)
            b.act_rows[t] = imin(b.act_rows[t], topups.rows);
        note_batch(p, seats[first].k, &b);
        /* of any batch; they load no pages, so off_seqs and off_pages stay 0 */
        topups.off_rows = imin(topups.off_rows + b.off_rows, topups.rows);
    }
    /* However many topups there are, they have the policy's fractions among themselves. */
    for (int n = 1; n <= gbs; n++) {
        apportion(seqs, share, n); /* as deal_block does */
        for (int t = 0; t < NTIERS; t++)
            topups.act_rows[t] = imin(imax(topups.act_rows[t], seqs[t] * s), topups.rows);
    }
    note_batch(p, (count + gbs - 1) / gbs, &topups);
}

/* Returns the prompt whose sequence sits in a seat, or NULL if the seat is vacant. */
static const Prompt *prompt_in(const Admission *a, int seat) {
    const int prompt = a->seat[seat].prompt;
    return prompt < 0 ? NULL : &a->task->prompts[prompt];
}

/* Counts the work of the GPU batch that begins at seat `first`: in sweep a->sweep (now), and in the
 * `more` sweeps after it (later), in which all its sequences decode and attend to one more token in
 * each sweep. Returns true if the batch has topups: they prefill while the rest of it decodes. */
static bool count_batch(Workload *now, Workload *later, const Admission *a, int first,
                        double more) {
    bool decodes = false, prefills = false;
    for (int e = first; e < imin(first + a->policy->gbs, a->nseats); e++) {
        const Prompt *q = prompt_in(a, e);
        if (!q)
            continue;
        const double s = q->s, age = (double)(a->sweep - a->seat[e].since);
        if (age > 0) {
            decodes = true;
            now->steps++;
            now->past += s + age;
            now->head_rows++;
        } else {
            prefills = true;
            now->prompts++;
            now->prompt_rows += s;
            now->pairs += s * (s + 1) / 2;
            now->head_rows += head_rows(a->task, q);
        }
        later->steps += more;
        later->past += more * (s + age) + more * (more + 1) / 2;
        later->head_rows += more;
    }
    now->decodes += decodes;
    now->prefills += prefills && !decodes;
    later->decodes += decodes || prefills ? more : 0;
    return prefills && decodes;
}

/* Adds to the plan the work of sweep a->sweep and of the sweeps after it, up to `until`, in which
 * no sequence enters or leaves. Topups prefill in the entrance, so they count as one more batch in
 * prefill, however many batches have topups. */
static void note_work(Plan *p, const Admission *a, bool entering, long until) {
    Workload *now = &p->work[entering], *later = &p->work[0];
    const double more = (double)(until - a->sweep - 1);
    bool topups = false;
    for (int first = 0; first < a->nseats; first += a->policy->gbs)
        topups |= count_batch(now, later, a, first, more);
    now->sweeps++;
    now->prefills += topups;
    later->sweeps += more;
}

/* Returns the first sweep before which some sequence that is now in flight has all its tokens. */
static long next_end(const Admission *a) {
    long end = LONG_MAX;
    for (int e = 0; e < a->nseats; e++) {
        const Prompt *q = prompt_in(a, e);
        if (q && a->seat[e].since + q->n < end)
            end = a->seat[e].since + q->n;
    }
    return end;
}

/* Takes one step of a flight: counts what its next sweep needs, and the sweeps after it in which
 * nothing changes. Counts in p->achieved the sequences that leave, by the tiers of their KV and of
 * their activations. Returns the next sweep that a sequence may enter, or -1 when the flight has
 * ended. entered is scratch. */
static long walk_flight(Plan *p, Admission *a, long sweep, int *entered) {
    const bool diagonal = p->policy.schedule == SCHEDULE_DIAGONAL;
    const Task *task = a->task;
    int topups, n = admission_next(a, sweep, entered, &topups);
    if (!diagonal)
        measure_block(p, task, a->seat, n);
    else if (n && !sweep)
        bound_batches(p, task, a->seat, a->nseats);
    if (!a->seated)
        return -1;
    /* While prompts wait and seats are vacant, a prompt may enter before any sequence leaves. */
    const bool opening = *a->next_prompt < task->count && a->seated < a->nseats;
    const long next = diagonal && opening ? sweep + 1 : next_end(a);
    note_work(p, a, n > 0, next);
    p->sweeps += next - sweep;
    for (int e = 0; e < a->nseats; e++) {
        const Prompt *q = prompt_in(a, e);
        if (!q || a->seat[e].since + q->n > next)
            continue;
        p->achieved[1][a->seat[e].kv]++;
        p->achieved[2][a->seat[e].act]++;
        admission_leave(a, e, q->n);
    }
    return next;
}

/* Makes the pools large enough for the peak of this flight. With the diagonal schedule any prompt
 * may take any seat, so each tier with a seat must have room for at least the longest sequence. */
static void note_pages(Plan *p, const Admission *a) {
    for (int t = 0; t < NTIERS; t++)
        raise_to(&p->npages[t], a->peak[t]);
    for (int e = 0; p->policy.schedule == SCHEDULE_DIAGONAL && e < a->nseats; e++)
        raise_to(&p->npages[a->seat[e].kv], p->max_pages);
}

/* Walks the whole task through admission. Flights sweep in turn, so the next step belongs to the
 * flight with the fewest sweeps so far, or to the first of several such flights. */
static void walk_task(Plan *p, const Task *task) {
    const int flights = p->policy.flights;
    Admission *a = xcalloc(flights, sizeof *a);
    long *next = xcalloc(flights, sizeof *next);
    int next_prompt = 0,
        *entered = xcalloc(imin(block_size(&p->policy), task->count), sizeof *entered);
    for (int g = 0; g < flights; g++)
        admission_open(&a[g], &p->policy, task, &next_prompt, NULL);
    for (int g = 0; g >= 0;) {
        next[g] = walk_flight(p, &a[g], next[g], entered);
        g = -1;
        for (int e = 0; e < flights; e++)
            if (next[e] >= 0 && (g < 0 || next[e] < next[g]))
                g = e;
    }
    for (int g = 0; g < flights; g++) {
        note_pages(p, &a[g]);
        admission_close(&a[g]);
    }
    free(entered);
    free(next);
    free(a);
}

/* Sets the sizes of pieces, and the numbers of workspaces that batches and pieces use in turn. */
static void size_pieces(Plan *p) {
    enum {
        LEAST_CHUNK = 64
    }; /* the head computes the logits of so many rows at a time, or of max_seqs if that is more */
    const int in_flight = imin(WORKSPACES, imax(p->batches, 1));
    p->piece_rows = imin(imax(p->policy.piece_rows, p->max_prompt), p->max_rows);
    raise_to(&p->piece_rows, p->max_seqs);
    p->nws = imin(p->policy.workspaces, in_flight);
    p->turns = p->max_rows > p->piece_rows ? WORKSPACES : in_flight;
    /* Two neighbouring pieces together have more rows than one may have. */
    p->pieces = imax(1, imin(p->max_seqs, 2 * p->max_rows / imax(p->piece_rows, 1) + 1));
    p->head_chunk = imin(imax(p->max_seqs, LEAST_CHUNK), p->head_rows);
}

/* Fills in the part of the plan that depends on which sequences are in flight when: batches, rows,
 * pages, sweeps and their work. */
static void plan_batches(Plan *p, const Task *task) {
    const int flights = p->policy.flights, most = flights * (p->policy.num_gpu_batches + 1);
    for (int t = 0; t < NTIERS; t++) {
        p->act_rows[t] = xcalloc(most, sizeof(int));
        p->act_first[t] = xcalloc(most + 1, sizeof(int));
    }
    for (int i = 0; i < task->count; i++) {
        const Prompt *q = &task->prompts[i];
        raise_to(&p->max_prompt, q->s);
        raise_to(&p->max_tokens, q->s + q->n - 1);
    }
    p->max_pages = pages_for(p->max_tokens, p->policy.page_tokens);
    walk_task(p, task);
    const int batches = p->batches; /* of one flight; every flight has batches of the same sizes */
    p->batches *= flights;
    for (int t = 0; t < NTIERS; t++) {
        for (int k = 0; k < p->batches; k++) {
            p->act_rows[t][k] = p->act_rows[t][k % batches];
            p->act_first[t][k + 1] = p->act_first[t][k] + p->act_rows[t][k];
        }
        p->achieved[1][t] /= imax(task->count, 1);
        p->achieved[2][t] /= imax(task->count, 1);
    }
    size_pieces(p);
}

// -------------------------------------------------------------------------------------------------
// Regions of a tier, and views of them
// -------------------------------------------------------------------------------------------------

/* Lays out a region after those that its tier already has. The disk's share of a real checkpoint
 * stays where it is: it is counted, but is not part of the offload file. */
static void lay_out(Plan *p, RegionId id, Tier tier, Region r, bool in_checkpoint) {
    r.offset = tier == TIER_DISK ? p->offload_bytes : p->total[tier];
    if (tier == TIER_DISK && !in_checkpoint)
        p->offload_bytes += r.bytes;
    p->total[tier] += r.bytes;
    p->region[id][tier] = r;
}

void add_region(Plan *p, Wanted wanted) {
    Region r = {wanted.name, wanted.type, wanted.rows, wanted.cols, wanted.slots, 0, 0, 0, 1};
    r.bytes = whole_lines((Bytes)r.rows * r.cols * r.slots * type_bytes(r.type));
    lay_out(p, wanted.id, wanted.tier, r, false);
}

/* Numbers the cells, when all regions have been added. Ops that use the same cell follow each other
 * (device/depend.c), so what two ops may use at once needs two cells. A slot is one cell, but
 *   a weight slot on the CPU has one cell for each batch, since a layer is loaded in so many parts;
 *   UNPACKED_WEIGHTS has one for q, k and v, and one for the other matrices;
 *   ATTENDED has one for the sequences whose KV is on the GPU, and one for the others;
 *   a hidden state on the GPU has one for each piece, since pieces pass a layer one by one. In
 *     the next sweep a piece may have other rows: in decoding, all rows are piece 0. Every sweep
 *     begins with an op that writes all cells of the state, so this does no harm;
 *   the KV cache has one for each batch in each layer, and one for the free pages of each flight
 *     in each layer. */
static void number_cells(Plan *p) {
    for (int slot = 0; slot < 2; slot++)
        p->region[WEIGHT_SLOT + slot][TIER_CPU].cells = p->batches;
    p->region[UNPACKED_WEIGHTS][TIER_GPU].cells = 2;
    p->region[ATTENDED][TIER_GPU].cells = p->region[ATTENDED][TIER_CPU].cells = 2;
    p->region[HIDDEN][TIER_GPU].cells = p->region[ACTIVATIONS][TIER_GPU].cells = p->pieces;
    for (int t = 0; t < NTIERS; t++)
        for (int id = 0; id < NREGIONS; id++) {
            Region *r = &p->region[id][t];
            const int slots = id == ACTIVATIONS ? p->batches : r->slots;
            r->cell = p->ncells;
            p->ncells +=
                id == KV_CACHE ? (p->batches + p->policy.flights) * p->config.l : slots * r->cells;
        }
}

Tensor plan_view(const Plan *p, RegionId id, Tier tier, long slot, int first, int rows) {
    const Region *r = &p->region[id][tier];
    if (!r->slots)
        return (Tensor){.tier = tier, .region = id, .rows = 0};
    slot %= r->slots;
    Bytes row = r->cols * type_bytes(r->type);
    return (Tensor){.tier = tier,
                    .type = r->type,
                    .offset = r->offset + ((Bytes)slot * r->rows + first) * row,
                    .rows = rows,
                    .cols = r->cols,
                    .ld = (size_t)r->cols,
                    .region = id,
                    .cell = r->cell + (int)slot * r->cells,
                    .ncells = r->cells};
}

Tensor plan_bytes(const Plan *p, RegionId id, Tier tier, Bytes at, Type type, int n) {
    Tensor t = plan_view(p, id, tier, 0, 0, 1);
    t.type = type;
    t.offset += at;
    t.cols = n;
    t.ld = (size_t)n;
    return t;
}

Tensor plan_weight(const Plan *p, const WeightPlace *place, int slot) {
    const Tensor home = place->home;
    if (home.tier == TIER_GPU || !home.rows)
        return home;
    const Type type = home.type == U8 ? U8 : F16;
    Tensor t = plan_bytes(p, (RegionId)(WEIGHT_SLOT + slot), TIER_GPU, place->slab_offset, type,
                          home.cols);
    t.rows = home.rows;
    return t;
}

Tensor plan_f16(const Plan *p, Role role) {
    int rows, cols;
    opt_role_shape(&p->config, role, &rows, &cols);
    Tensor t = plan_bytes(p, UNPACKED_WEIGHTS, TIER_GPU, p->unpacked_at[role], F16, cols);
    t.rows = rows;
    return tensor_cells(t, role >= O_W, 1);
}

int cache_cell(const Plan *p, Tier tier, int batch, int j) {
    return p->region[KV_CACHE][tier].cell + batch * p->config.l + j;
}

PageTable plan_pages(const Plan *p, RegionId id, Tier tier, long slot, int npages) {
    const int page = p->policy.page_tokens;
    return (PageTable){.k = plan_view(p, id, tier, slot, 0, npages * page),
                       .v = plan_view(p, id, tier, slot + 1, 0, npages * page),
                       .page_tokens = page,
                       .nh = p->config.nh};
}

// -------------------------------------------------------------------------------------------------
// The plan of the weights
// -------------------------------------------------------------------------------------------------

/* Returns a tensor of the checkpoint as it rests at this place of a region: in F16, or packed. In a
 * packed checkpoint a packed tensor has the shape of its groups already. */
static Tensor as_stored(Tensor t, bool packed, RegionId id, Tier tier, Bytes offset) {
    const bool packs = packed && t.type != U8;
    CHECK(!packs || t.rows % GROUP == 0); /* see checkpoint_packs */
    const int cols = packs ? t.cols * GROUP_BYTES : t.cols;
    return (Tensor){.tier = tier,
                    .type = packed ? U8 : F16,
                    .offset = offset,
                    .rows = packs ? t.rows / GROUP : t.rows,
                    .cols = cols,
                    .ld = (size_t)cols,
                    .region = id};
}

bool copied_to_disk(const Plan *p, const Checkpoint *c) {
    return c->dummy || p->policy.weight_study.bits || (p->policy.weight_packed && !c->packed);
}

/* Returns true if role a comes before role b in a slab. q, k and v are first; the others follow in
 * the order of the checkpoint, so that neighbours on disk are neighbours in the slab and are read
 * as one. In our packed copies q, k and v are neighbours too; in other checkpoints they take a few
 * more reads. */
static bool comes_before(const Tensor *t, Role a, Role b) {
    if (imin(role_place(a), role_place(b)) <= role_place(V_B))
        return role_place(a) < role_place(b);
    return t[a].file < t[b].file || (t[a].file == t[b].file && t[a].offset < t[b].offset);
}

/* Fills order with the roles of a layer as they lie in its slab; t holds its tensors in the
 * checkpoint. */
static void slab_order(Role order[NROLES], const Tensor *t) {
    for (int r = 0, at; r < NROLES; r++) {
        for (at = r; at > 0 && comes_before(t, (Role)r, order[at - 1]); at--)
            order[at] = order[at - 1];
        order[at] = (Role)r;
    }
}

/* Returns where role r ends if it begins at `at`: at a whole cache line, unless the next role must
 * lie directly behind it. */
static Bytes role_end(Role r, Bytes at, Bytes bytes) {
    return role_goes_on(r) ? at + bytes : whole_lines(at + bytes);
}

Bytes plan_layer_bytes(const Plan *p) {
    Bytes sum = 0;
    for (int r = 0; r < NROLES; r++) {
        Tensor t = p->weight[0][r].home;
        sum += (Bytes)t.rows * t.cols * (t.type == U8 ? 1 : sizeof(f16));
    }
    return sum;
}

/* Gives role r of layer j its home on a tier, after the *bytes that the tier already has, and its
 * place in the layer's slab. */
static void give_home(Plan *p, const Checkpoint *c, int j, Role r, Tier tier, Bytes *bytes) {
    const Tensor t = c->layer[j][r];
    WeightPlace *w = &p->weight[j][r];
    const bool packed = p->policy.weight_packed && role_is_matrix(r);
    w->home = as_stored(t, packed, RESTING_WEIGHTS, tier, *bytes);
    const Bytes size = tensor_bytes(w->home), padded = role_end(r, *bytes, size) - *bytes;
    w->slab_offset = p->slab[TIER_CPU][j] + p->slab[TIER_DISK][j]; /* the CPU's come first */
    w->slab_bytes = tier == TIER_DISK ? size : padded;
    if (tier == TIER_DISK && !copied_to_disk(p, c))
        w->home = t;
    p->slab[tier][j] += padded;
    *bytes += padded;
}

/* Gives every tensor of the decoder layers its home, and adds their regions. */
static void plan_layers(Plan *p, const Checkpoint *c) {
    const int l = p->config.l;
    Bytes bytes[NTIERS] = {0};
    Tier(*home)[NROLES] = xcalloc(l, sizeof *home);
    place_weights(home, &p->config, p->policy.wg, p->policy.wc);
    for (int j = 0; j < l; j++) {
        slab_order(p->slab_order[j], c->layer[j]);
        for (Tier tier = TIER_GPU; tier < NTIERS; tier++)
            for (int i = 0; i < NROLES; i++) {
                const Role r = p->slab_order[j][i];
                if (home[j][r] == tier)
                    give_home(p, c, j, r, tier, &bytes[tier]);
            }
    }
    for (Tier t = TIER_GPU; t < NTIERS; t++) {
        const bool file = t == TIER_DISK && !copied_to_disk(p, c);
        const char *name = file ? "weights (checkpoint)" : "weights";
        p->achieved[0][t] = (double)bytes[t] / (bytes[0] + bytes[1] + bytes[2]);
        lay_out(p, RESTING_WEIGHTS, t, (Region){name, U8, .slots = 1, .bytes = bytes[t]}, file);
    }
    free(home);
}

/* Gives the tensors outside the layers their homes behind the layers, and adds their regions. Small
 * ones always rest on the GPU, and tables at policy.table_home. */
static void plan_globals(Plan *p, const Checkpoint *c) {
    Bytes bytes[NTIERS] = {0};
    for (int g = 0; g < NGLOBALS; g++) {
        Tensor t = c->global[g];
        bool table = g == TOK_EMBED || g == LM_HEAD;
        Tier tier = table ? p->policy.table_home : TIER_GPU;
        if (!t.rows)
            continue;
        const Bytes size = (Bytes)t.rows * t.cols * sizeof(f16), padded = whole_lines(size);
        p->global[g].slab_bytes = tier == TIER_DISK ? size : padded;
        p->global[g].home =
            tier == TIER_DISK && !c->dummy
                ? t
                : as_stored(t, false, EMBEDDINGS, tier, p->total[tier] + bytes[tier]);
        if ((Global)g == p->head && is_last(&p->config))
            p->slab[tier][p->config.l] = padded;
        bytes[tier] += padded;
    }
    for (Tier t = TIER_GPU; t < NTIERS; t++) {
        const bool file = t == TIER_DISK && !c->dummy;
        const char *name = file ? "embeddings (checkpoint)" : "embeddings";
        lay_out(p, EMBEDDINGS, t, (Region){name, U8, .slots = 1, .bytes = bytes[t]}, file);
    }
}

static Bytes larger(Bytes a, Bytes b) { return a > b ? a : b; }

/* Adds the weight slots. The layers that stream take the two slots in turn, so that two rounds of
 * all layers show what each slot holds: if the number of layers that stream is even, always the
 * same ones; if it is odd, all of them in turn. */
static void plan_slots(Plan *p) {
    Bytes most[2][2] = {{0}}; /* [tier][slot]: on the CPU, only what comes from disk */
    const int layers = p->config.l + 1;
    for (int j = 0, turn = 0; j < 2 * layers; j++) {
        const Bytes from_disk = p->slab[TIER_DISK][j % layers],
                    all = p->slab[TIER_CPU][j % layers] + from_disk;
        if (!all)
            continue;
        const int slot = turn++ % 2;
        most[TIER_GPU][slot] = larger(most[TIER_GPU][slot], all);
        most[TIER_CPU][slot] = larger(most[TIER_CPU][slot], from_disk);
    }
    for (int slot = 0; slot < 2; slot++)
        for (Tier t = TIER_GPU; t <= TIER_CPU; t++)
            add_region(p, (Wanted){(RegionId)(WEIGHT_SLOT + slot), t, "weight staging", F16, 1,
                                   (int)(most[t][slot] / 2), 1});
}

/* Adds room for a layer's matrices in F16 if large batches need unpacked weights. This is so on a
 * GPU, where activations are F16. */
static void plan_unpacked(Plan *p) {
    Bytes bytes = 0;
    p->packed_rows = p->act_type == F16 ? PACKED_ROWS : INT_MAX;
    if (!p->policy.weight_packed || p->packed_rows == INT_MAX)
        return;
    for (int r = 0; r < NROLES; r++) {
        int rows, cols;
        opt_role_shape(&p->config, (Role)r, &rows, &cols);
        if (!role_is_matrix((Role)r))
            continue;
        p->unpacked_at[r] = bytes;
        bytes = role_end((Role)r, bytes, (Bytes)rows * cols * sizeof(f16));
    }
    add_region(
        p, (Wanted){UNPACKED_WEIGHTS, TIER_GPU, "unpacked weights", F16, 1, (int)(bytes / 2), 1});
}

// -------------------------------------------------------------------------------------------------
// The plan of cache, activations and workspaces, by what the walk has counted
// -------------------------------------------------------------------------------------------------

/* Returns the KV term of A.2.1's peak memory, in bytes: 4 h1 bls l (s + n), and for the diagonal
 * schedule 4 h1 bls l (2s + n)(n - 1) / 2n. The paper hands a sequence's pages over in mid-sweep
 * and lets K grow without bound, so our pages need a little more. */
static double a21_cache(const Plan *p, const Task *task) {
    double s = 0, n = 0;
    const int bls = imin(block_size(&p->policy), task->count);
    for (int i = 0; i < task->count; i++) {
        s += task->prompts[i].s;
        n += task->prompts[i].n;
    }
    s /= task->count;
    n /= task->count;
    const bool diagonal = p->policy.schedule == SCHEDULE_DIAGONAL;
    const double tokens = diagonal ? (2 * s + n) * (n - 1) / (2 * n) : s + n;
    return 4.0 * p->config.h1 * bls * p->config.l * tokens;
}

static void plan_cache(Plan *p, const Task *task) {
    const OptConfig *c = &p->config;
    p->kv_row =
        p->policy.cache_packed ? c->nh * quant_bytes(c->h1 / c->nh) : (Bytes)c->h1 * sizeof(f16);
    if (is_sparse(&p->policy))
        p->most_chosen = sparse_tokens(p->policy.sparsity, p->max_tokens);
    const Type type = p->policy.cache_packed ? U8 : F16;
    const int page = p->policy.page_tokens, wide = (int)(p->kv_row / type_bytes(type));
    /* The slots are K and V of each layer in turn. */
    for (Tier t = TIER_GPU; t < NTIERS; t++)
        add_region(p, (Wanted){KV_CACHE, t, "KV cache", type,
                               p->policy.flights * p->npages[t] * page, wide, 2 * p->config.l});
    for (Tier t = TIER_GPU; t <= TIER_CPU; t++)
        add_region(p,
                   (Wanted){KV_STAGING, t, "KV staging", type, p->staged_pages[t] * page, wide, 4});
    p->a21_kv = task->count ? a21_cache(p, task) : 0;
}

static void plan_activations(Plan *p) {
    for (Tier t = TIER_GPU; t < NTIERS; t++)
        add_region(p, (Wanted){ACTIVATIONS, t, "activations", p->act_type,
                               p->act_first[t][p->batches], p->config.h1, 1});
}

/* Adds the index tables and the results of each batch; the GPU and the CPU each have a copy.
 * batch.c lays out the tables: four integers for each row, four for each sequence (there is room
 * for five, with which the plans of results/paper were made), two page tables, the number of each
 * row that the head needs, and in a scored task the token after that row. */
static void plan_tables(Plan *p, const Task *task) {
    const bool last = is_last(&p->config), scored = task->scored;
    const Bytes rows = p->max_rows, seqs = p->max_seqs, for_head = p->head_rows;
    const Bytes integers =
        4 * rows + 5 * seqs + 2 * seqs * p->max_pages + for_head * (scored ? 2 : 1);
    const int ints = (int)(whole_lines(4 * integers) / 4), batches = p->batches;
    const int chosen = scored || !last ? 0 : p->max_seqs,
              scores = scored && last ? p->head_rows : 0;
    for (Tier t = TIER_GPU; t <= TIER_CPU; t++) {
        add_region(p, (Wanted){INDEX_TABLES, t, "index tables", I32, 1, ints, 2 * batches});
        add_region(p, (Wanted){NEW_TOKENS, t, "new tokens", I32, 1, chosen, batches});
        add_region(p, (Wanted){LOG_PROBS, t, "scores", F32, 1, scores, batches});
        add_region(p, (Wanted){GREEDY, t, "scores", I32, 1, scores, batches});
    }
}

/* Adds the workspaces. The table has one line for each; a workspace of 0 rows is not needed. */
static void plan_workspaces(Plan *p, const Task *task) {
    const OptConfig *c = &p->config;
    const Type act = p->act_type, kv = p->policy.cache_packed ? U8 : F16;
    const int h1 = c->h1, rows = p->max_rows, seqs = p->max_seqs, for_head = p->head_rows,
              nws = p->nws, batches = p->batches;
    const int piece = p->piece_rows, turns = p->turns, off_rows = imin(p->off_rows, piece);
    const int kv_cols = 2 * (int)(p->kv_row / type_bytes(kv)), choice = c->nh * p->most_chosen;
    const int norm = c->pre_norm ? piece : 0, off_seqs = p->policy.delegated ? p->off_seqs : 0;
    const bool projected = c->embed != h1, gathered = p->policy.table_home != TIER_GPU,
               keep = task->keep_logits;
    const bool first = is_first(c), last = is_last(c),
               off_gpu = p->act_first[TIER_CPU][batches] + p->act_first[TIER_DISK][batches] > 0;
    const Wanted workspace[] = {
        {ACT_READING, TIER_CPU, "activation staging, reading", act, p->disk_act_rows, h1, 2},
        {ACT_WRITING, TIER_CPU, "activation staging, writing", act, p->disk_act_rows, h1, 2},
        {HIDDEN, TIER_GPU, "workspace: x", act, off_gpu ? rows : 0, h1, nws},
        {QKV, TIER_GPU, "workspace: q, k, v", F16, piece, 3 * h1, turns},
        {NEW_KV_PACKED, TIER_GPU, "workspace: packed k, v", U8, kv == U8 ? off_rows : 0, kv_cols,
         turns},
        {QUERY, TIER_CPU, "attention: q", F16, off_seqs, h1, turns},
        {NEW_KV, TIER_CPU, "new k, v", kv, off_rows, kv_cols, turns},
        {ATTENDED, TIER_GPU, "workspace: attention", act, piece, h1, turns},
        {ATTENDED, TIER_CPU, "attention: result", act, off_seqs, h1, turns},
        {NORM_1, TIER_GPU, "workspace: norm 1", act, norm, h1, 1},
        {NORM_2, TIER_GPU, "workspace: norm 2", act, norm, h1, 1},
        {MLP, TIER_GPU, "workspace: mlp", act, piece, c->h2, 1},
        {EMBEDDED, TIER_GPU, "workspace: embedding", act, first && projected ? rows : 0, c->embed,
         nws},
        {EMBEDDED, TIER_CPU, "embedding rows", act, first && gathered ? rows : 0, c->embed, nws},
        {HEAD_ROWS, TIER_GPU, "workspace: last rows", act, last ? for_head : 0, h1, nws},
        {HEAD_OUT, TIER_GPU, "workspace: head", act, last && projected ? p->head_chunk : 0,
         c->embed, 1},
        {LOGITS, TIER_GPU, "logits", F32, last ? p->head_chunk : 0, c->vocab, 1},
        {LOGITS, TIER_CPU, "logits", F32, last && (keep || p->chooser == TIER_CPU) ? seqs : 0,
         c->vocab, keep ? batches : nws},
        {RECEIVED, TIER_CPU, "states received", act, first ? 0 : rows, h1, batches},
        {SENDING, TIER_CPU, "states to send", act, last ? 0 : rows, h1, batches},
        {CHOSEN, TIER_GPU, "attention: chosen tokens", I32, seqs, choice, 1},
        {CHOSEN, TIER_CPU, "attention: chosen tokens", I32, p->off_seqs, choice, 1},
        {CHOSEN_PROBS, TIER_GPU, "attention: chosen tokens", F32, seqs, choice, 1},
        {CHOSEN_PROBS, TIER_CPU, "attention: chosen tokens", F32, p->off_seqs, choice, 1},
    };
    for (size_t i = 0; i < sizeof workspace / sizeof *workspace; i++)
        add_region(p, workspace[i]);
}

// -------------------------------------------------------------------------------------------------
// The plan of a task
// -------------------------------------------------------------------------------------------------

/* Fills in the fields that are 0 because nobody has chosen them. */
static void policy_defaults(Policy *policy) {
    policy->flights = flight_count(policy);
    policy->piece_rows = policy->piece_rows ? policy->piece_rows : PIECE_ROWS;
    policy->workspaces = policy->workspaces ? policy->workspaces : WORKSPACES;
    policy->sparsity = is_sparse(policy) ? policy->sparsity : 1;
}

/* Fails (EXIT_USAGE) if a block has too many tokens, or a prompt does not fit the model. */
static int check_prompts(const OptConfig *config, const Policy *policy, const Task *task,
                         Error *err) {
    enum { MOST_ROWS = 1 << 29 }; /* counts of rows are ints */
    long rows = 0;
    for (int i = 0; i < task->count; i++) {
        const Prompt *q = &task->prompts[i];
        rows = (i % block_size(policy) ? rows : 0) + q->s;
        if (rows > MOST_ROWS)
            return fail(
                err, EXIT_USAGE,
                "a block has more than %d tokens; lower --gpu-batch-size or --num-gpu-batches",
                MOST_ROWS);
        CHECK(!task->scored || (q->from >= 1 && q->from < q->s + q->n && !task->keep_logits));
        if (q->s < 1 || q->n < 1 || q->s > config->max_pos || q->n > config->max_pos - q->s + 1)
            return fail(err, EXIT_USAGE,
                        "prompt %d: %d tokens and %d to generate do not fit the model's %d "
                        "positions; shorten it",
                        i, q->s, q->n, config->max_pos);
    }
    return 0;
}

Plan *plan_make(const Checkpoint *checkpoint, const Policy *policy, const Task *task, Type act_type,
                Error *err) {
    if (check_prompts(&checkpoint->config, policy, task, err))
        return NULL;
    Plan *p = xcalloc(1, sizeof *p);
    int l = checkpoint->config.l;
    p->config = checkpoint->config;
    p->policy = *policy;
    policy_defaults(&p->policy);
    p->act_type = act_type;
    p->chooser =
        act_type == F16 && task->sampling.temperature > 0 && !task->scored ? TIER_CPU : TIER_GPU;
    p->head = checkpoint->global[LM_HEAD].rows ? LM_HEAD : TOK_EMBED;
    p->weight = xcalloc(l, sizeof *p->weight);
    p->slab_order = xcalloc(l, sizeof *p->slab_order);
    for (int t = 0; t < NTIERS; t++)
        p->slab[t] = xcalloc(l + 1, sizeof(Bytes));
    plan_layers(p, checkpoint);
    plan_globals(p, checkpoint);
    plan_slots(p);
    plan_unpacked(p);
    plan_batches(p, task);
    plan_cache(p, task);
    plan_activations(p);
    plan_workspaces(p, task);
    plan_tables(p, task);
    number_cells(p);
    return p;
}

void plan_free(Plan *p) {
    if (!p)
        return;
    for (int t = 0; t < NTIERS; t++) {
        free(p->act_rows[t]);
        free(p->act_first[t]);
        free(p->slab[t]);
    }
    free(p->weight);
    free(p->slab_order);
    free(p);
}

// -------------------------------------------------------------------------------------------------
// Fitting a plan into the tiers
// -------------------------------------------------------------------------------------------------

Bytes plan_missing(const Plan *p, const Bytes capacity[NTIERS]) {
    Bytes missing = 0;
    for (int t = 0; t < NTIERS; t++)
        missing += p->total[t] > capacity[t] ? p->total[t] - capacity[t] : 0;
    return missing;
}

static const char percent_w[] =
    "raise or lower the first two numbers of --percent (weights on GPU, on CPU)";
static const char percent_h[] =
    "change the fifth and sixth number of --percent (activations on GPU, on CPU), or %s";
/* What can be done about a region that takes too much; %s stands for the advice of smaller_block,
 * which is all there is for the other regions. */
static const char *const remedies[NREGIONS] = {
    [RESTING_WEIGHTS] = percent_w,
    [WEIGHT_SLOT] = percent_w,
    [WEIGHT_SLOT_1] = percent_w,
    [EMBEDDINGS] = "use a smaller model",
    [UNPACKED_WEIGHTS] = "leave --compress-weight out",
    [KV_CACHE] = "change the third and fourth number of --percent (KV cache on GPU, on CPU), or %s",
    [KV_STAGING] = "use --cpu-cache-compute, or %s", /* on the GPU; on the CPU it is of no use */
    [ACTIVATIONS] = percent_h,
    [ACT_READING] = percent_h,
    [ACT_WRITING] = percent_h,
};

/* Returns advice on how to make the policy's block smaller. */
static const char *smaller_block(const Policy *p) {
    if (p->gbs > 1)
        return "lower --gpu-batch-size";
    return p->num_gpu_batches > 1 ? "lower --num-gpu-batches"
                                  : "use a smaller model, or shorten prompts or outputs";
}

/* Prints both numbers in MiB with one decimal, or with as many as it takes to tell them apart. */
static void print_apart(char needs[32], char has[32], Bytes need, Bytes have) {
    for (int digits = 1; digits == 1 || !strcmp(needs, has); digits++) {
        snprintf(needs, 32, "%.*f", digits, need / 1048576.0);
        snprintf(has, 32, "%.*f", digits, have / 1048576.0);
    }
}

int plan_refuse(const Plan *p, const Bytes capacity[NTIERS], bool placed, Error *err) {
    static const char *const flag[NTIERS] = {"--gpu-mem", "--cpu-mem", "--disk-mem"};
    const char *block = smaller_block(&p->policy);
    char needs[32], has[32], remedy[200];
    for (int t = 0; t < NTIERS; t++) {
        int worst = 0;
        if (p->total[t] <= capacity[t])
            continue;
        for (int id = 1; id < NREGIONS; id++)
            if (p->region[id][t].bytes > p->region[worst][t].bytes)
                worst = id;
        const Region *part = &p->region[worst][t];
        const bool block_only =
            !placed || !remedies[worst] || (worst == KV_STAGING && t == TIER_CPU);
        print_apart(needs, has, p->total[t], capacity[t]);
        snprintf(remedy, sizeof remedy, block_only ? "%s" : remedies[worst], block);
        return fail(err, EXIT_USAGE,
                    "the %s tier needs %s MiB and has %s MiB; its largest part is %s with %.1f "
                    "MiB: %s, or raise %s",
                    tier_name[t], needs, has, part->name, part->bytes / 1048576.0, remedy, flag[t]);
    }
    return 0;
}

int plan_fits(const Plan *p, const Bytes capacity[NTIERS], Error *err) {
    return plan_refuse(p, capacity, true, err);
}

int fit_policy(Policy *policy, const Checkpoint *checkpoint, const Task *task, Type act_type,
               const Bytes capacity[NTIERS], Error *err) {
    policy_defaults(policy);
    const int most = policy->workspaces;
    Bytes least = UINT64_MAX;
    for (policy->workspaces = most; policy->workspaces >= LEAST_WORKSPACES; policy->workspaces--)
        for (int home = TIER_GPU; home < NTIERS; home++) {
            policy->table_home = (Tier)home;
            Plan *p = plan_make(checkpoint, policy, task, act_type, err);
            const Bytes missing = p ? plan_missing(p, capacity) : least;
            if (missing < least) {
                least = missing;
                plan_fits(p, capacity, err);
            }
            plan_free(p);
            if (!missing)
                return 0;
        }
    policy->workspaces = most;
    return -1;
}

void fit_pieces(Policy *policy, const Checkpoint *checkpoint, const Task *task, Type act_type,
                const Bytes capacity[NTIERS]) {
    Error none;
    for (policy->piece_rows = LARGE_PIECE_ROWS; policy->piece_rows > PIECE_ROWS;
         policy->piece_rows /= 2) {
        Plan *p = plan_make(checkpoint, policy, task, act_type, &none);
        const bool fits = p && !plan_missing(p, capacity);
        plan_free(p);
        if (fits)
            return;
    }
}

// -------------------------------------------------------------------------------------------------
// Pools of KV pages
// -------------------------------------------------------------------------------------------------

void pool_open(PagePool *pool, int first, int npages) {
    *pool = (PagePool){.first = first, .npages = npages, .free = xcalloc(npages, 1)};
    memset(pool->free, true, npages);
}

int pool_take(PagePool *pool) {
    bool *page = memchr(pool->free + pool->hint, true, pool->npages - pool->hint);
    CHECK(page);
    *page = false;
    pool->used++;
    pool->hint = (int)(page - pool->free) + 1;
    raise_to(&pool->peak, pool->hint);
    return pool->first + pool->hint - 1;
}

void pool_give(PagePool *pool, int page) {
    page -= pool->first;
    CHECK(page >= 0 && page < pool->npages && !pool->free[page]);
    pool->free[page] = true;
    pool->used--;
    pool->hint = imin(pool->hint, page);
}

void pool_close(PagePool *pool) { free(pool->free); }
