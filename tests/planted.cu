/* planted.cu: kernels with one fault each, for the emulation (cuda_cpu.h) to find; test_emulation.c says how it does. */
#include <cstring>

/* Every block adds to one sum, and is not alone. */
__global__ void adds_without_atomics(float *sum) {
    if (threadIdx.x == 0) *sum += 1;
}

/* The last block adds what the others have written, and has no fence before it says that it has come. */
__global__ void joins_without_fences(float *part, unsigned *count, float *sum) {
    part[blockIdx.x] = 1;
    if (atomicInc(count, gridDim.x - 1) != gridDim.x - 1) return;
    *sum = 0;
    for (unsigned b = 0; b < gridDim.x; b++) *sum += part[b];
}

/* Half of the shared array is never written. */
__global__ void reads_what_nobody_wrote(float *sum) {
    __shared__ float part[64];
    if (threadIdx.x < 32) part[threadIdx.x] = 1;
    __syncthreads();
    *sum = part[threadIdx.x + 32];
}

/* A thread leaves the loop after as many turns as its number, and the others still exchange sums in it. */
__global__ void leaves_a_loop_too_early(float *sum) {
    float mine = threadIdx.x;
    for (unsigned turn = 0; turn < threadIdx.x; turn++) mine += __shfl_xor_sync(0xffffffff, mine, 1);
    mine += __shfl_xor_sync(0xffffffff, mine, 2);
    *sum = mine;
}

/* One number more than the memory has. */
__global__ void writes_behind_its_memory(float *sum) { sum[threadIdx.x] = 1; }

/* Named after one of flexgen.cu whose blocks have 256 threads at most. */
__global__ void bias_kernel(float *sum) { *sum = 0; }
__global__ void has_no_row(float *sum) { *sum = 0; }

int main(int, char **argv) {
    float *device = nullptr, sum = 0, zeros[256] = {};
    cudaStream_t stream = nullptr;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    cudaMalloc((void **)&device, 1024);
    cudaMemcpy(device, zeros, sizeof zeros, cudaMemcpyDefault);
    cudaStreamSynchronize(nullptr);
    float *part = device + 64;
    unsigned *count = (unsigned *)(device + 32);
    auto is = [&](const char *name) { return !strcmp(argv[1], name); };
    if (is("race")) adds_without_atomics<<<4, 32, 0, stream>>>(device);
    if (is("fence")) joins_without_fences<<<4, 1, 0, stream>>>(part, count, device);
    if (is("unwritten")) reads_what_nobody_wrote<<<1, 32, 0, stream>>>(device);
    if (is("turns")) leaves_a_loop_too_early<<<1, 32, 0, stream>>>(device);
    if (is("threads")) bias_kernel<<<1, 512, 0, stream>>>(device);
    if (is("row")) has_no_row<<<1, 32, 0, stream>>>(device);
    if (is("behind")) writes_behind_its_memory<<<1, 257, 0, stream>>>(device);
    cudaStreamSynchronize(stream);
    cudaMemcpy(&sum, device, sizeof sum, cudaMemcpyDefault);
    printf("sum %g\n", sum);
    cudaFree(device);
    cudaStreamDestroy(stream);
}
