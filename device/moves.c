/* moves.c: copies between tiers, in one hop or in two (section 4.2).
 *
 * What rests on disk comes to the GPU by way of the CPU, and goes back the same way: two ops on two lanes, so that the disk
 * can read the next part while the link carries this one. Read next: lanes.c, the devices that carry ops out. */
#include <limits.h>

#include "device/device.h"

/* Whether a dense view begins where another ends, and its users are the same. Both together have no more columns than an
 * int counts. */
static bool continues(Tensor before, Tensor t) {
    return before.cols <= INT_MAX - t.rows * t.cols && before.tier == t.tier && before.file == t.file &&
           before.region == t.region && before.cell == t.cell && before.type == t.type &&
           before.offset + tensor_bytes(before) == t.offset;
}

int add_move(Move *moves, int n, Tensor dst, Tensor src) {
    Move *last = n ? &moves[n - 1] : NULL;
    if (!last || !continues(last->dst, dst) || !continues(last->src, src)) {
        moves[n] = (Move){tensor_row(dst), tensor_row(src)};
        return n + 1;
    }
    last->dst.cols += dst.rows * dst.cols, last->dst.ld = (size_t)last->dst.cols;
    last->src.cols += src.rows * src.cols, last->src.ld = (size_t)last->src.cols;
    return n;
}

void carry(Poster *to, Op *op, Lane disk_lane, Move *moves, int n, const Stop *stops, int nstops) {
    const Lane gpu_lane = op->lane;
    const bool up = lane_channel[gpu_lane] == CTOG;
    Move *far = moves + n;
    int hops = 0, crossing = 0;
    for (int i = 0; i < n; i++) {
        Tensor gpu = up ? moves[i].dst : moves[i].src, low = up ? moves[i].src : moves[i].dst;
        if (low.tier == TIER_DISK) {
            const Stop *stop = stops + nstops - 1;
            while (stop > stops && stop->here.offset > gpu.offset) stop--;
            Tensor there = gpu;
            there.tier = TIER_CPU, there.region = stop->via.region;
            there.cell = stop->via.cell, there.ncells = stop->via.ncells;
            there.offset = stop->via.offset + (gpu.offset - stop->here.offset);
            far[hops++] = up ? (Move){there, low} : (Move){low, there};
            low = there;
        }
        crossing = up ? add_move(moves, crossing, gpu, low) : add_move(moves, crossing, low, gpu);
    }
    for (int hop = 0; hop < 2; hop++) {
        const bool disk = hop == !up;
        op->lane = disk ? disk_lane : gpu_lane;
        if (disk ? hops : crossing) post(to, op_copy(op, disk ? far : moves, disk ? hops : crossing));
    }
}
