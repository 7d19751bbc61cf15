/* driver.c: as much of NVIDIA's driver, libcuda.so.1, as app/choose.c asks before it loads the library for GPUs; for the
 * tests, whose GPU is the emulation. CUDA_CPU_NO_DEVICE is described in cuda_cpu.h. */
#include <stdlib.h>

int cuInit(unsigned flags) {
    const char *none = getenv("CUDA_CPU_NO_DEVICE");
    return flags ? 1 : none && *none == '2' ? 100 : 0; /* CUDA_ERROR_NO_DEVICE */
}
