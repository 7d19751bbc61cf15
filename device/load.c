/* load.c: before a run. The weights come to where they rest, and a GPU's kernels are met once. Read next: trace.c. */
#include <math.h>
#include <stdatomic.h>

#include "device/device.h"
#include "io/io.h"

/* Brings one tensor home in pieces; a real checkpoint's disk share already is. */
static int load_tensor(const WeightPlace *place, const Tensor *source, const Checkpoint *checkpoint, Device *device,
                       Error *err) {
    enum { PIECE = 1 << 19 }; /* each thread has one */
    size_t count = (size_t)source->rows * source->cols;
    f16 *piece = xcalloc(count < PIECE ? count : PIECE, sizeof *piece);
    int status = 0;
    for (size_t at = 0; at < count && !status; at += PIECE) {
        size_t n = count - at < PIECE ? count - at : PIECE;
        status = checkpoint_fill(checkpoint, piece, source, at, n, err);
        if (!status) device->upload(device, place->home, at, piece, n);
    }
    free(piece);
    return status;
}

/* The same packed, a row of groups at a time. */
static int load_packed(const WeightPlace *place, const Tensor *source, const Checkpoint *checkpoint, Device *device,
                       Error *err) {
    Tensor home = place->home;
    uint8_t *groups = xcalloc(home.cols, 1);
    f16 *rows = xcalloc((size_t)GROUP * source->cols, sizeof *rows);
    int status = 0;
    for (int g = 0; g < home.rows && !status; g++) {
        status = checkpoint_pack(checkpoint, groups, rows, source, g, err);
        if (!status) device->upload(device, home, (size_t)g * home.cols, groups, home.cols);
    }
    free(groups), free(rows);
    return status;
}

/* The same rounded, for a study. */
static int load_rounded(const WeightPlace *place, const Tensor *source, Quant study, const Checkpoint *checkpoint,
                        Device *device, Error *err) {
    const size_t cols = (size_t)source->cols;
    f16 *rows = xcalloc(study.group * cols, sizeof *rows);
    int status = 0;
    for (int row = 0; row < source->rows && !status; row += study.group) {
        const int n = imin(study.group, source->rows - row);
        status = checkpoint_fill(checkpoint, rows, source, row * cols, n * cols, err) ||
                 checkpoint_finite(checkpoint, rows, source, row * cols, n * cols, err);
        for (size_t c = 0; c < cols && !status; c++) quant_round(rows + c, cols, n, study);
        if (!status) device->upload(device, place->home, row * cols, rows, n * cols);
    }
    free(rows);
    return status;
}

/* All weights, by several threads; the first that fails stops the others, and says why. */
typedef struct {
    const Plan *plan;
    const Checkpoint *checkpoint;
    Device *device;
    atomic_int *failures;
    Error *err;
} Loading;

static void load_tensors(const void *loading, int first, int n) {
    const Loading *a = loading;
    const int l = a->plan->config.l;
    for (int i = first; i < first + n && !atomic_load(a->failures); i++) {
        const int j = i / NROLES, r = i % NROLES;
        Error err;
        const WeightPlace *place = j < l ? &a->plan->weight[j][r] : &a->plan->global[i - l * NROLES];
        const Tensor *source = j < l ? &a->checkpoint->layer[j][r] : &a->checkpoint->global[i - l * NROLES];
        if (!source->rows || place->home.file) continue;
        const Quant study = j < l && role_is_matrix((Role)r) ? a->plan->policy.weight_study : (Quant){0};
        const int status = place->home.type == U8 ? load_packed(place, source, a->checkpoint, a->device, &err)
                           : study.bits           ? load_rounded(place, source, study, a->checkpoint, a->device, &err)
                                                  : load_tensor(place, source, a->checkpoint, a->device, &err);
        if (status && !atomic_fetch_add(a->failures, 1)) *a->err = err;
    }
}

int weights_load(const Plan *plan, const Checkpoint *checkpoint, Device *device, Error *err) {
    atomic_int failures = 0;
    host_share(INFINITY, plan->config.l * NROLES + NGLOBALS, load_tensors,
               &(Loading){plan, checkpoint, device, &failures, err});
    return failures ? -1 : 0;
}

/* Layer 0's tensors as batches of so many rows take them. */
static void warm_layer(const Plan *plan, int slot, int rows, Tensor w[NROLES]) {
    for (int r = 0; r < NROLES; r++) {
        w[r] = plan_weight(plan, &plan->weight[0][r], slot);
        if (w[r].type == U8 && rows > plan->packed_rows) w[r] = plan_f16(plan, (Role)r);
    }
}

int opt_warm_up(Device *device, const Plan *plan, Error *err) {
    const int sizes[] = {plan->piece_rows, plan->max_seqs};
    const int slot =
        plan->region[WEIGHT_SLOT][TIER_GPU].bytes < plan->region[WEIGHT_SLOT_1][TIER_GPU].bytes; /* the larger */
    const Op project = {.lane = PROJECT, .kind = OTHER}, finish = {.lane = FINISH, .kind = OTHER};
    Poster to = {.device = device, .overlap = true, .err = err};
    Tensor w[NROLES];
    for (int i = 0; i < 2; i++) {
        const int n = sizes[i];
        Tensor o = plan_view(plan, ATTENDED, TIER_GPU, 0, 0, n);
        Tensor x = plan_bytes(plan, QKV, TIER_GPU, 0, plan->act_type, plan->config.h1); /* q, k and v are not wanted */
        x.rows = n;
        warm_layer(plan, slot, n, w);
        opt_project(&to, project, plan, w, plan_view(plan, QKV, TIER_GPU, 0, 0, n), o);
        if (!post_drain(&to)) return -1;
        opt_finish(&to, finish, plan, w, x, o);
        if (!post_drain(&to)) return -1;
    }
    if (is_last(&plan->config)) {
        Tensor x = plan_view(plan, LAST_ROWS, TIER_GPU, 0, 0, plan->head_chunk);
        Tensor logits = plan_view(plan, LOGITS, TIER_GPU, 0, 0, plan->head_chunk);
        opt_logits(&to, project, plan, plan_weight(plan, &plan->global[plan->head], slot), logits, x);
        if (!post_drain(&to)) return -1;
    }
    memset(device->count, 0, sizeof device->count);
    return 0;
}
