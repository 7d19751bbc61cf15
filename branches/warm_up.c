/* warm_up.c: a GPU before its first prompts.
 *
 * A GPU's library chooses and loads a kernel when it first meets a shape. Here it meets all shapes
 * of products that a run has, so that the first prompts need not wait. The ops are those of the
 * model (opt_model.c) at the places of the plan; there are no batches yet.
 * Read next: device/ops.c. */
#include "device/device.h"

int gpu_warm_up(Device *device, const Plan *plan, Error *err) {
    /* the rows of a prefill, and of a decoding step */
    int sizes[] = {plan->piece_rows, plan->max_seqs};
    /* the larger of the two staging slots: layer 0 need not fit the other */
    int slot =
        plan->region[WEIGHT_SLOT][TIER_GPU].bytes < plan->region[WEIGHT_SLOT_1][TIER_GPU].bytes;
    Call project = {.lane = PROJECT, .kind = OTHER}, finish = {.lane = FINISH, .kind = OTHER};
    Poster to = {.device = device, .overlap = false, .err = err};
    /* The ops below read these regions, which nobody has written yet: they get zeros. */
    RegionId unwritten[] = {ATTENDED, HEAD_ROWS, UNPACKED_WEIGHTS, WEIGHT_SLOT + slot};
    for (int i = 0; i < 4; i++) {
        int rows = plan->region[unwritten[i]][TIER_GPU].rows;
        Tensor t = plan_view(plan, unwritten[i], TIER_GPU, 0, 0, rows);
        void *zeros = xcalloc(tensor_bytes(t), 1);
        device->upload(device, t, 0, zeros, (size_t)rows * t.cols);
        free(zeros);
    }
    /* All layers have the products of layer 0. Packed matrices are used directly or unpacked, as
     * the number of rows decides. */
    for (int i = 0; i < 2; i++) {
        Tensor w[NROLES];
        for (int r = 0; r < NROLES; r++) {
            w[r] = plan_weight(plan, &plan->weight[0][r], slot);
            if (w[r].type == U8 && sizes[i] > plan->packed_rows)
                w[r] = plan_f16(plan, r);
        }
        Tensor o = plan_view(plan, ATTENDED, TIER_GPU, 0, 0, sizes[i]);
        Tensor qkv = plan_view(plan, QKV, TIER_GPU, 0, 0, sizes[i]);
        /* Values do not matter: o stands in for x as opt_project's input, and x overwrites q, k
         * and v, which nothing reads. */
        Tensor x = plan_bytes(plan, QKV, TIER_GPU, 0, plan->act_type, plan->config.h1);
        x.rows = sizes[i];
        opt_project(&to, project, plan, w, qkv, o);
        opt_finish(&to, finish, plan, w, x, o);
    }
    /* The head computes as many rows at a time as its logits have room for. */
    if (is_last_stage(&plan->config)) {
        Tensor x = plan_view(plan, HEAD_ROWS, TIER_GPU, 0, 0, plan->head_chunk);
        Tensor logits = plan_view(plan, LOGITS, TIER_GPU, 0, 0, plan->head_chunk);
        Tensor head = plan_weight(plan, &plan->global[plan->head], slot);
        opt_logits(&to, project, plan, head, logits, x);
    }
    memset(device->count, 0, sizeof device->count);
    return to.failed ? -1 : 0;
}
