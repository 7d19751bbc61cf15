/* plan.c: what rests on which tier (section 4.2, "tensor placement"), and the plan of every byte.
 *
 * The plan comes first: from model, policy and task it lays out the GPU, the CPU and the disk tier
 * completely, before anything is allocated. Each tier is then one allocation, and the loop
 * allocates no tensor memory. A tier is a row of regions, one behind the other:
 *
 *     | weights | embeddings | weight slots | KV cache | KV staging | activations | workspaces .. |
 *
 *   Weights      whole tensors of the decoder layers, placed by error diffusion (place_weights)
 *   KV cache     pages of page_tokens tokens of one sequence in one layer. A tier's pool lies as
 *                (layer, K|V, page, token, h1), so that one page index serves all layers, K and V
 *                lie apart, and neighbouring pages of a layer cross a link as one copy.
 *   Activations  rows of each GPU batch, by sequence
 * Sequences are dealt to the tiers within each GPU batch, so that the block as a whole has the
 * policy's fractions (deal_block). branches/walk.c counts how many rows and pages this takes.
 *
 * plan_make, in the middle, is the table of contents: it calls the chapters before it, and others
 * that stand at the end.
 * Read next: device/depend.c. */
#include <limits.h>
#include <math.h>

#include "plan.h"
#include "io/io.h"

const char *const tier_name[NTIERS] = {"GPU", "CPU", "disk"};

// -------------------------------------------------------------------------------------------------
// Regions
//
// Counted here: the bytes of each tier (Plan.total), and those of the offload file.
// -------------------------------------------------------------------------------------------------

/* Lays out a region after those that its tier already has, and numbers its cells. The disk's share
 * of a real checkpoint stays where it is: it is counted, but is not part of the offload file. */
static void lay_out(Plan *p, RegionId id, Tier tier, Region r, bool in_checkpoint) {
    r.offset = tier != TIER_DISK ? p->total[tier] : in_checkpoint ? SIZE_MAX : p->offload_bytes;
    if (tier == TIER_DISK && !in_checkpoint)
        p->offload_bytes += r.bytes;
    p->total[tier] += r.bytes;
    r.cell = p->ncells; /* 0 for the first region, weights on the GPU, which no op writes */
    p->ncells += id == KV_CACHE      ? (p->batches + p->policy.flights) * p->config.l
                 : id == ACTIVATIONS ? p->batches
                                     : r.slots;
    p->region[id][tier] = r;
}

void add_region(Plan *p, Wanted wanted) {
    Region r = {wanted.name, wanted.type, wanted.rows, wanted.cols, .slots = wanted.slots};
    r.bytes = whole_lines((Bytes)r.rows * r.cols * r.slots * type_bytes(r.type));
    lay_out(p, wanted.id, wanted.tier, r, false);
}

// -------------------------------------------------------------------------------------------------
// The weights at rest
//
// Counted here, tier by tier: the bytes of all layers (the region RESTING_WEIGHTS) and of each
// layer (Plan.layer_bytes). What a layer has off the GPU is its slab, which streams to a slot on
// the GPU:
//
//     home on the CPU        home on disk
//     Q_W K_W V_W ..    |    FC1_W FC1_B ..    each role begins at its slab_offset
//     <-- the CPU's --->     <-- the disk's -->
//
// DIFFERS: a tensor is not split, so a fraction of the weights is met only to within one tensor, or
// within q, k and v.
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
            int joined = r == Q_W ? 3 : 1; /* q, k and v move together */
            opt_role_shape(config, r, &rows, &cols);
            /* a matrix has a bias number for each row, a layernorm one for each weight */
            Tier t = diffuse(&d, ((double)rows * cols + (rows == 1 ? cols : rows)) * joined);
            for (int same = 0; same < 2 * joined; same++) /* with the biases behind them */
                home[j][r + same] = t;
        }
    }
}

/* Returns a tensor of the checkpoint as it rests at this place of a region: in F16, or packed. In a
 * packed checkpoint a packed tensor has the shape of its groups already. The rows of a layer's
 * matrix fill whole groups (see checkpoint_packs). */
