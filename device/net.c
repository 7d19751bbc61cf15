/* net.c: finds the network of a pipeline and the GPU, and loads the libraries that they need.
 *
 * MPI takes a tenth of a second and tens of megabytes. Therefore pipeline.c is a library of its own
 * beside the program, and it is loaded only where mpirun has started this process as one of
 * several.
 *
 * cuBLAS alone takes 200 MB of memory and half a gigabyte of address space. Therefore flexgen.cu is
 * a library too, and it is loaded only where NVIDIA's driver is installed and does not say that
 * there is no GPU. A program that is linked with flexgen.cu, as the tests are, needs no library.
 * Read next: pipeline.c. */
#include <dlfcn.h>
#include <unistd.h>

#include "device/parts.h"
#include "io/io.h"

// -------------------------------------------------------------------------------------------------
// The network
// -------------------------------------------------------------------------------------------------

/* Returns true if a launcher has started this process as one of several, as the variables show that
 * mpirun of Open MPI, that of MPICH and Slurm's srun set. The last does not say how many there are.
 */
static bool started_by_mpirun(void) {
    const char *size = getenv("OMPI_COMM_WORLD_SIZE");
    if (!size)
        size = getenv("PMI_SIZE");
    return size ? atoi(size) > 1 : getenv("PMIX_RANK") != NULL;
}

/* Makes every line that this process prints name the stage. */
static void name_speaker(void) {
    static char name[32];
    const char *rank = getenv("PMIX_RANK"); /* Open MPI and srun set this one, MPICH the other */
    if (!rank)
        rank = getenv("PMI_RANK");
    snprintf(name, sizeof name, "flexgen: stage %s", rank ? rank : "?");
    speaker = name;
}

Net *net_open(double bytes_s, double delay_s, Error *err) {
    /* MPI takes 80 MiB; with 50 Open MPI 4.1 may wait forever */
    size_t mpi_space = 128 << 20;
    const char *neighbours = getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
    char path[MAX_PATH];
    Net *(*open)(double, double, Error *) = NULL, *net = NULL;
    err->text[0] = 0;
    if (!started_by_mpirun())
        return NULL;
    name_speaker();
    if (process_allowance("", 0).address < mpi_space) {
        fail(err, EXIT_FAILED,
             "too little address space is left for MPI; raise ulimit -v to more than the tiers and "
             "%zu MiB",
             mpi_space >> 20);
        return NULL;
    }
    program_file(path, "_mpi.so");
    if (access(path, F_OK)) {
        fail(err, EXIT_USAGE,
             "mpirun needs a flexgen that was built with MPI: no %s; build it where mpicc is "
             "installed",
             path);
        return NULL;
    }
    /* it stays loaded; MPI's own plugins look for its functions */
    void *library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    if (library)
        *(void **)&open = dlsym(library, "net_open_mpi");
    if (!open)
        fail(err, EXIT_FAILED,
             "cannot use MPI: %s; install Open MPI, or name its folder in LD_LIBRARY_PATH",
             dlerror());
    else if ((net = open(bytes_s, delay_s, err))) {
        net->share = net_share;
        net->agree = net_agree;
        net->neighbours = neighbours ? atoi(neighbours) : 0;
    }
    return net;
}

int net_share(Net *net, void *bytes, size_t size, Error *err) {
    if (net->stage)
        return net->receive(net, 0, NET_SETUP, bytes, size, err);
    for (int to = 1; to < net->stages; to++)
        if (net->send(net, to, NET_SETUP, bytes, size, err))
            return -1;
    return 0;
}

/* Stage 0 asks all stages in turn, and tells all of them the first that is not well. */
int net_agree(Net *net, int status, Error *err) {
    struct {
        int status;
        Error err;
    } mine = {.status = status}, first = {0}, other;
    if (status)
        fail_of_stage(&mine.err, net->stage, err);
    if (net->stage && net->send(net, 0, NET_SETUP, &mine, sizeof mine, err))
        return -1;
    if (!net->stage)
        first = mine;
    for (int from = 1; from < net->stages && !net->stage; from++) {
        if (net->receive(net, from, NET_SETUP, &other, sizeof other, err))
            return -1;
        if (!first.status)
            first = other;
    }
    if (net_share(net, &first, sizeof first, err))
        return -1;
    if (first.status)
        *err = first.err;
    return first.status ? -1 : 0;
}

// -------------------------------------------------------------------------------------------------
// The GPU
// -------------------------------------------------------------------------------------------------

/* Returns true unless the driver rules a GPU out. The library, which is then loaded, can say more
 * about any other trouble. */
static bool driver_may_have_gpu(Error *err) {
    enum { CUDA_ERROR_NO_DEVICE = 100 };
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    int (*init)(unsigned) = NULL;
    if (driver)
        *(void **)&init = dlsym(driver, "cuInit");
    if (!init)
        fail(err, EXIT_USAGE,
             "no GPU: NVIDIA's driver is missing or cannot be loaded; install it, or check "
             "nvidia-smi");
    else if (init(0) == CUDA_ERROR_NO_DEVICE)
        fail(err, EXIT_USAGE,
             "no GPU: the driver finds none; check nvidia-smi and CUDA_VISIBLE_DEVICES");
    else
        return true;
    return false;
}

/* flexgen.cu, where it is linked, has another that takes the place of this one. */
__attribute__((weak)) Gpu *(*cuda_open_gpu)(Error *) = NULL;

Gpu *gpu_find(Error *err) {
    char path[MAX_PATH];
    if (cuda_open_gpu)
        return cuda_open_gpu(err);
    program_file(path, "_cuda.so");
    if (access(path, F_OK)) {
        fail(err, EXIT_USAGE,
             "this flexgen was built without CUDA: no %s; build it where nvcc is installed", path);
        return NULL;
    }
    if (!driver_may_have_gpu(err))
        return NULL;
    /* it stays loaded, since CUDA's runtime has things to do when the program ends */
    void *library = dlopen(path, RTLD_NOW);
    Gpu *(**open)(Error *) = library ? dlsym(library, "cuda_open_gpu") : NULL;
    if (open)
        return (*open)(err);
    fail(err, EXIT_FAILED,
         "no GPU: %s; install the CUDA toolkit with cuBLAS, or name its folder in LD_LIBRARY_PATH",
         dlerror());
    return NULL;
}

Bytes gpu_left(Gpu *gpu) { return size_less(gpu->total, gpu->in_use(gpu) + gpu->spare); }
