/* flexgen.c: main, as a table of contents: the six commands.
 *
 *   generate   prompts in, completions out
 *   bench      a named model with random weights, prompts of one length, measured throughput
 *   policy     the best policies for a machine, by a cost model
 *   profile    this machine as numbers
 *   quantize   a 4-bit copy of a checkpoint
 *   eval       perplexity, last words
 * io/flags.c reads the command line, io/report.c says what came of it. Between them a command that runs a task goes the
 * same way: plan_task chooses the machine, the policy and the place of every byte; run_task opens the device, loads the
 * weights and sweeps. Exit status: 0 done, 1 failed, 2 wrong use or does not fit. Results go to standard output, everything
 * else to standard error. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "cost/cost.h"

// ---------------------------------------------------------------------------------------------------------------
// The machine
// ---------------------------------------------------------------------------------------------------------------

/* Of --gpu-mem, or of the whole GPU, what is left for the tier: the context and the workspaces take their part of it, and
 * other programs may have taken theirs. */
static size_t gpu_room(Gpu *gpu, size_t limit) {
    size_t room = limit < gpu->total ? limit : gpu->total, taken = gpu->overhead + gpu->spare;
    size_t used = gpu->in_use(gpu) + gpu->spare, left = used < gpu->total ? gpu->total - used : 0;
    room = taken < room ? room - taken : 0;
    return room < left ? room : left;
}

/* Percent of what is free that a tier takes: room is left for the rest of the machine, and on the host device both upper
 * tiers are one memory. */
enum { HOST_GPU_SHARE = 45, HOST_CPU_SHARE = 40, CPU_SHARE = 80, DISK_SHARE = 90 };

/* Capacities that were not given. The sim has what its file says. What the disk holds already of the checkpoint counts as
 * free. */
static int fill_capacities(Options *o, const TaskRun *run, const Checkpoint *checkpoint, Error *err) {
    const Hardware *h = run->hardware;
    const size_t memory = memory_available() / 100;
    size_t usual[NTIERS] = {memory * HOST_GPU_SHARE, memory * (run->gpu ? CPU_SHARE : HOST_CPU_SHARE)};
    struct statvfs disk;
    if (run->sim) {
        usual[TIER_GPU] = (size_t)h->gmem, usual[TIER_CPU] = (size_t)h->cmem, usual[TIER_DISK] = (size_t)h->nmem;
    } else if (o->capacity[TIER_DISK] == FROM_MACHINE) {
        if (statvfs(o->offload_dir, &disk))
            return fail(err, EXIT_USAGE, "--offload-dir %s: %s; name a directory", o->offload_dir, strerror(errno));
        usual[TIER_DISK] = (size_t)disk.f_bavail * disk.f_frsize / 100 * DISK_SHARE;
        for (int f = 0; checkpoint && f < checkpoint->nfiles; f++) usual[TIER_DISK] += checkpoint->files[f].size;
    }
    if (run->gpu) o->capacity[TIER_GPU] = gpu_room(run->gpu, o->capacity[TIER_GPU]);
    for (int t = 0; t < NTIERS; t++)
        if (o->capacity[t] == FROM_MACHINE) o->capacity[t] = usual[t];
    return 0;
}

/* Opens the GPU, where it is wanted or there, for heads of so many elements. Without one the host device runs, unless the
 * GPU was asked for. */
static int choose_gpu(TaskRun *run, const Options *o, int head, Error *err) {
    if (!cuda_open_gpu)
        fail(&run->no_gpu, EXIT_USAGE, "this flexgen was built without CUDA; build it where nvcc is installed");
    else if ((run->gpu = cuda_open_gpu(&run->no_gpu)) && head > run->gpu->max_head) {
        fail(&run->no_gpu, EXIT_USAGE,
             "the model's heads have %d elements, the GPU's attention has room for %d; use --device host", head,
             run->gpu->max_head);
        run->gpu->close(run->gpu);
        run->gpu = NULL;
    }
    if (run->gpu) run->in_use_before = run->gpu->in_use(run->gpu);
    if (run->gpu || !o->device) return 0;
    *err = run->no_gpu;
    return -1;
}

