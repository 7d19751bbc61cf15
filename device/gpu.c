/* gpu.c: the GPU on demand.
 *
 * cuBLAS alone takes 200 MB of memory and half a gigabyte of address space. Therefore flexgen.cu is a library of its own
 * beside the program, and it is loaded only where NVIDIA's driver is installed and does not say that there is no GPU. A
 * program that is linked with flexgen.cu, as the tests are, needs no library. Read next: net.c, which finds a network. */
#include <dlfcn.h>
#include <unistd.h>

#include "device/device.h"
#include "io/text.h"

/* Whether it pays to load the library, which can say more about any other trouble. */
static bool driver_may_have_gpu(Error *err) {
    enum { CUDA_ERROR_NO_DEVICE = 100 };
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    int (*init)(unsigned) = NULL;
    if (driver) *(void **)&init = dlsym(driver, "cuInit");
    if (!init)
        fail(err, EXIT_USAGE, "no GPU: NVIDIA's driver is missing or cannot be loaded; install it, or check nvidia-smi");
    else if (init(0) == CUDA_ERROR_NO_DEVICE)
        fail(err, EXIT_USAGE, "no GPU: the driver finds none; check nvidia-smi and CUDA_VISIBLE_DEVICES");
    else
        return true;
    return false;
}

Gpu *gpu_find(Error *err) {
    char path[MAX_PATH];
    Gpu *(*open)(Error *) = cuda_open_gpu;
    if (open) return open(err);
    program_file(path, "_cuda.so");
    if (access(path, F_OK)) {
        fail(err, EXIT_USAGE, "this flexgen was built without CUDA: no %s; build it where nvcc is installed", path);
        return NULL;
    }
    if (!driver_may_have_gpu(err)) return NULL;
    void *library = dlopen(path, RTLD_NOW); /* it stays, since CUDA's runtime has things to do when the program ends */
    if (library) *(void **)&open = dlsym(library, "cuda_open_gpu");
    if (open) return open(err);
    fail(err, EXIT_FAILED, "no GPU: %s; install the CUDA toolkit with cuBLAS, or name its folder in LD_LIBRARY_PATH",
         dlerror());
    return NULL;
}

Bytes gpu_left(Gpu *gpu) { return size_less(gpu->total, gpu->in_use(gpu) + gpu->spare); }
