/* choose.c: decides before a task runs on which machine it runs, under which policy (section 4.3),
 * and where every byte of it lies.
 *
 * The search finds what the flags leave open, and the stages of a pipeline agree on one policy.
 *
 * cuBLAS alone takes 200 MB of memory and half a gigabyte of address space. Therefore flexgen.cu is
 * a library of its own beside the program, and it is loaded only where NVIDIA's driver is installed
 * and does not say that there is no GPU. A program that is linked with flexgen.cu, as the tests
 * are, needs no library.
 * Read next: flexgen.c. */
#include <dlfcn.h>
#include <errno.h>
#include <math.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "batch.h"
#include "app/app.h"

// -------------------------------------------------------------------------------------------------
// The machine
// -------------------------------------------------------------------------------------------------

/* Returns the bytes that the process will take besides the tiers when a task runs, in addition to
 * what it has by then: program, libraries, tokenizer, prompts. Measured with models from opt-125m
 * to opt-1.3b and 1 to 32 threads, and rounded up:
 *   threads   a stack and the kernels' working memory, and a buffer for weights that it loads
 *   queues    those of the lanes, and the buffers of the disk
 *   slices    those of a trace, with their two edges each when bench adds them up */
static size_t process_room(const TaskRun *run, size_t slices) {
    enum { THREAD = 256 << 10, BUFFER = 1 << 20, QUEUES = 12 << 20, EDGES = 2 * 24 };
    size_t packed =
        run->checkpoint ? run->options->quant.group * sizeof(f16) * run->checkpoint->config.h2 : 0;
    return QUEUES + (size_t)(NLANES + run->threads) * THREAD +
           run->threads * (packed > BUFFER ? packed : BUFFER) + slices * (sizeof(Slice) + EDGES);
}

size_t process_planned(const TaskRun *run) {
    const Plan *p = run->plan;
    size_t pages = (size_t)p->max_seqs * p->max_pages;
    size_t slices = run->traced ? p->sweeps * p->batches * (p->config.l + 2) * 2 * NLANES : 0;
    if (run->trace_limit && run->trace_limit < slices)
        slices = run->trace_limit;
    if (!follows(run))
        slices *= run->nstages;
    return memory_peak() + process_room(run, slices) +
           pages * (4 * (NLANES + 1) * sizeof(Move) + p->batches * 2 * sizeof(Staged));
}

/* Percent of the free memory that a tier takes by default. Room is left for the rest of the
 * machine, for the page tables of the tiers (0.2%) and for notes about their pages (a few percent
 * of them at most); on the host device both upper tiers share one memory. Tiers that the flags make
 * larger take no more than MOST together, and one leaves LEAST to the other. */
enum {
    HOST_GPU_SHARE = 45,
    HOST_CPU_SHARE = 40,
    CPU_SHARE = 80,
    DISK_SHARE = 90,
    MOST_SHARE = 95,
    LEAST_SHARE = 5
};

/* Computes the room of the disk tier: what is free on the disk, but no more than the address space
 * has beside the other tiers, since the offload file is mapped. Files of the checkpoint that are on
 * the disk already are not mapped and count as free. If the directory is in memory (tmpfs), it has
 * what the other tiers leave of that. */
static int disk_room(TaskRun *run, Error *err) {
    const Options *o = run->options;
    Bytes tiers = (run->gpu ? 0 : run->capacity[TIER_GPU]) + run->capacity[TIER_CPU];
    Bytes mapped = size_less(process_allowance("", NLANES).address,
                             tiers + process_room(run, run->trace_limit));
    struct statvfs disk;
    if (statvfs(o->offload_dir, &disk))
        return fail(err, EXIT_USAGE, "--offload-dir %s: %s; name a directory", o->offload_dir,
                    strerror(errno));
    Bytes room =
        access(o->offload_dir, W_OK) ? 0 : disk.f_bavail * disk.f_frsize / 100 * DISK_SHARE;
    if (memory_holds(o->offload_dir))
        mapped = size_min(mapped, size_less(run->memory, tiers));
    room = size_min(room, mapped);
    for (int f = 0; run->checkpoint && f < run->checkpoint->nfiles; f++)
        room += run->checkpoint->files[f].size;
    run->capacity[TIER_DISK] = size_min(room, o->capacity[TIER_DISK]);
    return 0;
}

/* Fills in the capacities that were not given, and limits those that are this process's memory. The
 * sim and a machine on paper have what is given, or what a file says. */