/* Where the task runs, with how many threads and how much memory. on_paper: nothing runs, and a machine of --hardware is
 * all numbers, as for the sim. checkpoint may be NULL. */
static int choose_machine(TaskRun *run, Options *o, const Checkpoint *checkpoint, bool on_paper, Error *err) {
    run->hardware = xcalloc(1, sizeof *run->hardware);
    run->sim = device_is(o, "sim") || (on_paper && o->hardware);
    o->threads = host_set_threads(o->threads);
    if (run->sim && hardware_read(run->hardware, o->hardware, err)) return -1;
    if (!run->sim && !device_is(o, "host") && !o->links &&
        choose_gpu(run, o, checkpoint ? checkpoint->config.h1 / checkpoint->config.nh : 1, err))
        return -1;
    return fill_capacities(o, run, checkpoint, err);
}

/* The machine that the search is for: a file's, or this one, measured; with its links as slow as they will be. */
static int know_machine(TaskRun *run, const Options *o, const OptConfig *config, Error *err) {
    Hardware *h = run->hardware;
    const ProfileSize size = profile_size(run->gpu, config);
    FILE *progress = isatty(STDERR_FILENO) ? stderr : NULL;
    if (!run->sim &&
        (o->hardware ? hardware_read(h, o->hardware, err)
                     : profile_machine(h, &size, run->gpu, o->offload_dir, o->threads, o->capacity, progress, err)))
        return -1;
    double *const bdw[] = {h->ctog_bdw, h->gtoc_bdw, h->dtoc_bdw, h->ctod_bdw};
    for (int c = CTOG; c <= CTOD; c++)
        for (int stage = 0; o->link[c] > 0 && stage < 2; stage++) bdw[c][stage] = fmin(bdw[c][stage], o->link[c]);
    return 0;
}

static Type act_type(const TaskRun *run) { return run->gpu || (run->sim && !run->hardware->shared_cores) ? F16 : F32; }

// ---------------------------------------------------------------------------------------------------------------
// The policy
// ---------------------------------------------------------------------------------------------------------------

/* How the flags, or a packed checkpoint, say that weights and cache are packed; and who attends sparsely. */
static int settle_compression(Options *o, const Checkpoint *checkpoint, Error *err) {
    const Quant asked = o->quant, is = checkpoint->quant;
    Policy *p = &o->policy;
    if (o->compress_weight) p->weight_quant = asked;
    if (o->compress_cache) p->cache_quant = asked;
    if (is_sparse(p)) p->cpu_attention = true;
    if (!is.bits) return 0;
    if (o->compress_weight && (is.bits != asked.bits || is.group != asked.group))
        return fail(err, EXIT_USAGE,
                    "--compress-weight: the checkpoint's weights have %d bits in groups of %d; leave it out", is.bits,
                    is.group);
    p->weight_quant = is;
    return 0;
}

/* one_block: the task is as long as a block may be, and ends behind the policy's. */
static Search search_for(const Options *o, const TaskRun *run, const Checkpoint *checkpoint, const Task *task,
                         bool one_block) {
    Search s = {.hardware = run->hardware,
                .checkpoint = checkpoint,
                .task = task,
                .one_block = one_block,
                .act_type = act_type(run),
                .given = o->policy,
                .fixed_gbs = o->policy.gbs > 0,
                .fixed_batches = o->policy.num_gpu_batches > 0 || o->policy.schedule == SCHEDULE_ROW,
                .fixed_schedule = o->fixed_schedule,
                .fixed_attention = o->policy.cpu_attention,
                .max_latency = o->max_latency};
    if (o->allow_compression) s.allowed = o->quant;
    memcpy(s.capacity, o->capacity, sizeof s.capacity);
    memcpy(s.fixed, o->fixed, sizeof s.fixed);
    if (!s.given.num_gpu_batches && s.fixed_batches) s.given.num_gpu_batches = 1;
    return s;
}

