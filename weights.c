/* weights.c: how the weights of a layer come to the GPU while the layer before computes
 * (section 4.2).
 *
 * The layers that stream take two slots in turn: one has the layer that computes, the other
 * receives the next. A sweep ends by loading layer 0 of the next one. Read next: batch.c. */
#include "schedule.h"

// clang-format off
/* The tensors of a layer that do not rest on the GPU stream as one slab. While the layer before
 * computes for its K batches, part k of the slab is loaded beside batch k. Here K is 3, and fc2 is
 * on disk (biases and norms are not drawn):
 *
 *   slab       |  cpu_slab                      |  disk_slab    |
 *   tensors    | q | k | v | o |      fc1       |      fc2      |
 *   parts      |     0    |    1     |    2     |  0 |  1  |  2 |
 *
 * The CPU's share and the disk's share are each cut into K equal parts, and part k has the k-th of
 * both. Its moves bring the bytes of each tensor that lie in it from the tensor's home to their
 * place in the slot: those of part 0 are of q, k, v and fc2. */
// clang-format on

/* Returns where part k of K equal parts begins, at a whole cache line. */
static Bytes part_begin(Bytes bytes, int k, int K) { return bytes / 64 * k / K * 64; }

/* Adds the ways of bytes first .. end-1 of layer j's slab to the slot of run->next. */
static void add_slab(Run *run, int j, Bytes first, Bytes end) {
    const Plan *p = run->plan;
    RegionId slot = (RegionId)(WEIGHT_SLOT + run->next.slot);
    for (int i = 0; i < (is_head(run, j) ? 1 : NROLES); i++) {
        const WeightPlace *place =
            is_head(run, j) ? &p->global[p->head] : &p->weight[j][p->slab_order[j][i]];
        Bytes begin = place->slab_offset, from = size_max(first, begin);
        Bytes until = size_min(end, begin + place->slab_bytes);
        Tensor src = place->home;
        if (src.tier == TIER_GPU || from >= until)
            continue;
        /* The slab holds F16, the checkpoint perhaps numbers of 4 bytes: so count elements. Packed
         * bytes count as F16, two at a time. */
        if (src.type == U8)
            src.type = F16;
        src.rows = 1;
        src.cols = (int)((until - from) / 2);
        src.offset += (from - begin) / 2 * type_bytes(src.type);
        /* the disk's share of the slab lies behind the CPU's, which needs no landing */
        Tensor landing =
            plan_bytes(p, slot, TIER_CPU, from - p->layer_bytes[TIER_CPU][j], F16, src.cols);
        add_way(run, plan_bytes(p, slot, TIER_GPU, from, F16, src.cols), landing, src, false);
    }
}

/* Loads part k of K of layer j into the slot of run->next. */
static void load_part(Run *run, int j, int k, int K) {
    const Plan *p = run->plan;
    Bytes cpu = p->layer_bytes[TIER_CPU][j], disk = p->layer_bytes[TIER_DISK][j];
    if (!cpu && !disk)
        return;
    if (!k)
        run->next = (LayerSlot){.slot = (int)(run->weight_turn++ % 2)};
    add_slab(run, j, part_begin(cpu, k, K), part_begin(cpu, k + 1, K));
    add_slab(run, j, cpu + part_begin(disk, k, K), cpu + part_begin(disk, k + 1, K));
    Call square = square_call(run, j, k);
    square.i += run->next_is_layer0;
    carry(run, call_of(square, W_LOAD, WEIGHT));
}

/* Returns true if some flight will sweep at least once more. */
static bool goes_on(const Run *run) {
    for (int g = 0; g < run->plan->policy.flights; g++)
        if (flight_goes_on(&run->flights[g]))
            return true;
    return false;
}

void load_weight(Run *run, int j, int k) {
    if (j > run->l) {
        if (!goes_on(run))
            return;
        run->next_is_layer0 = true;
        j = 0;
    }
    load_part(run, j, k, run->flight->K);
}

void begin_weights(Run *run) {
    if (!run->next_is_layer0) {
        run->weight_turn +=
            run->weight_turn % 2; /* begin with the first slot, as plan_slots assumes */
        load_part(run, 0, 0, 1);
    }
    run->next_is_layer0 = false;
    run->weight_turn_before = run->weight_turn;
}

void turn_weights(Run *run) {
    run->now = run->next;
    run->next = (LayerSlot){0};
}

void keep_layer0(Run *run) {
    run->next = run->now;
    run->next_is_layer0 = true;
    run->weight_turn = run->weight_turn_before;
}

/* For a batch of more than packed_rows rows, packed matrices are first unpacked to F16, once for
 * each layer and sweep, before the first such batch. q, k and v are unpacked on PROJECT and the
 * other matrices on FINISH, because each of these lanes has then finished the layer before. */
void ready_weights(Run *run, Tensor w[NROLES]) {
    const Plan *p = run->plan;
    bool many_rows = run->square.batch->rows > p->packed_rows;
    for (int r = 0; r < NROLES; r++) {
        Tensor stored = plan_weight(p, &p->weight[run->square.call.j][r], run->now.slot);
        bool unpack = stored.type == U8 && many_rows;
        w[r] = unpack ? plan_f16(p, (Role)r) : stored;
        if (unpack && !run->now.unpacked)
            post(run->poster,
                 op_unpack(call_on(run, r < O_W ? PROJECT : FINISH, WEIGHT), w[r], stored));
    }
    run->now.unpacked |= many_rows;
}