static Tensor as_stored(Tensor t, bool packed, RegionId id, Tier tier, Bytes offset) {
    bool packs = packed && t.type != U8;
    int cols = packs ? t.cols * GROUP_BYTES : t.cols;
    return (Tensor){.tier = tier,
                    .type = packed ? U8 : F16,
                    .offset = offset,
                    .rows = packs ? ceil_div(t.rows, GROUP) : t.rows,
                    .cols = cols,
                    .ld = cols,
                    .region = id};
}

/* A dummy checkpoint has no file; its weights are made up, and written to the offload file. */
bool copied_to_disk(const Plan *p, const Checkpoint *c) {
    return c->dummy || p->policy.weight_study.bits || (p->policy.weight_packed && !c->packed);
}

/* Fills order with the roles of a layer as they lie in each tier's share of its slab; t holds its
 * tensors in the checkpoint. */
static void slab_order(Role order[NROLES], const Tensor *t);

/* Returns where role r ends if it begins at `at`: at a whole cache line, unless the next role must
 * lie directly behind it. */
static Bytes role_end(Role r, Bytes at, Bytes bytes) {
    return role_goes_on(r) ? at + bytes : whole_lines(at + bytes);
}

/* Gives role r of layer j its home on a tier, and its place in the layer's slab. *end is where the
 * tier's weights end so far, and where they end now. */
static void give_home(Plan *p, const Checkpoint *c, int j, Role r, Tier tier, Bytes *end) {
    Tensor t = c->layer[j][r];
    WeightPlace *w = &p->weight[j][r];
    w->home =
        as_stored(t, p->policy.weight_packed && role_is_matrix(r), RESTING_WEIGHTS, tier, *end);
    Bytes size = tensor_bytes(w->home), padded = role_end(r, *end, size) - *end;
    w->slab_offset =
        p->layer_bytes[TIER_CPU][j] + p->layer_bytes[TIER_DISK][j]; /* the CPU's come first */
    /* In the slot each tensor is padded to a whole cache line. On the CPU it is padded at home too,
     * so the padding moves with it, and the CPU's share is one copy. In a file nothing is padded.
     */
    w->slab_bytes = tier == TIER_DISK ? size : padded;
    if (tier == TIER_DISK && !copied_to_disk(p, c))
        w->home = t;
    p->layer_bytes[tier][j] += padded;
    *end += padded;
}

/* Gives every tensor of the decoder layers its home, and adds their regions. */
static void plan_layers(Plan *p, const Checkpoint *c) {
    int l = p->config.l;
    Bytes bytes[NTIERS] = {0};
    Tier(*home)[NROLES] = xcalloc(l, sizeof *home);
    place_weights(home, &p->config, p->policy.wg, p->policy.wc);
    for (int j = 0; j < l; j++) {
        slab_order(p->slab_order[j], c->layer[j]);
        for (Tier tier = TIER_GPU; tier < NTIERS; tier++)
            for (int i = 0; i < NROLES; i++) {
                Role r = p->slab_order[j][i];
                if (home[j][r] == tier)
                    give_home(p, c, j, r, tier, &bytes[tier]);
            }
    }
    for (Tier t = TIER_GPU; t < NTIERS; t++) {
        bool file = t == TIER_DISK && !copied_to_disk(p, c);
        p->achieved[OF_WEIGHTS][t] = (double)bytes[t] / (bytes[0] + bytes[1] + bytes[2]);
        lay_out(
            p, RESTING_WEIGHTS, t,
            (Region){file ? "weights (checkpoint)" : "weights", U8, .slots = 1, .bytes = bytes[t]},
            file);
    }
    free(home);
}

// -------------------------------------------------------------------------------------------------
// The weights while they are used
//
// Counted here: the largest slab that each of the two slots must hold, and the F16 matrices of a
// packed layer.
// -------------------------------------------------------------------------------------------------

/* Adds the weight slots. The layers that stream take the two slots in turn, sweep after sweep, so
 * two sweeps over all layers show everything that a slot ever holds. If three layers stream:
 *
 *     sweep     0          1          2
 *     layer     0  1  2    0  1  2    0 ..
 *     slot      0  1  0    1  0  1    0 ..       */