/* Whether the flags say everything that the search would look for. */
static bool all_given(const Search *s) {
    bool all = s->fixed_gbs && s->fixed_batches && s->max_latency <= 0; /* a limit must be looked at */
    for (int i = 0; i < 6; i++) all = all && s->fixed[i];
    return all && !s->allowed.bits;
}

/* Puts the token table of a policy that the flags give in full where there is room. */
static int complete_given(Search *s, Error *err) {
    return table_home(&s->given, s->checkpoint, s->task, s->act_type, s->capacity, err);
}

/* The best policies, at most `most`, or the one that the flags give in full; with what is expected of them. Returns their
 * number, or -1 and err. */
static int find_policies(Found *found, int most, Search *search, Error *err) {
    if (!all_given(search)) return policy_search(found, most, search, err);
    return complete_given(search, err) || policy_predict(found, search, err) ? -1 : 1;
}

/* o->policy becomes what the flags give, or the best that is found. Something is expected of it where it was searched for
 * or the machine is known anyway. */
static int choose_policy(TaskRun *run, Options *o, const Checkpoint *checkpoint, const Task *task, bool one_block,
                         Error *err) {
    Search search = search_for(o, run, checkpoint, task, one_block);
    if (all_given(&search) && !run->sim && !o->hardware) {
        if (complete_given(&search, err)) return -1;
        o->policy = search.given;
        return 0;
    }
    run->found = xcalloc(1, sizeof *run->found);
    if (know_machine(run, o, &checkpoint->config, err) || find_policies(run->found, 1, &search, err) < 0) return -1;
    o->policy = run->found->policy;
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------
// Running a task
// ---------------------------------------------------------------------------------------------------------------

/* Decides everything before anything is allocated or written: where the task runs, under which policy, and where every byte
 * of it lies. What does not fit is refused. one_block: as for search_for. */
static int plan_task(TaskRun *run, Options *o, const Checkpoint *checkpoint, Task *task, bool one_block, Error *err) {
    if (choose_machine(run, o, checkpoint, false, err)) return -1;
    if (settle_compression(o, checkpoint, err)) return -1;
    if (choose_policy(run, o, checkpoint, task, one_block, err)) return -1;
    if (one_block) task->count = imin(task->count, block_size(&o->policy));
    run->plan = plan_make(checkpoint, &o->policy, task, act_type(run), err);
    return run->plan ? plan_fits(run->plan, o->capacity, err) : -1;
}

/* What a user should know who expected the GPU, or full speed of it. A person hears it at once; in a log an error stays the
 * only line. */
static void say_notices(const TaskRun *run, bool now) {
    if (now != (isatty(STDERR_FILENO) != 0)) return;
    if (run->no_gpu.text[0]) fprintf(stderr, "running on the host device: %s\n", run->no_gpu.text);
    if (run->device->notice.text[0]) fprintf(stderr, "%s\n", run->device->notice.text);
}

/* The GPU's own account against the plan. */
static void check_in_use(TaskRun *run) {
    size_t planned = run->in_use_before + run->plan->total[TIER_GPU] + run->gpu->spare;
    run->in_use = run->gpu->in_use(run->gpu);
    if (run->in_use > planned)
        fail(&run->device->notice, EXIT_OK,
             "the GPU counts %.1f MiB more in use than planned, by this program or by others",
             (run->in_use - planned) / 1048576.0);
}

static Device *open_device(const TaskRun *run, const Options *o, const Checkpoint *checkpoint, Error *err) {
    if (run->sim) return sim_open(run->plan, run->hardware, err);
    if (run->gpu) return cuda_open(run->gpu, run->plan, checkpoint, o->offload_dir, err);
    return host_open(run->plan, checkpoint, o->offload_dir, err);
}

/* Loads the weights and sweeps. */
static int run_on(TaskRun *run, const Options *o, const Checkpoint *checkpoint, const Task *task, const Listener *listener,
                  Error *err) {
    memcpy(run->device->link, o->link, sizeof o->link);
    if (!run->sim && weights_load(run->plan, checkpoint, run->device, err)) return -1;
    if (run->gpu && opt_warm_up(run->device, run->plan, err)) return -1;
    if (run->traced) {
        run->device->trace = xcalloc(1, sizeof *run->device->trace);
        run->device->trace->limit = run->trace_limit;
    }
    if (schedule_run(run->plan, task, run->device, listener, &run->stats, err)) return -1;
    if (run->gpu) check_in_use(run);
    return 0;
}

/* The whole of a run. The device stays open for its counters. The file for the trace is opened before anything else. */
static int run_task(TaskRun *run, const Options *o, const Checkpoint *checkpoint, const Task *task,
                    const Listener *listener, Error *err) {
    FILE *file = o->trace ? output_open("--trace", o->trace, err) : NULL;
    if (o->trace && !file) return -1;
    run->traced = run->traced || file;
    run->device = open_device(run, o, checkpoint, err);
    if (run->device) say_notices(run, true);
    int status = run->device ? run_on(run, o, checkpoint, task, listener, err) : -1;
    if (file && !status) trace_write(run->device->trace, run->plan->config.name, file);
    if (file) status = output_close(file, "--trace", o->trace, status, err);
    if (!status) say_notices(run, false);
    return status;
}

static void run_close(TaskRun *run) {
    Trace *trace = run->device ? run->device->trace : NULL;
    if (run->device) run->device->close(run->device);
    plan_free(run->plan);
    if (run->gpu) run->gpu->close(run->gpu);
    if (trace) trace_free(trace);
    free(trace), free(run->found), free(run->hardware);
}

// ---------------------------------------------------------------------------------------------------------------
// What commands open
// ---------------------------------------------------------------------------------------------------------------

/* A directory's checkpoint, or a named size with random weights. */
static Checkpoint *open_model(const Options *o, Error *err) {
    OptConfig config;
    struct stat st;
    if (stat(o->model, &st) == 0 && S_ISDIR(st.st_mode)) return checkpoint_open(o->model, err);
    if (opt_config_by_name(&config, o->model) == 0) return checkpoint_dummy(&config, o->sampling.seed);
    fail(err, EXIT_USAGE, "--model %s: neither a directory nor one of %s", o->model, opt_known_names());
    return NULL;
}

/* The model's </s> is a special piece of the vocabulary, or the two files do not belong together. */
static int check_eos(const Tokenizer *tokenizer, const OptConfig *config, const char *dir, Error *err) {
    size_t len;
    int32_t eos = config->eos;
    free(tokenizer_decode(tokenizer, &eos, 1, &len));
    if (len)
        return fail(err, EXIT_FAILED,
                    "%.300s: eos_token_id %d of config.json is an ordinary piece of vocab.json; expected </s>", dir, eos);
    return 0;
}

/* What a command does with a run and a checkpoint of its own; both end with it. */
typedef int Work(TaskRun *, Options *, Checkpoint *, Error *);

static int with_checkpoint(Options *o, Work *work, Error *err) {
    TaskRun run = {.gpu = NULL};
    Checkpoint *checkpoint = o->model ? open_model(o, err) : NULL;
    int status = o->model && !checkpoint ? -1 : work(&run, o, checkpoint, err);
    run_close(&run);
    checkpoint_close(checkpoint);
    return status;
}

/* And with a tokenizer, which only a directory has. */
static int with_texts(Options *o, int (*work)(TaskRun *, Options *, const Checkpoint *, const Tokenizer *, Error *),
                      Error *err) {
    OptConfig config;
    struct stat st;
    TaskRun run = {.gpu = NULL};
    if (stat(o->model, &st) && opt_config_by_name(&config, o->model) == 0)
        return fail(err, EXIT_USAGE, "--model %s: is no directory; only bench takes a name: download the model", o->model);
    Checkpoint *checkpoint = checkpoint_open(o->model, err);
    if (!checkpoint) return -1;
    Tokenizer *tokenizer = tokenizer_open(o->model, checkpoint->config.vocab, err);
    int status = tokenizer ? check_eos(tokenizer, &checkpoint->config, o->model, err) : -1;
    if (!status) status = work(&run, o, checkpoint, tokenizer, err);
    run_close(&run);
    tokenizer_close(tokenizer);
    checkpoint_close(checkpoint);
    return status;
}

// ---------------------------------------------------------------------------------------------------------------
// flexgen generate
// ---------------------------------------------------------------------------------------------------------------

static int read_job(Job *job, const Options *o, const Tokenizer *tokenizer, const OptConfig *config, Error *err) {
    if (o->prompts) {
        if (!strcmp(o->prompts, "-") && isatty(STDIN_FILENO)) fprintf(stderr, "prompts, one a line; Ctrl-D ends them\n");
        return job_read(job, o->prompts, o->max_tokens, tokenizer, config, err);
    }
    for (int i = 0; i < o->prompt.n; i++) {
        char id[16];
        snprintf(id, sizeof id, "%d", i);
        if (job_add(job, o->prompt.text[i], strlen(o->prompt.text[i]), id, o->max_tokens, tokenizer, config, "--prompt",
                    err))
            return -1;
    }
    return 0;
}

static int generate_job(TaskRun *run, Options *o, const Checkpoint *checkpoint, const Tokenizer *tokenizer, Job *job,
                        Error *err) {
    const char *path = o->output ? o->output : "-";
    if (plan_task(run, o, checkpoint, &job->task, false, err)) return -1;
    if (o->verbose) plan_print(stderr, run->plan, o->capacity, NULL);
    Completions c = {.job = job,
                     .tokenizer = tokenizer,
                     .out = output_open("--output", path, err),
                     .stop = o->stop.text,
                     .nstops = o->stop.n,
                     .out_name = strcmp(path, "-") ? path : "standard output",
                     .progress.on = isatty(STDERR_FILENO)};
    if (!c.out) return -1;
    Listener listener = completions_listener(&c);
    int status = run_task(run, o, checkpoint, &job->task, &listener, err);
    progress_clear(&c.progress);
    if (output_close(c.out, "--output", path, status, err)) return -1;
    if (o->verbose) print_peaks(run, o);
    print_prediction(run);
    print_summary(o, run, job->task.count);
    return 0;
}

/* No prompts are no work and no error; the output is there, and empty. */
static int generate_nothing(const Options *o, Error *err) {
    const char *path = o->output ? o->output : "-";
    FILE *out = output_open("--output", path, err);
    return out ? output_close(out, "--output", path, 0, err) : -1;
}

static int generate_with(TaskRun *run, Options *o, const Checkpoint *checkpoint, const Tokenizer *tokenizer, Error *err) {
    Job job = {.task.sampling = o->sampling};
    int status = read_job(&job, o, tokenizer, &checkpoint->config, err);
    if (!status)
        status = job.task.count ? generate_job(run, o, checkpoint, tokenizer, &job, err) : generate_nothing(o, err);
    job_free(&job);
    return status;
}

static int generate(Options *o, Error *err) { return with_texts(o, generate_with, err); }

// ---------------------------------------------------------------------------------------------------------------
// flexgen bench
// ---------------------------------------------------------------------------------------------------------------

enum { MAX_BENCH = 1 << 28, MAX_SLICES = 1 << 20 }; /* prompt tokens of a task; slices of a trace that only adds up */

/* xorshift64 */
static uint64_t draw(uint64_t *x) {
    *x ^= *x << 13, *x ^= *x >> 7, *x ^= *x << 17;
    return *x;
}
static int draw_in(uint64_t *x, const int range[2]) {
    return range[0] + (int)(draw(x) % (uint64_t)(range[1] - range[0] + 1));
}

static const uint64_t draw_start = 88172645463325252ull;

/* Prompts of one length, or of lengths between two, so far without tokens. */
static Task bench_task(const Options *o, int count) {
    uint64_t x = (draw_start + o->sampling.seed) ^ 1;
    Task task = {.count = count, .prompts = xcalloc(count, sizeof *task.prompts), .sampling = o->sampling};
    for (int i = 0; i < count; i++)
        task.prompts[i].s = draw_in(&x, o->prompt_len), task.prompts[i].n = draw_in(&x, o->gen_len);
    return task;
}

/* Their tokens, at random. */
static void fill_prompts(Task *task, const OptConfig *config) {
    uint64_t x = draw_start + task->sampling.seed;
    for (int i = 0; i < task->count; i++) {
        Prompt *p = &task->prompts[i];
        p->ids = xcalloc(p->s, sizeof *p->ids);
        for (int t = 0; t < p->s; t++) {
            uint64_t drawn = draw(&x);
            p->ids[t] = t ? (int32_t)(drawn % (uint64_t)config->vocab) : 2; /* </s> */
        }
    }
}

static void free_prompts(Task *task) {
    for (int i = 0; i < task->count; i++) free(task->prompts[i].ids);
    free(task->prompts);
}

static int check_lengths(const Options *o, const OptConfig *config, Error *err) {
    int s = o->prompt_len[1], n = o->gen_len[1];
    if (s <= config->max_pos && n <= config->max_pos - s + 1) return 0;
    return fail(err, EXIT_USAGE,
                "--prompt-len %d --gen-len %d: expected at most %d together, as the model has %d positions", s, n,
                config->max_pos + 1, config->max_pos);
}

/* How many prompts: as many as are asked for, or one block, which the search may make as large as this (*one_block). */
static int bench_count(bool *one_block, const Options *o, const OptConfig *config, Error *err) {
    enum { LARGEST_BLOCK = 4096 };
    int s = o->prompt_len[1], block = o->policy.gbs * o->policy.num_gpu_batches;
    *one_block = !o->num_prompts && !block;
    int count = o->num_prompts ? o->num_prompts : block ? block : imin(LARGEST_BLOCK, MAX_BENCH / s);
    if (check_lengths(o, config, err)) return -1;
    if ((double)count * s <= MAX_BENCH) return count;
    return fail(err, EXIT_USAGE,
                "--prompt-len %d: %d prompts (--num-prompts, or --gpu-batch-size x --num-gpu-batches) are over %d tokens",
                s, count, MAX_BENCH);
}

/* The task is planned; --json is opened before the run, so that an hour of it is not lost to a wrong path. */
static int bench_run(Options *o, const Checkpoint *checkpoint, const Task *task, TaskRun *run, Error *err) {
    const Listener listener = {.done = completion_ignored};
    Report report;
    if (report_open(&report, o, err)) return -1;
    plan_print(stderr, run->plan, o->capacity, NULL);
    int status = run_task(run, o, checkpoint, task, &listener, err);
    if (!status) {
        print_peaks(run, o);
        print_prediction(run);
        report_bench(&report, run);
    }
    return report_close(&report, status, err);
}

static int bench_with(TaskRun *run, Options *o, Checkpoint *checkpoint, Error *err) {
    bool one_block;
    int count = bench_count(&one_block, o, &checkpoint->config, err);
    if (count < 0) return -1;
    checkpoint->config.eos = -1; /* every sequence runs to its full length */
    run->traced = true;
    run->trace_limit = o->trace ? 0 : MAX_SLICES;
    Task task = bench_task(o, count);
    int status = plan_task(run, o, checkpoint, &task, one_block, err);
    if (!status) {
        fill_prompts(&task, &checkpoint->config);
        status = bench_run(o, checkpoint, &task, run, err);
    }
    free_prompts(&task);
    return status;
}

static int bench(Options *o, Error *err) { return with_checkpoint(o, bench_with, err); }

// ---------------------------------------------------------------------------------------------------------------
// flexgen policy
// ---------------------------------------------------------------------------------------------------------------

/* By Appendix A.3. */
static int paper_policy(TaskRun *run, const Options *o, const OptConfig *config, Error *err) {
    Cost cost;
    Report report;
    const Block block = {o->prompt_len[1], o->gen_len[1], o->policy.gbs, o->policy.num_gpu_batches};
    run->hardware = xcalloc(1, sizeof *run->hardware);
    if (check_lengths(o, config, err) || hardware_read(run->hardware, o->hardware, err) ||
        paper_cost(&cost, run->hardware, config, &block, err) || report_open(&report, o, err))
        return -1;
    report_paper(&report, config, run->hardware, &cost, &block);
    return report_close(&report, 0, err);
}

/* One machine, the pipeline, the chain without offloading. */
static int cluster_policy(const TaskRun *run, const Options *o, const OptConfig *config, const Search *search, Error *err) {
    const Cluster alone = {.nodes = 1}, many = {o->nodes, o->net_gbps * 1e9 / 8, o->net_ms / 1000};
    ClusterCost one, pipeline, chain;
    Error too_small;
    Report report;
    if (cluster_search(&one, search, &alone, true, err) || cluster_search(&pipeline, search, &many, true, err)) return -1;
    bool chained = cluster_search(&chain, search, &many, false, &too_small) == 0;
    const ClusterCost *const cost[] = {&one, &pipeline, chained ? &chain : NULL};
    if (report_open(&report, o, err)) return -1;
    report_clusters(&report, config, run->hardware, cost, chained ? 0 : cluster_least(search));
    return report_close(&report, 0, err);
}

/* The best ten, or the frontier. */
static int single_policy(const TaskRun *run, const Options *o, const OptConfig *config, Search *search, Error *err) {
    enum { TEN = 10, MOST = 64 };
    Found found[MOST];
    Report report;
    int n = o->frontier ? policy_frontier(found, MOST, search, err) : find_policies(found, TEN, search, err);
    if (n < 0 || report_open(&report, o, err)) return -1;
    report_found(&report, config, run->hardware, o->frontier ? "frontier" : "best", found, n);
    return report_close(&report, 0, err);
}

/* By what this engine does. */
static int runtime_policy(TaskRun *run, Options *o, const Checkpoint *checkpoint, Error *err) {
    const OptConfig *config = &checkpoint->config;
    bool one_block;
    int count = bench_count(&one_block, o, config, err);
    if (count < 0 || choose_machine(run, o, checkpoint, true, err) || know_machine(run, o, config, err) ||
        settle_compression(o, checkpoint, err))
        return -1;
    Task task = bench_task(o, count);
    Search search = search_for(o, run, checkpoint, &task, one_block);
    int status = o->nodes ? cluster_policy(run, o, config, &search, err) : single_policy(run, o, config, &search, err);
    free_prompts(&task);
    return status;
}

static int policy_with(TaskRun *run, Options *o, Checkpoint *checkpoint, Error *err) {
    return o->paper_model ? paper_policy(run, o, &checkpoint->config, err) : runtime_policy(run, o, checkpoint, err);
}

static int policy(Options *o, Error *err) { return with_checkpoint(o, policy_with, err); }

// ---------------------------------------------------------------------------------------------------------------
// flexgen profile
// ---------------------------------------------------------------------------------------------------------------

/* Measures the machine anew, at a model's shapes if one is named, keeps that for later runs, and writes it. */
static int profile_with(TaskRun *run, Options *o, Checkpoint *checkpoint, Error *err) {
    const char *to = o->output ? o->output : "-";
    if (choose_machine(run, o, checkpoint, false, err)) return -1;
    const ProfileSize size = profile_size(run->gpu, checkpoint ? &checkpoint->config : NULL);
    FILE *out = output_open("--output", to, err);
    if (!out) return -1;
    int status = profile_measure(run->hardware, &size, run->gpu, o->offload_dir, o->threads, o->capacity, stderr, err);
    if (!status) {
        profile_keep(run->hardware, &size, run->gpu, o->offload_dir, o->threads);
        profile_write(run->hardware, out);
    }
    return output_close(out, "--output", to, status, err);
}

static int profile(Options *o, Error *err) { return with_checkpoint(o, profile_with, err); }

// ---------------------------------------------------------------------------------------------------------------
// flexgen quantize
// ---------------------------------------------------------------------------------------------------------------

static int quantize(Options *o, Error *err) {
    const size_t shard_bytes = 5000000000; /* as others cut large checkpoints */
    CopyStats stats;
    if (checkpoint_quantize(&stats, o->model, o->output, o->quant, shard_bytes, host_set_threads(o->threads),
                            isatty(STDERR_FILENO) ? stderr : NULL, err))
        return -1;
    fprintf(stderr, "%.2f MB packed to %.2f MB, %d file%s in %s: %.2f bits a weight, %.2f in the matrices of the layers\n",
            stats.before / 1e6, stats.after / 1e6, stats.files, stats.files > 1 ? "s" : "", o->output, stats.bits,
            stats.packed_bits);
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------
// flexgen eval
// ---------------------------------------------------------------------------------------------------------------

/* The texts are read; --json is opened before the run. */
static int eval_run(Options *o, const Checkpoint *checkpoint, Eval *eval, TaskRun *run, Error *err) {
    Report report;
    if (plan_task(run, o, checkpoint, &eval->task, false, err)) return -1;
    if (o->verbose) plan_print(stderr, run->plan, o->capacity, NULL);
    if (report_open(&report, o, err)) return -1;
    const Listener listener = eval_listener(eval);
    int status = run_task(run, o, checkpoint, &eval->task, &listener, err);
    progress_clear(&eval->progress);
    if (!status) {
        if (o->verbose) print_peaks(run, o);
        print_prediction(run);
        report_eval(&report, eval, run);
    }
    return report_close(&report, status, err);
}

static int eval_with(TaskRun *run, Options *o, const Checkpoint *checkpoint, const Tokenizer *tokenizer, Error *err) {
    Eval eval = {.stepwise = o->compress_cache || is_sparse(&o->policy), .progress.on = isatty(STDERR_FILENO)};
    int status = o->perplexity ? eval_text(&eval, o->perplexity, o->window, o->limit, tokenizer, &checkpoint->config, err)
                               : eval_lines(&eval, o->last_word, o->limit, tokenizer, &checkpoint->config, err);
    if (!status) status = eval_run(o, checkpoint, &eval, run, err);
    eval_free(&eval);
    return status;
}

static int eval(Options *o, Error *err) { return with_texts(o, eval_with, err); }

// ---------------------------------------------------------------------------------------------------------------
// main
// ---------------------------------------------------------------------------------------------------------------

static int (*const commands[NCOMMANDS])(Options *, Error *) = {
    [GENERATE] = generate, [BENCH] = bench, [POLICY] = policy, [PROFILE] = profile, [QUANTIZE] = quantize, [EVAL] = eval};

/* A closed standard stream would lend its number to the next file opened, and our results would go there. */
static void open_standard_streams(void) {
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY) != fd) exit(EXIT_FAILED);
}

static int run_command(Options *o, char **args, int n, Error *err) {
    Command command;
    if (!strcmp(args[0], "help") || !strcmp(args[0], "--help") || !strcmp(args[0], "-h")) return flags_help(stdout), 0;
    if (command_parse(&command, args[0], err) || flags_parse(o, command, args + 1, n - 1, err)) return -1;
    if (o->help) return flags_help(stdout), 0;
    return flags_check(o, command, err) ? -1 : commands[command](o, err);
}

int main(int argc, char **argv) {
    Options o = options_default();
    Error err = {0};
    signal(SIGPIPE, SIG_IGN); /* a closed pipe or a limit on file sizes is a failed write, said in one line */
    signal(SIGXFSZ, SIG_IGN);
    open_standard_streams();
    if (argc < 2) return flags_help(stderr), EXIT_USAGE;
    int status = run_command(&o, argv + 1, argc - 1, &err);
    status = output_close(stdout, "standard", "output", status, &err);
    free(o.prompt.text), free(o.stop.text);
    if (status) fprintf(stderr, "flexgen: %s\n", err.text);
    return status ? err.code : EXIT_OK;
}
