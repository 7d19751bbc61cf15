/* exam_tiles.c: asks the attention of mini.cu, on a GPU or in its emulation, by way of mini_kernels.cpp. */
#include "exam.h"
#include "mini_kernels.h"

void exam_begin(void) {}

static void attend_in_tiles(void *c) {
    Tiles *p = c;
    const MiniAttention a = {p->rows, p->first, p->nh, p->hd, p->q, p->k, p->v, p->halves, p->sparse ? p->kept : NULL};
    enum { ROOM = sizeof p->o / sizeof *p->o };
    for (int e = 0; e < ROOM; e++) p->o[e] = UNTOUCHED;
    p->most_work = mini_attend(p->o, ROOM, &a);
}

const Work works[NASKS] = {[ASK_TILES] = {attend_in_tiles}};