static void plan_slots(Plan *p) {
    Bytes most[2][2] = {{0}}; /* [slot][tier]: on the CPU, only what comes from disk */
    int layers = p->config.l + 1;
    for (int j = 0, turn = 0; j < 2 * layers; j++) {
        Bytes from_disk = p->layer_bytes[TIER_DISK][j % layers],
              all = p->layer_bytes[TIER_CPU][j % layers] + from_disk;
        if (!all)
            continue;
        Bytes *slot = most[turn++ % 2];
        slot[TIER_GPU] = size_max(slot[TIER_GPU], all);
        slot[TIER_CPU] = size_max(slot[TIER_CPU], from_disk);
    }
    for (int slot = 0; slot < 2; slot++)
        for (Tier t = TIER_GPU; t <= TIER_CPU; t++)
            add_region(
                p, (Wanted){WEIGHT_SLOT + slot, t, "weight staging", F16, 1, most[slot][t] / 2, 1});
}

/* Returns true if a GPU computes, real or simulated: its activations are F16. Those of the host
 * device are F32. */
static bool gpu_computes(const Plan *p) { return p->act_type == F16; }

// -------------------------------------------------------------------------------------------------
// The KV cache and the activations
//
// Counted here: pages times their bytes, and rows times h1. branches/walk.c has counted both.
// -------------------------------------------------------------------------------------------------

/* Return the type of the numbers in a page, and how many of them are a token's K (or V). */
static Type kv_type(const Plan *p) { return p->policy.cache_packed ? U8 : F16; }
static int kv_cols(const Plan *p) { return p->kv_row / type_bytes(kv_type(p)); }

/* Adds, tier by tier, the pages of the cache, their staging, and the activations at rest. */
static void plan_cache_and_activations(Plan *p) {
    const OptConfig *c = &p->config;
    int page = p->policy.page_tokens;
    p->kv_row =
        p->policy.cache_packed ? c->nh * quant_bytes(c->h1 / c->nh) : (Bytes)c->h1 * sizeof(f16);
    for (Tier t = TIER_GPU; t < NTIERS; t++) {
        /* the slots are K and V of each layer in turn */
        add_region(p, (Wanted){KV_CACHE, t, "KV cache", kv_type(p),
                               p->policy.flights * p->npages[t] * page, kv_cols(p), 2 * c->l});
        if (t < TIER_DISK)
            add_region(p, (Wanted){KV_STAGING, t, "KV staging", kv_type(p),
                                   p->staged_pages[t] * page, kv_cols(p), 4});
        add_region(p, (Wanted){ACTIVATIONS, t, "activations", p->act_type,
                               p->act_first[t][p->batches], c->h1, 1});
    }
}

// -------------------------------------------------------------------------------------------------
// The plan of a task
// -------------------------------------------------------------------------------------------------

static int check_prompts(const OptConfig *config, const Policy *policy, const Task *task,
                         Error *err);
/* They add regions as the functions above do; of what, the end of the file says. */
static void plan_globals(Plan *p, const Checkpoint *c);
static void plan_unpacked(Plan *p);
static void plan_layer_workspaces(Plan *p);
static void plan_end_workspaces(Plan *p, const Task *task);
static void plan_choices(Plan *p);
static void plan_tables(Plan *p, const Task *task);

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
    p->chooser = gpu_computes(p) && task->sampled && !task->scored ? TIER_CPU : TIER_GPU;
    p->head = checkpoint->global[LM_HEAD].rows ? LM_HEAD : TOK_EMBED;
    p->weight = xcalloc(l, sizeof *p->weight);
    p->slab_order = xcalloc(l, sizeof *p->slab_order);
    for (int t = 0; t < NTIERS; t++)
        p->layer_bytes[t] = xcalloc(l + 1, sizeof(Bytes));
    plan_layers(p, checkpoint);
    plan_globals(p, checkpoint);
    plan_slots(p);
    plan_unpacked(p);
    plan_batches(p, task); /* branches/walk.c counts what the regions below need */
    plan_cache_and_activations(p);
    plan_layer_workspaces(p);
    plan_end_workspaces(p, task);
    plan_choices(p);
    plan_tables(p, task);
    return p;
}

// -------------------------------------------------------------------------------------------------
// Views of the regions
//
// The schedule sees the tiers only through these.
// -------------------------------------------------------------------------------------------------