static int fill_capacities(TaskRun *run, bool on_paper, Error *err) {
    const Bytes *asked = run->options->capacity;
    Bytes *c = run->capacity;
    Gpu *gpu = run->gpu;
    if (run->sim) {
        for (int t = 0; t < NTIERS; t++)
            c[t] = asked[t] == FROM_MACHINE ? (Bytes)run->hardware->mem[t] : asked[t];
        return 0;
    }
    /* stages on one machine share it equally */
    int neighbours = run->net ? imax(run->net->neighbours, 1) : 1;
    size_t share = process_allowance("", NLANES).memory / neighbours,
           percent = size_less(share, process_room(run, run->trace_limit)) / 100;
    Bytes most = on_paper ? FROM_MACHINE : percent * (MOST_SHARE - LEAST_SHARE);
    run->memory = percent * MOST_SHARE;
    c[TIER_GPU] = percent * HOST_GPU_SHARE;
    c[TIER_CPU] = percent * (gpu ? CPU_SHARE : HOST_CPU_SHARE);
    for (int t = TIER_GPU; t < TIER_DISK; t++)
        if (asked[t] != FROM_MACHINE)
            c[t] = size_min(asked[t], most);
    for (int t = TIER_GPU; t < TIER_DISK && !on_paper && !gpu; t++)
        if (asked[t] == FROM_MACHINE)
            c[t] = size_min(c[t], run->memory - c[1 - t]);
    if (gpu) /* what the context, the workspaces and other programs leave of --gpu-mem */
        c[TIER_GPU] =
            size_min(size_less(size_min(asked[TIER_GPU], gpu->total), gpu->overhead + gpu->spare),
                     gpu_left(gpu));
    c[TIER_DISK] = asked[TIER_DISK];
    if (asked[TIER_DISK] != FROM_MACHINE && (on_paper || !memory_holds(run->options->offload_dir)))
        return 0;
    return disk_room(run, err);
}

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

/* Opens the first GPU (CUDA_VISIBLE_DEVICES chooses), out of the library beside the program if
 * flexgen.cu is not linked. Loads nothing large where there is no GPU. */
static Gpu *find_gpu(Error *err) {
    char path[MAX_PATH];
    if (cuda_open_gpu)
        return cuda_open_gpu(err);
    program_file(path, "_cuda.so");
    if (access(path, F_OK)) {
        fail(err, EXIT_USAGE,
             "this flexgen was built without CUDA: no %s; build it where nvcc is installed", path);
    } else if (driver_may_have_gpu(err)) {
        /* it stays loaded, since CUDA's runtime has things to do when the program ends */
        void *library = dlopen(path, RTLD_NOW);
        Gpu *(**open)(Error *) = library ? dlsym(library, "cuda_open_gpu") : NULL;
        if (open)
            return (*open)(err);
        fail(err, EXIT_FAILED,
             "no GPU: %s; install the CUDA toolkit with cuBLAS, or name its folder in "
             "LD_LIBRARY_PATH",
             dlerror());
    }
    return NULL;
}

/* Opens the GPU, if there is one and the model's heads fit its attention. Without one the host
 * device runs, unless the flags asked for the GPU. */
static int choose_gpu(TaskRun *run, Error *err) {
    int head = run->checkpoint ? run->checkpoint->config.h1 / run->checkpoint->config.nh : 1;
    if ((run->gpu = find_gpu(&run->no_gpu)) && head > run->gpu->max_head) {
        fail(&run->no_gpu, EXIT_USAGE,
             "the model's heads have %d elements, the GPU's attention has room for %d; use "
             "--device host",
             head, run->gpu->max_head);
        run->gpu->close(run->gpu);
        run->gpu = NULL;
    }
    if (run->gpu)
        run->in_use_before = run->gpu->in_use(run->gpu);
    if (run->gpu || !run->options->device)
        return 0;
    *err = run->no_gpu;
    return -1;
}

void choose_threads(TaskRun *run) {
    int asked = run->options->threads, all = processors_allowed(),
        allowed = imin(all, process_allowance("", 0).processors);
    if (!asked && allowed < all)
        run->processors = all;
    run->threads = host_set_threads(asked ? asked : allowed);
}

int read_machine(Hardware *hardware, const Options *o, Error *err) {
    if (hardware_read(hardware, o->hardware, err))
        return -1;
    for (int i = 0; i < o->with.n; i++)
        if (hardware_change(hardware, o->with.text[i], err))
            return -1;
    return 0;
}

