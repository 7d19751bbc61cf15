/* exam_kernels.c: asks kernels of flexgen.cu, on a GPU or in its emulation. */
#include "exam.h"
#include "exam_both.h"

Gpu *test_gpu; /* for fixture.c: none */
int test_every = 1;
/* What the emulation counts: the largest number of roundings of one thread of a kernel, of all that have run. */
long cuda_cpu_most_roundings(void);

void exam_begin(void) {}

static void carry_out(void *c) {
    enum { MARK = 1 };
    Kernel *p = c;
    const size_t bytes = sizeof p->before;
    Error err;
    Gpu *gpu = cuda_open_gpu(&err);
    must(gpu != NULL, err.text);
    Data *at = gpu->call->alloc(gpu, whole_lines(bytes), &err);
    must(at != NULL, err.text);
    const Op op = kernel_op(p, F16, at->act, at->act + MOST_NUMBERS, at);
    must(!gpu->call->transfer(gpu, at, &p->before, bytes, &err), err.text);
    must(!gpu->call->begin(gpu, PROJECT, MARK, &err), err.text);
    must(!gpu->call->run(gpu, &op, &err), err.text);
    must(!gpu->call->end(gpu, PROJECT, MARK, true, &err), err.text);
    must(!gpu->call->sync(gpu, PROJECT, MARK, &err), err.text);
    must(!gpu->call->transfer(gpu, &p->after, at, bytes, &err), err.text);
    p->most_work = cuda_cpu_most_roundings();
    gpu->call->release(gpu, at), gpu->close(gpu);
}

const Work works[NASKS] = {[ASK_KERNEL] = {carry_out}};