Tensor plan_view(const Plan *p, RegionId id, Tier tier, long slot, int first, int rows) {
    const Region *r = &p->region[id][tier];
    if (!r->slots)
        return (Tensor){.tier = tier, .region = id};
    slot %= r->slots;
    Bytes row = r->cols * type_bytes(r->type);
    return (Tensor){.tier = tier,
                    .type = r->type,
                    .offset = r->offset + ((Bytes)slot * r->rows + first) * row,
                    .rows = rows,
                    .cols = r->cols,
                    .ld = r->cols,
                    .region = id,
                    .cell = r->cell + slot};
}

Tensor plan_bytes(const Plan *p, RegionId id, Tier tier, Bytes at, Type type, int n) {
    Tensor t = plan_view(p, id, tier, 0, 0, 1);
    t.type = type;
    t.offset += at;
    t.cols = n;
    t.ld = n;
    return t;
}

Tensor plan_weight(const Plan *p, const WeightPlace *place, int slot) {
    Tensor home = place->home;
    if (home.tier == TIER_GPU || !home.rows)
        return home;
    Type type = home.type == U8 ? U8 : F16; /* on its way F32 and BF16 become F16 */
    Tensor t = plan_bytes(p, WEIGHT_SLOT + slot, TIER_GPU, place->slab_offset, type, home.cols);
    t.rows = home.rows;
    return t;
}

int cache_cell(const Plan *p, Tier tier, int batch, int j) {
    return p->region[KV_CACHE][tier].cell + batch * p->config.l + j;
}

PageTable plan_pages(const Plan *p, RegionId id, Tier tier, long slot, int npages) {
    int page = p->policy.page_tokens;
    return (PageTable){.k = plan_view(p, id, tier, slot, 0, npages * page),
                       .v = plan_view(p, id, tier, slot + 1, 0, npages * page),
                       .page_tokens = page,
                       .nh = p->config.nh};
}

// -------------------------------------------------------------------------------------------------
// The trunk ends here: what follows is checked before a plan is made, or is room for what a first
// reader passes by: embeddings, packed weights that are unpacked, workspaces (RegionId in plan.h
// says what each is for), sparse attention, index tables. On a first reading go on with
// device/depend.c.
// -------------------------------------------------------------------------------------------------