int choose_machine(TaskRun *run, bool on_paper, Error *err) {
    enum { FOR_LANES = 2 };
    const Options *o = run->options;
    run->hardware = xcalloc(1, sizeof *run->hardware);
    run->sim = device_is(o, "sim") || (on_paper && o->hardware);
    choose_threads(run);
    if (run->sim && read_machine(run->hardware, o, err))
        return -1;
    if (!run->sim && !device_is(o, "host") && !o->links && choose_gpu(run, err))
        return -1;
    if (run->gpu && !o->threads)
        run->threads = host_set_threads(imax(run->threads - FOR_LANES, (run->threads + 1) / 2));
    return fill_capacities(run, on_paper, err);
}

int know_machine(const TaskRun *run, Error *err) {
    const Options *o = run->options;
    Hardware *h = run->hardware;
    ThisMachine here = {run->gpu, o->offload_dir, run->threads, run->capacity,
                        isatty(STDERR_FILENO) ? stderr : NULL};
    ProfileSize size;
    if (!run->sim &&
        (o->hardware ? read_machine(h, o, err)
                     : profile_size(&size, run->gpu, &run->checkpoint->config, run->memory, err) ||
                           profile_machine(h, &size, &here, err)))
        return -1;
    for (int c = CTOG; c <= CTOD; c++)
        for (int phase = 0; o->link[c] > 0 && phase < 2; phase++)
            h->bdw[c][phase] = fmin(h->bdw[c][phase], o->link[c]);
    return 0;
}

static Type act_type(const TaskRun *run) {
    return run->gpu || (run->sim && !run->hardware->shared_cores) ? F16 : F32;
}

// -------------------------------------------------------------------------------------------------
// The policy
// -------------------------------------------------------------------------------------------------

/* Returns true if by its journal's first line (job_head) the run before packed what `bits` names.
 */
static bool was_packed(const cJSON *head, const char *bits) {
    size_t b;
    return json_whole(json_get(head, bits), &b) && b == 4;
}

int settle_compression(TaskRun *run, Error *err) {
    const Options *o = run->options;
    const Checkpoint *c = run->checkpoint;
    int hd = c->config.h1 / c->config.nh;
    Quant none = {0}, asked = is_stored(o->quant) ? none : o->quant;
    const cJSON *before = completions_head(run->completions);
    bool kept = before && o->allow_compression;
    bool weight = o->compress_weight || (kept && was_packed(before, "bits of weights")),
         cache = o->compress_cache || (kept && was_packed(before, "bits of the cache")),
         head = o->compress_head || (kept && was_packed(before, "bits of the head"));
    Policy *p = &run->given;
    run->may_pack = o->allow_compression && !kept;
    p->weight_study = weight ? asked : none;
    p->cache_study = cache ? asked : none;
    p->weight_packed = c->packed || (weight && !asked.bits);
    p->head_packed = run->whole->global[TOK_EMBED].type == U8 || head;
    p->cache_packed = cache && !asked.bits;
    if (is_sparse(p))
        p->delegated = true;
    if (p->weight_study.bits && c->packed)
        return fail(
            err, EXIT_USAGE,
            "--bits, --group: the weights of %s are packed; name the model that it was made from",
            o->model);
    if (p->cache_study.bits && run->gpu)
        return fail(err, EXIT_USAGE,
                    "--bits, --group: a GPU knows none for --compress-cache; use --device host");
    if ((p->cache_packed || run->may_pack) && hd % 16)
        return fail(
            err, EXIT_USAGE,
            "%s: heads of %d numbers cannot be packed, only multiples of 16; leave it out: "
            "--compress-weight still packs "
            "the weights, and eval --compress-cache --group 32 says what packing would cost",
            p->cache_packed ? "--compress-cache" : "--allow-compression", hd);
    return p->weight_packed || run->may_pack ? checkpoint_packs(c, p->head_packed, err) : 0;
}

Cluster cluster_of(const TaskRun *run) {
    const Options *o = run->options;
    bool given = o->wire_bytes_s > 0;
    return (Cluster){run->net ? run->net->stages : o->nodes,
                     given ? o->wire_bytes_s : o->net_gbps * 1e9 / 8,
                     given ? o->wire_delay_s : o->net_ms / 1000};
}

