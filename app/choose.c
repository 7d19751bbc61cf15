/* choose.c: what is decided before a task runs: on which machine, under which policy (section 4.3),
 * and where every byte of it lies. What the flags leave open is searched for; a pipeline's stages
 * agree. Read next: flexgen.c. */
#include <errno.h>
#include <math.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "batch.h"
#include "app/app.h"
#include "device/device.h"

// -------------------------------------------------------------------------------------------------
// The machine
// -------------------------------------------------------------------------------------------------

/* Of --gpu-mem, or of the whole GPU, what is left for the tier: the context and the workspaces take
 * their part of it, and other programs may have taken theirs. */
static Bytes gpu_room(Gpu *gpu, Bytes limit) {
    return size_min(size_less(size_min(limit, gpu->total), gpu->overhead + gpu->spare),
                    gpu_left(gpu));
}

/* What the process takes besides the tiers when a task runs, apart from what it has by then:
 * program, libraries, tokenizer, prompts. Measured with models from opt-125m to opt-1.3b and 1 to
 * 32 threads, and rounded up:
 *   threads   a stack and the kernels' working memory; where weights are loaded, a piece of them
 *             too
 *   queues    of the lanes, and the buffers of the disk
 *   slices    of a trace, with their two edges each when bench adds them up. */
static size_t process_room(const TaskRun *run, size_t slices) {
    enum { THREAD = 256 << 10, PIECE = 1 << 20, QUEUES = 12 << 20, EDGES = 2 * 24 };
    const OptConfig *config = run->checkpoint ? &run->checkpoint->config : NULL;
    const size_t packed = config ? (size_t)run->options->quant.group * config->h2 * sizeof(f16) : 0;
    return QUEUES + (size_t)(NLANES + run->options->threads) * THREAD +
           run->options->threads * (packed > PIECE ? packed : PIECE) +
           slices * (sizeof(Slice) + EDGES);
}

int trace_count(const TaskRun *run) {
    return run->stages.n ? run->stages.n : run->net ? run->net->stages : 1;
}

size_t process_planned(const TaskRun *run) {
    const Plan *p = run->plan;
    const size_t pages = (size_t)p->max_seqs * p->max_pages;
    size_t slices =
        run->traced ? (size_t)p->sweeps * p->batches * (p->config.l + 2) * 2 * NLANES : 0;
    if (run->trace_limit && run->trace_limit < slices)
        slices = run->trace_limit;
    if (!follows(run))
        slices *= trace_count(run);
    return memory_peak() + process_room(run, slices) +
           pages * (4 * (NLANES + 1) * sizeof(Move) + p->batches * 2 * sizeof(Staged));
}

/* Percent of what is free that a tier takes: room is left for the rest of the machine, for the page
 * tables of the tiers (0.2%) and for notes about their pages (a few percent of them at most), and
 * on the host device both upper tiers are one memory. However much is given, they take no more than
 * MOST together, and one leaves LEAST to the other. */
enum {
    HOST_GPU_SHARE = 45,
    HOST_CPU_SHARE = 40,
    CPU_SHARE = 80,
    DISK_SHARE = 90,
    MOST_SHARE = 95,
    LEAST_SHARE = 5
};

/* What the disk has room for, and the address space too beside the other tiers, since the offload
 * file is mapped. What the disk holds already of the checkpoint, which is not mapped, counts as
 * free. Files that are memory have what the other tiers leave of it. */
static int disk_room(Bytes *room, const TaskRun *run, Error *err) {
    const Options *o = run->options;
    const Bytes others[] = {process_room(run, run->trace_limit),
                            run->gpu ? 0 : o->capacity[TIER_GPU], o->capacity[TIER_CPU]};
    Bytes mapped = process_allowance("", NLANES).address;
    struct statvfs disk;
    if (statvfs(o->offload_dir, &disk))
        return fail(err, EXIT_USAGE, "--offload-dir %s: %s; name a directory", o->offload_dir,
                    strerror(errno));
    for (int i = 0; i < 3; i++)
        mapped = size_less(mapped, others[i]);
    *room =
        access(o->offload_dir, W_OK) ? 0 : (size_t)disk.f_bavail * disk.f_frsize / 100 * DISK_SHARE;
    if (memory_holds(o->offload_dir))
        mapped = size_min(mapped, size_less(run->memory, others[1] + others[2]));
    *room = size_min(*room, mapped);
    for (int f = 0; run->checkpoint && f < run->checkpoint->nfiles; f++)
        *room += run->checkpoint->files[f].size;
    return 0;
}