void policy_defaults(Policy *policy) {
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

/* Returns true if role a comes before role b in a slab. q, k and v are first; the others follow in
 * the order of the checkpoint, so that neighbours on disk are neighbours in the slab and are read
 * as one. In our packed copies q, k and v are neighbours too; in other checkpoints they take a few
 * more reads. */
static bool comes_before(const Tensor *t, Role a, Role b) {
    if (imin(role_place(a), role_place(b)) <= role_place(V_B))
        return role_place(a) < role_place(b);
    return t[a].file < t[b].file || (t[a].file == t[b].file && t[a].offset < t[b].offset);
}

static void slab_order(Role order[NROLES], const Tensor *t) {
    for (int r = 0, at; r < NROLES; r++) {
        for (at = r; at > 0 && comes_before(t, r, order[at - 1]); at--)
            order[at] = order[at - 1];
        order[at] = r;
    }
}

/* Adds room for a layer's matrices in F16. Only a GPU needs it, for batches of many rows. */
static void plan_unpacked(Plan *p) {
    Bytes bytes = 0;
    p->packed_rows = gpu_computes(p) ? PACKED_ROWS : INT_MAX;
    if (!p->policy.weight_packed || !gpu_computes(p))
        return;
    for (int r = 0; r < NROLES; r++) {
        int rows, cols;
        opt_role_shape(&p->config, r, &rows, &cols);
        if (!role_is_matrix(r))
            continue;
        p->unpacked_at[r] = bytes;
        bytes = role_end(r, bytes, (Bytes)rows * cols * sizeof(f16));
    }
    add_region(p, (Wanted){UNPACKED_WEIGHTS, TIER_GPU, "unpacked weights", F16, 1, bytes / 2, 1});
}

/* Adds workspaces, of which those with 0 rows are not needed. */
static void add_workspaces(Plan *p, const Wanted *workspace, int n) {
    for (int i = 0; i < n; i++)
        add_region(p, workspace[i]);
}

/* Adds the workspaces of the layers. */
static void plan_layer_workspaces(Plan *p) {
    const OptConfig *c = &p->config;
    Type act = p->act_type, kv = kv_type(p);
    int h1 = c->h1, piece = p->piece_rows, slots = p->piece_slots;
    int norm = c->pre_norm ? piece : 0; /* else rows are normalized in place */
    /* of a piece, the rows whose new k and v leave the GPU */
    int leaving = imin(p->off_rows, piece);
    /* the sequences for which the CPU attends: one row each, since it only decodes */
    int delegated = p->policy.delegated ? p->off_seqs : 0;
    /* the rows of x that rest below the GPU; if there are none, x is computed where it rests */
    int below = p->act_first[TIER_CPU][p->batches] + p->act_first[TIER_DISK][p->batches];
    const Wanted workspace[] = {
        {ACT_READING, TIER_CPU, "activation staging, reading", act, p->disk_act_rows, h1, 2},
        {ACT_WRITING, TIER_CPU, "activation staging, writing", act, p->disk_act_rows, h1, 2},
        {HIDDEN, TIER_GPU, "workspace: x", act, below ? p->max_rows : 0, h1, p->square_slots},
        {QKV, TIER_GPU, "workspace: q, k, v", F16, piece, 3 * h1, slots},
        {NEW_KV_PACKED, TIER_GPU, "workspace: packed k, v", U8, kv == U8 ? leaving : 0,
         2 * kv_cols(p), slots},
        {QUERY, TIER_CPU, "attention: q", F16, delegated, h1, slots},
        {NEW_KV, TIER_CPU, "new k, v", kv, leaving, 2 * kv_cols(p), slots},
        {ATTENDED, TIER_GPU, "workspace: attention", act, piece, h1, slots},
        {ATTENDED, TIER_CPU, "attention: result", act, delegated, h1, slots},
        {NORM_1, TIER_GPU, "workspace: norm 1", act, norm, h1, 1},
        {NORM_2, TIER_GPU, "workspace: norm 2", act, norm, h1, 1},
        {MLP, TIER_GPU, "workspace: mlp", act, piece, c->h2, 1},
    };
    add_workspaces(p, workspace, sizeof workspace / sizeof *workspace);
}

/* Adds the workspaces before the first layer and behind the last one of this stage: those of the
 * embedding, of the head, and of the pipeline's hidden states. */
static void plan_end_workspaces(Plan *p, const Task *task) {
    const OptConfig *c = &p->config;
    Type act = p->act_type;
    int rows = p->max_rows, slots = p->square_slots;
    bool embeds = is_first_stage(c), has_head = is_last_stage(c), projected = c->embed != c->h1;
    /* the CPU gathers the rows of a token table that is not on the GPU */
    bool gathered = p->policy.table_home != TIER_GPU;
    bool to_cpu = task->keep_logits || p->chooser == TIER_CPU;
    const Wanted workspace[] = {
        {EMBEDDED, TIER_GPU, "workspace: embedding", act, embeds && projected ? rows : 0, c->embed,
         slots},
        {EMBEDDED, TIER_CPU, "embedding rows", act, embeds && gathered ? rows : 0, c->embed, slots},
        {HEAD_ROWS, TIER_GPU, "workspace: last rows", act, has_head ? p->head_rows : 0, c->h1,
         slots},
        {HEAD_OUT, TIER_GPU, "workspace: head", act, has_head && projected ? p->head_chunk : 0,
         c->embed, 1},
        {LOGITS, TIER_GPU, "logits", F32, has_head ? p->head_chunk : 0, c->vocab, 1},
        {LOGITS, TIER_CPU, "logits", F32, has_head && to_cpu ? p->max_seqs : 0, c->vocab,
         task->keep_logits ? p->batches : slots},
        {RECEIVED, TIER_CPU, "states received", act, embeds ? 0 : rows, c->h1, p->batches},
        {SENDING, TIER_CPU, "states to send", act, has_head ? 0 : rows, c->h1, p->batches},
    };
    add_workspaces(p, workspace, sizeof workspace / sizeof *workspace);
}

/* Adds the lists of sparse attention: for each query and head, the chosen tokens and their weights.
 */
static void plan_choices(Plan *p) {
    /* the most that a query and head choose */
    int most = is_sparse(&p->policy) ? sparse_tokens(p->policy.sparsity, p->max_len) : 0;
    int cols = p->config.nh * most;
    for (Tier t = TIER_GPU; t <= TIER_CPU; t++) {
        int seqs = t == TIER_GPU ? p->max_seqs : p->off_seqs;
        add_region(p, (Wanted){CHOSEN, t, "attention: chosen tokens", I32, seqs, cols, 1});
        add_region(p, (Wanted){CHOSEN_PROBS, t, "attention: chosen tokens", F32, seqs, cols, 1});
    }
}

/* Gives the tensors outside the layers their homes behind the layers, and adds their regions. Small
 * ones always rest on the GPU, and tables at policy.table_home. DIFFERS: the policy's fractions do
 * not count them. */
static void plan_globals(Plan *p, const Checkpoint *c) {
    Bytes bytes[NTIERS] = {0};
    /* on disk, tables are the checkpoint's unless packing changes them (see copied_to_disk) */
    bool copied = c->dummy || (p->policy.head_packed && c->global[p->head].type != U8);
    for (Global g = 0; g < NGLOBALS; g++) {
        Tensor t = c->global[g];
        bool table = g == TOK_EMBED || g == LM_HEAD;
        Tier tier = table ? p->policy.table_home : TIER_GPU;
        if (!t.rows)
            continue;
        Tensor stored = as_stored(t, p->policy.head_packed && table, EMBEDDINGS, tier,
                                  p->total[tier] + bytes[tier]);
        Bytes size = tensor_bytes(stored), padded = whole_lines(size);
        p->global[g].slab_bytes = tier == TIER_DISK ? size : padded;
        p->global[g].home = tier == TIER_DISK && !copied ? t : stored;
        if (g == p->head && is_last_stage(&p->config))
            p->layer_bytes[tier][p->config.l] = padded; /* the head streams as layer l */
        bytes[tier] += padded;
    }
    for (Tier t = TIER_GPU; t < NTIERS; t++) {
        bool file = t == TIER_DISK && !copied;
        lay_out(p, EMBEDDINGS, t,
                (Region){file ? "embeddings (checkpoint)" : "embeddings", U8, .slots = 1,
                         .bytes = bytes[t]},
                file);
    }
}

/* Adds the index tables and the results of each batch; the GPU and the CPU each have a copy.
 * batch.c lays out the tables: four integers for each row, four for each sequence, two page tables,
 * the number of each row that the head needs, and in a scored task the token after that row. */
static void plan_tables(Plan *p, const Task *task) {
    bool last = is_last_stage(&p->config), scored = task->scored;
    Bytes rows = p->max_rows, seqs = p->max_seqs;
    Bytes integers =
        4 * rows + 4 * seqs + 2 * seqs * p->max_pages + p->head_rows * (scored ? 2 : 1);
    int ints = whole_lines(4 * integers) / 4, batches = p->batches;
    int chosen = scored || !last ? 0 : p->max_seqs, scores = scored && last ? p->head_rows : 0;
    for (Tier t = TIER_GPU; t <= TIER_CPU; t++) {
        add_region(p, (Wanted){INDEX_TABLES, t, "index tables", I32, 1, ints, 2 * batches});
        add_region(p, (Wanted){NEW_TOKENS, t, "new tokens", I32, 1, chosen, batches});
        add_region(p, (Wanted){LOG_PROBS, t, "scores", F32, 1, scores, batches});
        add_region(p, (Wanted){GREEDY, t, "scores", I32, 1, scores, batches});
    }
}

Tensor plan_f16(const Plan *p, Role role) {
    int rows, cols;
    opt_role_shape(&p->config, role, &rows, &cols);
    Tensor t = plan_bytes(p, UNPACKED_WEIGHTS, TIER_GPU, p->unpacked_at[role], F16, cols);
    t.rows = rows;
    return t;
}

void plan_free(Plan *p) {
    if (!p)
        return;
    for (int t = 0; t < NTIERS; t++) {
        free(p->act_rows[t]);
        free(p->act_first[t]);
        free(p->layer_bytes[t]);
    }
    free(p->weight);
    free(p->slab_order);
    free(p);
}