Search search_for(const TaskRun *run, const Task *task) {
    const Options *o = run->options;
    const Policy *given = &run->given;
    Search s = {.hardware = run->hardware,
                .checkpoint = run->checkpoint,
                .task = task,
                .cluster = cluster_of(run),
                .one_block = run->one_block,
                .act_type = act_type(run),
                .given = *given,
                .fixed_flights = given->flights > 0,
                .fixed_gbs = given->gbs > 0,
                .fixed_batches = given->num_gpu_batches > 0 || given->schedule == SCHEDULE_ROW,
                .fixed_schedule = o->fixed_schedule,
                .fixed_attention = given->delegated,
                .may_pack = run->may_pack,
                .max_latency = o->max_latency,
                .rehearse = !o->no_rehearsal && cluster_of(run).nodes < 2 && !task->scored};
    memcpy(s.capacity, run->capacity, sizeof s.capacity);
    memcpy(s.fixed, o->fixed, sizeof s.fixed);
    if (!s.given.num_gpu_batches && s.fixed_batches)
        s.given.num_gpu_batches = 1;
    return s;
}

/* Returns true if the flags say everything that the search would look for. */
static bool all_given(const Search *s) {
    /* a limit of the latency has to be checked by the search */
    return s->fixed_gbs && s->fixed_batches && s->max_latency <= 0 && !s->may_pack &&
           !memchr(s->fixed, false, sizeof s->fixed);
}

int find_policies(Found *found, int most, Search *s, Error *err) {
    if (!all_given(s)) {
        int n = policy_search(found, most, s, err);
        return n > 0 && s->rehearse && policy_rehearse(found, n, s, err) ? -1 : n;
    }
    if (fit_policy(&s->given, s->checkpoint, s->task, s->act_type, s->capacity, err))
        return -1;
    found->policy = s->given;
    return s->hardware && policy_predict(found, s, err) ? -1 : 1;
}

/* Returns the policy of a job whose lines somebody waits for: one with a shorter block, if that
 * costs little. */
static const Found *find_sooner(const Found *found, int n) {
    const Found *sooner = policy_sooner(found, n);
    double more = 100 * (found->expected / sooner->expected - 1);
    if (more >= 1)
        fprintf(stderr,
                "the first completions are expected after %.3g s; %.3g s would bring %.0f%% more "
                "throughput (--max-latency)\n",
                sooner->latency, found->latency, more);
    return sooner;
}

/* Finds the policy: the flags' or the best one, on a machine with less memory by the fraction
 * `less`. It comes with a prediction if there was a search, or if the machine is known anyway. */
static int choose_policy(TaskRun *run, Search *s, double less, Error *err) {
    bool searches = !all_given(s);
    run->predicted = searches || run->sim || run->options->hardware;
    if (!run->predicted)
        s->hardware = NULL;
    else if (know_machine(run, err))
        return -1;
    for (int t = 0; t < NTIERS && less > 0; t++)
        s->capacity[t] *= 1 - less;
    static Found found[MANY_FOUND]; /* too much for a small stack */
    int n = find_policies(found, MANY_FOUND, s, err);
    if (n < 0)
        return -1;
    bool waited = run->completions && searches && s->max_latency <= 0;
    run->found = waited ? *find_sooner(found, n) : *found;
    return 0;
}

// -------------------------------------------------------------------------------------------------
// The plan
// -------------------------------------------------------------------------------------------------

/* Makes this process's plan for the policy that was found: where every byte lies. On a GPU, prompts
 * pass a layer in larger pieces if there is room for them. */
static int make_plan(TaskRun *run, const Task *task, Error *err) {
    Policy policy = run->found.policy;
    if (run->gpu)
        fit_pieces(&policy, run->checkpoint, task, act_type(run), run->capacity);
    plan_free(run->plan);
    run->plan = plan_make(run->checkpoint, &policy, task, act_type(run), err);
    if (!run->plan)
        return -1;
    for (int t = 0; t < NTIERS; t++)
        run->found.cost.peak[t] = run->plan->total[t];
    return check_fits(run->plan, run->capacity, true, err);
}

bool follows(const TaskRun *run) { return run->net && run->net->stage; }

/* Adds to a message about a tier that is too small how much memory it can have at most. */
static void add_limit(const TaskRun *run, Error *err) {
    size_t n = strlen(err->text);
    if (!run->sim && strstr(err->text, " tier needs "))
        snprintf(err->text + n, sizeof err->text - n,
                 "; this process may have tiers of %.1f MiB in memory", run->memory / MEBIBYTE);
}