/* Capacities that were not given, and those of this process's memory no larger than that. The sim,
 * and a machine on paper, have what is given or what a file says. */
static int fill_capacities(TaskRun *run, bool on_paper, Error *err) {
    Options *o = run->options;
    const Hardware *h = run->hardware;
    const size_t available = process_allowance("", NLANES).memory,
                 taken = process_room(run, run->trace_limit);
    const int neighbours =
        run->net ? imax(run->net->neighbours, 1) : 1; /* stages share the machine equally */
    const size_t share = available / neighbours,
                 percent = share > taken ? (share - taken) / 100 : 0;
    Bytes usual[NTIERS] = {percent * HOST_GPU_SHARE,
                           percent * (run->gpu ? CPU_SHARE : HOST_CPU_SHARE)},
          *c = o->capacity;
    const bool given[] = {c[TIER_GPU] != FROM_MACHINE, c[TIER_CPU] != FROM_MACHINE},
               real = !run->sim && !on_paper;
    run->memory = percent * MOST_SHARE;
    for (int t = 0; t < NTIERS && run->sim; t++)
        usual[t] = (Bytes)h->mem[t];
    if (run->gpu)
        usual[TIER_GPU] = gpu_room(run->gpu, c[TIER_GPU]);
    for (int t = run->gpu ? TIER_CPU : TIER_GPU; t < TIER_DISK; t++)
        if (given[t])
            usual[t] = real ? size_min(c[t], run->memory - percent * LEAST_SHARE) : c[t];
    for (int t = TIER_GPU; t < TIER_DISK && real && !run->gpu; t++)
        if (!given[t])
            usual[t] = size_min(usual[t], run->memory - usual[1 - t]);
    memcpy(c, usual, TIER_DISK * sizeof *c);
    if (c[TIER_DISK] != FROM_MACHINE && !(real && memory_holds(o->offload_dir)))
        return 0;
    if (!run->sim && disk_room(&usual[TIER_DISK], run, err))
        return -1;
    c[TIER_DISK] = size_min(c[TIER_DISK], usual[TIER_DISK]);
    return 0;
}

/* Whether tiers that take so many bytes are more than this process may have, where flags have given
 * each of them much of it. Then from now on they share it: the larger one yields. */
static bool share_memory(const TaskRun *run, Bytes bytes) {
    Bytes *c = run->options->capacity;
    const int larger = c[TIER_CPU] > c[TIER_GPU] ? TIER_CPU : TIER_GPU;
    if (run->gpu || run->sim || bytes <= run->memory)
        return false;
    c[1 - larger] = size_min(c[1 - larger], run->memory / 2);
    c[larger] = run->memory - c[1 - larger];
    return true;
}

/* Opens the GPU, where it is wanted or there, if the model's heads fit its attention. Without one
 * the host device runs, unless the GPU was asked for. */