/* Makes the plans of all stages, each with the token table as high as it has room for; that of the
 * first simulated machine is the run's. Fails on all stages if one has too little room. */
static int place_task(TaskRun *run, const Task *task, Error *err) {
    Policy *p = &run->found.policy;
    int status = 0;
    if (run->stages.n) {
        status = stages_plan(&run->stages, p, task, act_type(run), run->capacity, err);
        run->plan = run->stages.stage[0].plan;
        return status;
    }
    if (run->net)
        status = fit_policy(p, run->checkpoint, task, act_type(run), run->capacity, err);
    if (!status)
        status = make_plan(run, task, err);
    if (status)
        add_limit(run, err);
    return stage_agree(run->net, status, err);
}

/* Halves the given batches of a job that goes on, because its prompts are longer by what had been
 * generated and do not fit any more. Returns false if that is not possible. */
static bool shrink_batches(TaskRun *run) {
    int *gbs = &run->given.gbs;
    if (!completions_head(run->completions) || *gbs < 2)
        return false;
    *gbs /= 2;
    fprintf(stderr, "the longer prompts do not fit: going on with --gpu-batch-size %d\n", *gbs);
    return true;
}

/* Makes the two upper tiers share the memory if together they need more bytes than this process may
 * have, which happens if flags give each of them much of it. Then the larger one yields. Returns
 * true if capacities were lowered. */
static bool share_memory(TaskRun *run, const Bytes bytes[NTIERS]) {
    Bytes *c = run->capacity;
    int larger = c[TIER_CPU] > c[TIER_GPU] ? TIER_CPU : TIER_GPU;
    if (run->gpu || run->sim || bytes[TIER_GPU] + bytes[TIER_CPU] <= run->memory)
        return false;
    c[1 - larger] = size_min(c[1 - larger], run->memory / 2);
    c[larger] = run->memory - c[1 - larger];
    return true;
}

/* Chooses the policy, and plans the task under it. In a pipeline all stages take the first stage's
 * policy, found for its own layers. If there is too little room, because another stage has less,
 * the search is repeated with less memory, each time by twice as much. */
static int choose_plan(TaskRun *run, Task *task, Error *err) {
    static const double least = .02, most = .64;
    double less = 0;
    Error why = {0};
    Policy *p = &run->found.policy;
    Net *net = run->net;
    bool leads = !follows(run);
    for (;;) {
        Search search = search_for(run, task);
        int status = leads ? choose_policy(run, &search, less, err) : 0;
        bool thrifty = !all_given(&search) && !status;
        Task block = *task;
        if (status)
            add_limit(run, err);
        status = stage_agree(net, status, err) || stage_share(net, p, sizeof *p, err);
        if (run->one_block) /* cuts the task to the prompts that the block of each flight holds */
            block.count = imin(task->count, block_size(p) * flight_count(p));
        if (!status)
            status = place_task(run, &block, err);
        if (!status && !net && share_memory(run, run->plan->total))
            continue;
        if (!status) {
            task->count = block.count;
            return 0;
        }
        if (!why.code)
            why = *err; /* the reason with all memory is the one to report */
        int again = leads && (thrifty ? less < most : shrink_batches(run));
        if (stage_share(net, &again, sizeof again, err))
            return -1;
        if (!again) {
            *err = why;
            return -1;
        }
        if (thrifty)
            less = fmax(2 * less, least);
    }
}

/* Predicts the policy that all stages of a pipeline have room for. */
static int predict_pipeline(TaskRun *run, const Task *task, Error *err) {
    Search part = search_for(run, task);
    part.one_block = false; /* the task has been cut */
    part.given = run->plan->policy;
    /* the formulas only know stages with equal shares */
    run->predicted = run->predicted && !run->options->stages;
    return run->predicted ? policy_predict(&run->found, &part, err) : 0;
}

int plan_task(TaskRun *run, Task *task, Error *err) {
    Net *net = run->net;
    int status = choose_machine(run, false, err);
    if (net)
        share_memory(run, run->capacity);
    if (!status)
        status = settle_compression(run, err);
    if (stage_agree(net, status, err) || choose_plan(run, task, err))
        return -1;
    if ((net || run->stages.n) && predict_pipeline(run, task, err))
        return -1;
    return net ? stage_print_plans(net, run->plan, run->first_layer, err) : 0;
}