static int choose_gpu(TaskRun *run, Error *err) {
    const int head = run->checkpoint ? run->checkpoint->config.h1 / run->checkpoint->config.nh : 1;
    if ((run->gpu = gpu_find(&run->no_gpu)) && head > run->gpu->max_head) {
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
    int *threads = &run->options->threads;
    const int all = host_processors(), allowed = imin(all, process_allowance("", 0).processors);
    if (!*threads && allowed < all)
        run->processors = all;
    *threads = host_set_threads(*threads ? *threads : allowed);
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
    Options *o = run->options;
    run->hardware = xcalloc(1, sizeof *run->hardware);
    run->sim = device_is(o, "sim") || (on_paper && o->hardware);
    const bool all_cores = !o->threads;
    choose_threads(run);
    if (run->sim && read_machine(run->hardware, o, err))
        return -1;
    if (!run->sim && !device_is(o, "host") && !o->links && choose_gpu(run, err))
        return -1;
    if (run->gpu && all_cores)
        o->threads = host_set_threads(imax(o->threads - FOR_LANES, (o->threads + 1) / 2));
    return fill_capacities(run, on_paper, err);
}

int know_machine(const TaskRun *run, Error *err) {
    const Options *o = run->options;
    Hardware *h = run->hardware;
    const ThisMachine here = {run->gpu, o->offload_dir, o->threads, o->capacity,
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

int settle_compression(const TaskRun *run, Error *err) {
    Options *o = run->options;
    const Checkpoint *c = run->checkpoint;
    const int hd = c->config.h1 / c->config.nh;
    const Quant none = {0, 0}, asked = is_study(o->quant) ? o->quant : none;
    Policy *p = &o->policy;
    p->weight_study = o->compress_weight ? asked : none;
    p->cache_study = o->compress_cache ? asked : none;
    p->weight_packed = c->packed || (o->compress_weight && !asked.bits);
    p->cache_packed = o->compress_cache && !asked.bits;
    if (is_sparse(p))
        p->cpu_attention = true;
    if (p->weight_study.bits && c->packed)
        return fail(
            err, EXIT_USAGE,
            "--bits, --group: the weights of %s are packed; name the model that it was made from",
            o->model);
    if (p->cache_study.bits && run->gpu)
        return fail(err, EXIT_USAGE,
                    "--bits, --group: a GPU knows none for --compress-cache; use --device host");
    if ((p->cache_packed || o->allow_compression) && hd % 16)
        return fail(
            err, EXIT_USAGE,
            "%s: heads of %d numbers cannot be packed, only multiples of 16; leave it out: "
            "--compress-weight still packs "
            "the weights, and eval --compress-cache --group 32 says what packing would cost",
            p->cache_packed ? "--compress-cache" : "--allow-compression", hd);
    return p->weight_packed || o->allow_compression ? checkpoint_packs(c, err) : 0;
}

Cluster cluster_of(const TaskRun *run) {
    const Options *o = run->options;
    const bool given = o->wire_bytes_s > 0;
    return (Cluster){run->net ? run->net->stages : o->nodes,
                     given ? o->wire_bytes_s : o->net_gbps * 1e9 / 8,
                     given ? o->wire_delay_s : o->net_ms / 1000};
}

Search search_for(const TaskRun *run, const Task *task, bool one_block) {
    const Options *o = run->options;
    Search s = {
        .hardware = run->hardware,
        .checkpoint = run->checkpoint,
        .task = task,
        .cluster = cluster_of(run),
        .one_block = one_block,
        .act_type = act_type(run),
        .given = o->policy,
        .fixed_flights = o->policy.flights > 0,
        .fixed_gbs = o->policy.gbs > 0,
        .fixed_batches = o->policy.num_gpu_batches > 0 || o->policy.schedule == SCHEDULE_ROW,
        .fixed_schedule = o->fixed_schedule,
        .fixed_attention = o->policy.cpu_attention,
        .max_latency = o->max_latency};
    s.may_pack = o->allow_compression;
    memcpy(s.capacity, o->capacity, sizeof s.capacity);
    memcpy(s.fixed, o->fixed, sizeof s.fixed);
    if (!s.given.num_gpu_batches && s.fixed_batches)
        s.given.num_gpu_batches = 1;
    return s;
}

/* Whether the flags say everything that the search would look for. */
static bool all_given(const Search *s) {
    bool all =
        s->fixed_gbs && s->fixed_batches && s->max_latency <= 0; /* a limit must be looked at */
    for (int i = 0; i < 6; i++)
        all = all && s->fixed[i];
    return all && !s->may_pack;
}

int find_policies(Found *found, int most, Search *s, Error *err) {
    if (!all_given(s))
        return policy_search(found, most, s, err);
    if (fit_policy(&s->given, s->checkpoint, s->task, s->act_type, s->capacity, err))
        return -1;
    return found && policy_predict(found, s, err) ? -1 : 1;
}

/* The policy of a job whose lines somebody waits for: a shorter block, where that costs little. */
static int find_sooner(Found *found, const Search *s, Error *err) {
    Found best;
    if (policy_sooner(&best, found, s, err) < 0)
        return -1;
    const double more = 100 * (best.cost.throughput / found->cost.throughput - 1);
    if (more >= 1)
        fprintf(stderr,
                "the first completions are expected after %.3g s; %.3g s would bring %.0f%% more "
                "throughput (--max-latency)\n",
                found->latency, best.latency, more);
    return 1;
}

/* The policy becomes what the flags give, or the best that is found. Something is expected of it
 * where it was searched for or the machine is known anyway. */
static int choose_policy(TaskRun *run, const Task *task, bool one_block, Error *err) {
    Options *o = run->options;
    Search search = search_for(run, task, one_block);
    if (!all_given(&search) || run->sim || o->hardware) {
        run->found = xcalloc(1, sizeof *run->found);
        if (know_machine(run, err))
            return -1;
    }
    const bool waits = run->completions && !all_given(&search) && search.max_latency <= 0;
    if ((waits ? find_sooner(run->found, &search, err)
               : find_policies(run->found, 1, &search, err)) < 0)
        return -1;
    o->policy = run->found ? run->found->policy : search.given;
    return 0;
}

// -------------------------------------------------------------------------------------------------
// The plan
// -------------------------------------------------------------------------------------------------

/* Where every byte lies. Prompts pass a layer of a GPU in larger pieces where it has room for them.
 */
static int place_task(TaskRun *run, const Task *task, Error *err) {
    Options *o = run->options;
    if (run->gpu)
        fit_pieces(&o->policy, run->checkpoint, task, act_type(run), o->capacity);
    run->plan = plan_make(run->checkpoint, &o->policy, task, act_type(run), err);
    return run->plan && !plan_fits(run->plan, o->capacity, err) ? 0 : -1;
}

/* Under which policy, and where every byte lies. */
static int make_plan(TaskRun *run, Task *task, bool one_block, Error *err) {
    const Policy *p = &run->options->policy;
    if (choose_policy(run, task, one_block, err))
        return -1;
    if (one_block)
        task->count = imin(task->count, block_size(p) * flight_count(p));
    if (place_task(run, task, err))
        return -1;
    for (int t = 0; t < NTIERS && run->found; t++)
        run->found->cost.peak[t] = (double)run->plan->total[t];
    return 0;
}

bool follows(const TaskRun *run) { return run->net && run->net->stage; }

/* A tier that is too small can be raised no further than there is memory. */
static int add_limit(const TaskRun *run, Error *err) {
    const size_t n = strlen(err->text);
    if (!run->sim && strstr(err->text, " tier needs "))
        snprintf(err->text + n, sizeof err->text - n,
                 "; this process may have tiers of %.1f MiB in memory", run->memory / 1048576.0);
    return -1;
}

/* Whether all stages of a pipeline have room for the task: each places the token table, if it has
 * it. */
static int fits_all(TaskRun *run, const Task *task, Error *err) {
    Options *o = run->options;
    if (run->stages.n)
        return stages_plan(&run->stages, &o->policy, task, act_type(run), o->capacity, err);
    int status = fit_policy(&o->policy, run->checkpoint, task, act_type(run), o->capacity, err);
    if (status)
        status = add_limit(run, err);
    return run->net->agree(run->net, status, err);
}

/* Prompts of a job that goes on are longer by what had been generated: where they do not fit any
 * more, its batches become smaller than what was given. */
static bool shrink_batches(const TaskRun *run, Policy *given) {
    if (!run->completions || !completions_head(run->completions) || given->gbs < 2)
        return false;
    given->gbs /= 2;
    fprintf(stderr, "the longer prompts do not fit: going on with --gpu-batch-size %d\n",
            given->gbs);
    return true;
}

/* The policy becomes what is given or found, by a search which believes that its machine has `less`
 * less memory. */
static int choose_smaller(TaskRun *run, const Policy *given, const Task *task, bool one_block,
                          double less, Error *err) {
    Options *o = run->options;
    Bytes capacity[NTIERS];
    memcpy(capacity, o->capacity, sizeof capacity);
    for (int t = 0; t < NTIERS; t++)
        o->capacity[t] = (Bytes)(capacity[t] * (1 - less));
    o->policy = *given;
    free(run->found);
    run->found = NULL;
    const int status = choose_policy(run, task, one_block, err);
    memcpy(o->capacity, capacity, sizeof capacity);
    return status;
}

/* The policy of a pipeline is the first stage's, for its own layers. Where another stage has less
 * room, the search has to do with less memory, each time by twice as much. */
static int agree_on_policy(TaskRun *run, Task *task, bool one_block, Error *err) {
    enum { TRIES = 6 };
    static const double least = .01;
    Error why = {0};
    Policy *p = &run->options->policy, given = *p;
    Net *net = run->net;
    const Search asked = search_for(run, task, one_block);
    const bool leads = !follows(run), searches = !all_given(&asked);
    for (int i = 0;; i++) {
        int status =
                leads ? choose_smaller(run, &given, task, one_block, i ? least * (1 << i) : 0, err)
                      : 0,
            again;
        Task block = *task;
        const bool chosen = !status;
        if (net)
            status = net->agree(net, status, err) || net->share(net, p, sizeof *p, err);
        if (one_block)
            block.count = imin(block.count, block_size(p) * flight_count(p));
        if (!status)
            status = fits_all(run, &block, err);
        if (!status)
            task->count = block.count;
        if (!status)
            return 0;
        if (!i)
            why = *err; /* with all its memory */
        again = leads && (searches ? chosen && i < TRIES : shrink_batches(run, &given));
        if (net && net->share(net, &again, sizeof again, err))
            return -1;
        if (!again) {
            *err = why;
            return -1;
        }
    }
}

/* What is expected of the policy that all stages have room for, if they have equal shares: the
 * formulas know no others. */
static int expect_pipeline(TaskRun *run, const Task *task, Error *err) {
    Search part = search_for(run, task, false);
    if (!run->found)
        return 0;
    if (!run->options->stages.n)
        return policy_predict(run->found, &part, err);
    free(run->found);
    run->found = NULL;
    return 0;
}

/* Each stage's own plan for the same task; of simulated machines the first one's is the run's. */
static int plan_pipeline(TaskRun *run, Task *task, bool one_block, Error *err) {
    if (agree_on_policy(run, task, one_block, err))
        return -1;
    if (run->stages.n) {
        run->plan = run->stages.stage[0].plan;
        run->options->policy = run->plan->policy; /* as it fits */
    } else if (place_task(run, task, err))
        return -1;
    if (expect_pipeline(run, task, err))
        return -1;
    return run->net ? stage_print_plans(run->net, run->plan, run->first_layer, err) : 0;
}

int plan_task(TaskRun *run, Task *task, bool one_block, Error *err) {
    Options *o = run->options;
    Net *net = run->net;
    int status = choose_machine(run, false, err);
    if (net)
        share_memory(run, o->capacity[TIER_GPU] + o->capacity[TIER_CPU]);
    if (!status)
        status = settle_compression(run, err);
    if (net ? net->agree(net, status, err) : status)
        return -1;
    if (net || run->stages.n)
        return plan_pipeline(run, task, one_block, err);
    for (Policy given = o->policy;; o->policy = given) {
        const bool planned = make_plan(run, task, one_block, err) == 0;
        const bool shared =
            planned && share_memory(run, run->plan->total[TIER_GPU] + run->plan->total[TIER_CPU]);
        if (planned && !shared)
            return 0;
        if (!shared && !shrink_batches(run, &given))
            return add_limit(run, err);
        plan_free(run->plan);
        free(run->found);
        run->plan = NULL;
        run->found = NULL;
    }
}
