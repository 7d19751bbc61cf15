/* flexgen.c: the six commands, and main.
 *
 *   generate   prompts in, completions out
 *   bench      a named model with random weights, prompts of one length, measured throughput
 *   policy     the best policies for a machine, by a cost model
 *   profile    this machine as numbers
 *   quantize   a 4-bit copy of a checkpoint
 *   eval       perplexity, last words, scores of completions
 *
 * app/flags.c reads the command line, and app/report.c prints the results. Between them, every
 * command that runs a task takes the same way: plan_task (app/choose.c) chooses the machine, the
 * policy and the place of every byte; run_task opens the device, loads the weights and runs the
 * sweeps. Exit status: 0 done, 1 failed, 2 wrong use or does not fit. Results go to standard
 * output, everything else to standard error. */
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <unistd.h>

#include "app/app.h"

// -------------------------------------------------------------------------------------------------
// Running a task
// -------------------------------------------------------------------------------------------------

static void say_untied(const char *model) {
    fprintf(stderr,
            "%s: lm_head.weight differs from the token table and is used, as transformers does "
            "from version 5 on, though "
            "tie_word_embeddings is true; set it to false\n",
            model);
}

static void say_processors(const TaskRun *run) {
    if (run->processors)
        fprintf(stderr, "computing on %d of %d processors (quota of CPU)\n", run->threads,
                run->processors);
}

/* Tells a user who expected another head, the GPU, or the GPU's full speed why it is otherwise. On
 * a terminal this comes at once; in a log only after success, so that an error stays the only line.
 */
static void say_notices(const TaskRun *run, bool now) {
    if (follows(run) || now != isatty(STDERR_FILENO))
        return;
    say_processors(run);
    if (run->checkpoint->untied)
        say_untied(run->options->model);
    if (run->no_gpu.text[0])
        fprintf(stderr, "running on the host device: %s\n", run->no_gpu.text);
    if (run->device->notice.text[0])
        fprintf(stderr, "%s\n", run->device->notice.text);
}

/* Compares the GPU's own account with the plan. */
static void check_in_use(TaskRun *run) {
    size_t planned = run->in_use_before + run->plan->total[TIER_GPU] + run->gpu->spare;
    run->in_use = run->gpu->in_use(run->gpu);
    if (run->in_use > planned)
        fail(&run->device->notice, EXIT_OK,
             "the GPU counts %.1f MiB more in use than planned, by this program or by others",
             (run->in_use - planned) / MEBIBYTE);
}

static Device *open_device(TaskRun *run, Error *err) {
    if (run->stages.n) {
        Cluster wire = cluster_of(run);
        stages_open(&run->stages, run->hardware, wire.net_bdw, wire.delay_s);
        return run->stages.stage[0].device;
    }
    if (run->sim)
        return sim_open(run->plan, run->hardware);
    return device_open(run->gpu, run->plan, run->checkpoint, run->options->offload_dir, err);
}

/* Runs the sweeps. Fails if the checkpoint has changed since its weights were read. */
static int run_sweeps(TaskRun *run, const Task *task, const Listener *listener, Error *err) {
    if (run->stages.n)
        return stages_run(&run->stages, task, listener, &run->stats, err);
    if (schedule_run(run->plan, task, run->device, listener, &run->stats, err) ||
        (!run->sim && checkpoint_unchanged(run->checkpoint, err)))
        return -1;
    return stage_agree(run->net, 0, err);
}

/* Gives each stage's device a trace. Stages on one computer share a clock; others note when all
 * were ready, so that their clocks can be compared. */
static void begin_traces(TaskRun *run) {
    const Net *net = run->net;
    Trace *trace = run->traces = xcalloc(run->nstages, sizeof *trace);
    *trace =
        stage_trace(net ? net->stage : 0, run->first_layer, run->plan->config.l, run->trace_limit);
    if (net && net->neighbours != net->stages)
        trace->ready_at = run->device->now(run->device);
    if (!net && !run->stages.n)
        snprintf(trace->name, sizeof trace->name, "%s", run->plan->config.name);
    run->device->trace = trace;
    for (int s = 1; s < run->stages.n; s++) {
        const Stage *stage = &run->stages.stage[s];
        trace[s] = stage_trace(s, stage->first, stage->part.config.l, run->trace_limit);
        stage->device->trace = &trace[s];
    }
}

/* Collects the traces of all stages on the first of them, which writes them if it is asked to. */
static int end_traces(TaskRun *run, Error *err) {
    const char *path = run->options->trace;
    if (run->net && stage_gather_traces(run->net, run->traces, err))
        return -1;
    if (!path || follows(run))
        return 0;
    FILE *file = output_open("--trace", path, err);
    if (!file)
        return -1;
    trace_write(run->traces, run->nstages, file);
    return output_close(file, "--trace", path, err);
}

/* Returns true for bench on a GPU, which measures first and traces in a second run, because a
 * trace's marks take the GPU's time. */
static bool traced_later(const TaskRun *run) { return run->bench && run->gpu && !run->net; }

/* Loads the weights, and begins the traces when all stages are ready. */
static int load_device(TaskRun *run, Error *err) {
    Device *device = run->device;
    memcpy(device->link, run->options->link, sizeof device->link);
    device->no_graph = run->options->no_graph;
    if (run->net)
        device->net = run->net;
    if (!run->sim)
        run->checkpoint->digest = checkpoint_digest(run->checkpoint);
    if ((!run->sim && (weights_load(run->plan, run->checkpoint, device, err) ||
                       checkpoint_unchanged(run->checkpoint, err))) ||
        (run->gpu && gpu_warm_up(device, run->plan, err)) || stage_agree(run->net, 0, err))
        return -1;
    if (run->traced && !traced_later(run))
        begin_traces(run);
    return 0;
}

/* Opens the device, which stays open for its counters, and loads it. If the task is a job's, its
 * output begins, and from now on a signal only stops the sweeps. */
static int begin_run(TaskRun *run, Error *err) {
    run->traced = run->options->trace || (run->bench && !traced_later(run));
    memory_restart(); /* measuring the machine took another device's tiers */
    run->overhead = process_planned(run);
    run->device = open_device(run, err);
    if (!run->device)
        return -1;
    say_notices(run, true);
    if (load_device(run, err))
        return -1;
    if (!run->completions)
        return 0;
    if (completions_begin(run->completions, run->head, err))
        return -1;
    stop_catch();
    run->device->stop = stop_signal();
    return 0;
}

/* Ends the job's output, if there is a job; status is the success of the sweeps. Then compares
 * memory, and writes the trace. */
static int end_run(TaskRun *run, int status, Error *err) {
    Completions *c = run->completions;
    if (c ? completions_end(c, status, err) : status)
        return -1;
    if (run->gpu)
        check_in_use(run);
    if (run->traces && end_traces(run, err))
        return -1;
    say_notices(run, false);
    return 0;
}

/* Runs a task, and tells people what it takes and what was expected. progress may be NULL. */
static int run_task(TaskRun *run, const Task *task, Listener listener, Progress *progress,
                    Error *err) {
    bool verbose = (run->options->verbose || run->bench) && !follows(run);
    if (progress)
        progress_open(progress, run->plan, task);
    if (verbose)
        plan_print(stderr, run->plan, run->capacity);
    int status = begin_run(run, err);
    if (!status)
        status = end_run(run, run_sweeps(run, task, &listener, err), err);
    if (progress)
        progress_clear(progress);
    if (status)
        return -1;
    if (verbose)
        print_peaks(run);
    if (!follows(run))
        print_prediction(run, task);
    return 0;
}

// -------------------------------------------------------------------------------------------------
// Jobs, and flexgen generate
// -------------------------------------------------------------------------------------------------

/* Reads the prompts of the command line, or of a file. */
static int read_job(Job *job, const Options *o, Error *err) {
    const char *path = o->score ? o->score : o->prompts;
    if (path) {
        if (!strcmp(path, "-") && isatty(STDIN_FILENO))
            fprintf(stderr, "prompts, one a line; Ctrl-D ends them\n");
        if (job_read(job, path, err))
            return -1;
        if (!job->count)
            fprintf(stderr, "%s: no prompts; nothing to do\n", input_name(path));
        return 0;
    }
    job->strict = true; /* the person who typed the prompt is there to read the error */
    for (int i = 0; i < o->prompt.n; i++)
        job_add(job,
                &(Lines){.line = o->prompt.text[i],
                         .size = strlen(o->prompt.text[i]),
                         .number = i + 1,
                         .where = "--prompt"},
                false);
    return job_settle(job, "", err);
}

/* Returns a description of the job, as far as its tokens depend on it. It must be the same when the
 * job goes on. */
static cJSON *job_head(const TaskRun *run, const Job *job) {
    const Options *o = run->options;
    const Policy *p = &run->given;
    Sampling s = o->sampling;
    char text[64];
    cJSON *head = cJSON_CreateObject(), *stop;
    if (s.temperature <= 0)
        s = (Sampling){.top_p = 1}; /* greedy: nothing else counts */
    cJSON_AddTrueToObject(head, JOURNAL_VERSION);
    snprintf(text, sizeof text, "%016" PRIx64, checkpoint_digest(run->whole));
    cJSON_AddStringToObject(head, "model", text);
    snprintf(text, sizeof text, "%016" PRIx64, tokenizer_digest(run->tokenizer));
    cJSON_AddStringToObject(head, "tokenizer", text);
    snprintf(text, sizeof text, "%d, %016" PRIx64, job->count, job->digest);
    cJSON_AddStringToObject(head, "prompts", text);
    ADD(head, {"--temperature", s.temperature}, {"--top-p", s.top_p}, {"--top-k", s.top_k});
    snprintf(text, sizeof text, "%" PRIu64, s.seed);
    cJSON_AddStringToObject(head, "--seed", text);
    stop = cJSON_AddArrayToObject(head, "--stop");
    for (int i = 0; i < o->stop.n; i++)
        cJSON_AddItemToArray(stop, cJSON_CreateString(o->stop.text[i]));
    cJSON_AddBoolToObject(head, "--format openai", o->format && !strcmp(o->format, "openai"));
    ADD(head, {"bits of weights", p->weight_packed ? 4 : p->weight_study.bits},
        {"group of weights", p->weight_packed ? GROUP : p->weight_study.group},
        {"bits of the cache", p->cache_packed ? 4 : p->cache_study.bits},
        {"group of the cache", p->cache_packed ? GROUP : p->cache_study.group},
        {"bits of the head", p->head_packed ? 4 : 0},
        {"--attn-sparsity", is_sparse(p) ? p->sparsity : 1});
    return head;
}

static bool alike(const cJSON *head, const cJSON *before, const char *key) {
    return cJSON_Compare(json_get(head, key), json_get(before, key), true);
}

/* Adds to the head what else the tokens depend on. A job may go on on another machine, or with
 * another version of the program; then a line says that its tokens may differ. */
static void add_machine(const TaskRun *run, const cJSON *before) {
    const Policy *p = &run->plan->policy;
    cJSON *head = run->head;
    cJSON_AddStringToObject(head, "device", run->gpu ? run->gpu->name : "host");
    cJSON_AddStringToObject(head, "instructions", host_isa());
    cJSON_AddNumberToObject(head, "sums", HOST_SUMS);
    if (!before)
        return;
    const char *why = !alike(head, before, "device") || !alike(head, before, "instructions")
                          ? "on another machine"
                      : !alike(head, before, "sums")
                          ? "with another version of this program, which adds in another order"
                      : run->gpu                        ? "on a GPU"
                      : p->cache_packed || is_sparse(p) ? "with an approximate cache"
                                                        : NULL;
    if (why)
        fprintf(stderr,
                "going on %s: the tokens to come may differ from those of a run without a break\n",
                why);
}

/* Says what has become of the job. -1 and err (EXIT_FAILED) if prompts were impossible. */
static int sum_up_job(const TaskRun *run, const Job *job, Error *err) {
    int errors = 0, cut = 0, truncated = 0, lines = 0;
    bool scored = job->task.scored;
    for (int i = 0; i < job->count; i++) {
        const Request *e = &job->request[i];
        errors += e->error != NULL;
        cut += e->cut && e->ended && !e->stopped;
        lines += !e->part;
        truncated += e->truncated;
    }
    if (job->task.count)
        print_summary(run, lines, completions_tokens(run->completions));
    if (cut)
        fprintf(stderr,
                "%d of %d %s%s cut short: the model has %d positions, too few for all tokens asked "
                "for\n",
                cut, lines, scored ? "prompt" : "completion", plural(lines), job->config->max_pos);
    if (truncated)
        fprintf(stderr, "%d of %d prompt%s truncated: only the last tokens were taken\n", truncated,
                lines, plural(lines));
    if (!errors)
        return 0;
    return fail(err, EXIT_FAILED,
                "%d of %d prompt%s could not be %s; look for \"error\" in the output", errors,
                lines, plural(lines), scored ? "scored" : "completed");
}

/* Shares what is left of a job with all stages, and runs it. */
static int run_rest(TaskRun *run, Job *job, Completions *c, Error *err) {
    Task *task = &job->task;
    if (stage_share_task(run->net, task, job, err))
        return -1;
    if (!task->count)
        return 0;
    if (plan_task(run, task, err))
        return -1;
    if (run->head)
        add_machine(run, completions_head(c));
    return run_task(run, task, completions_listener(c),
                    follows(run) ? NULL : completions_progress(c), err);
}

/* Runs what is left of a job; if nothing is left, only its lines are written. */
static int complete_job(TaskRun *run, Job *job, Error *err) {
    bool finished;
    if (!job->count)
        return run_rest(run, job, NULL, err);
    Completions *c = run->completions = completions_open(job, run->options, err);
    if (!c || settle_compression(run, err))
        return -1;
    run->head = job_head(run, job);
    if (completions_resume(c, run->head, &finished, err))
        return -1;
    if (finished)
        fprintf(stderr, "%s: has a line for every prompt; nothing is left to do%s\n",
                run->options->output, run->options->trace ? ", and there is no trace" : "");
    else
        job_rest(job);
    if (run_rest(run, job, c, err) ||
        (!job->task.count && !finished &&
         (completions_begin(c, run->head, err) || completions_end(c, 0, err))))
        return -1;
    return sum_up_job(run, job, err);
}

/* Runs a job that has no output of its own: eval's, or a following stage's part of one. */
static int follow_job(TaskRun *run, Job *job, Error *err) {
    Completions *c = completions_follow(job, run->options);
    int status = run_rest(run, job, c, err);
    completions_free(c);
    return status;
}

/* Runs a job with an output. */
static int run_job(TaskRun *run, Job *job, Error *err) {
    int status = follows(run)                       ? follow_job(run, job, err)
                 : read_job(job, run->options, err) ? -1
                                                    : complete_job(run, job, err);
    cJSON_Delete(run->head);
    completions_free(run->completions);
    return status;
}

/* Tells a user once who has written an escape in --stop that no shell has read. */
static void say_escapes(const Texts *stop) {
    for (int i = 0; i < stop->n; i++)
        if (strchr(stop->text[i], '\\')) {
            fprintf(stderr,
                    "--stop %s: is taken with its backslash; if it is an escape, write $'%s'\n",
                    stop->text[i], stop->text[i]);
            return;
        }
}

static int generate(TaskRun *run, Error *err) {
    const Options *o = run->options;
    Job job = {.tokenizer = run->tokenizer,
               .config = &run->checkpoint->config,
               .max_tokens = o->max_tokens,
               .strict = o->strict,
               .truncate = o->truncate,
               .format = o->format,
               .sampling = o->sampling};
    if (!follows(run)) {
        generation_notice(stderr, o->model);
        say_escapes(&o->stop);
    }
    int status = run_job(run, &job, err);
    job_free(&job);
    return status;
}

// -------------------------------------------------------------------------------------------------
// flexgen bench
// -------------------------------------------------------------------------------------------------

enum {
    MAX_BENCH = 1 << 28, /* most prompt tokens of a task */
    MAX_SLICES = 1 << 14 /* most slices of a trace that only adds up */
};

/* Draws a length between two for a prompt; `which` tells it from the prompt's other draws. */
static int draw_length(const int range[2], uint64_t seed, int prompt, int which) {
    return range[0] + random_draw(seed, prompt, which) * (range[1] - range[0] + 1);
}

/* Returns a task of prompts of one length, or of lengths between two, still without tokens. */
static Task bench_task(const Options *o, int count) {
    enum { PROMPT_LEN = -1, GEN_LEN = -2 };
    Task task = {.count = count, .prompts = xcalloc(count, sizeof *task.prompts)};
    for (int i = 0; i < count; i++) {
        task.prompts[i].s = draw_length(o->prompt_len, o->sampling.seed, i, PROMPT_LEN);
        task.prompts[i].n = draw_length(o->gen_len, o->sampling.seed, i, GEN_LEN);
    }
    return task;
}

/* Draws the prompts' tokens at random. */
static void fill_prompts(Task *task, const OptConfig *config, uint64_t seed) {
    for (int i = 0; i < task->count; i++) {
        Prompt *p = &task->prompts[i];
        p->ids = xcalloc(p->s, sizeof *p->ids);
        p->ids[0] = 2; /* </s> */
        for (int t = 1; t < p->s; t++)
            p->ids[t] = random_draw(seed, i, t) * config->vocab;
    }
}

static int check_lengths(const Options *o, const OptConfig *config, Error *err) {
    int s = o->prompt_len[1], n = o->gen_len[1];
    if (s <= config->max_pos && n <= config->max_pos - s + 1)
        return 0;
    return fail(
        err, EXIT_USAGE,
        "--prompt-len %d --gen-len %d: expected at most %d together, as the model has %d positions",
        s, n, config->max_pos + 1, config->max_pos);
}

/* Returns the number of prompts: as many as are asked for, or one block. If the search chooses the
 * block (run->one_block), this is the largest that it may choose. */
static int bench_count(TaskRun *run, Error *err) {
    enum { LARGEST_BLOCK = 4096 };
    const Options *o = run->options;
    const Policy *p = &run->given;
    int s = o->prompt_len[1], block = p->gbs * p->num_gpu_batches * flight_count(p);
    run->one_block = !o->num_prompts && !block;
    int count = o->num_prompts ? o->num_prompts
                : block        ? block
                               : imin(LARGEST_BLOCK, MAX_BENCH / s);
    if (check_lengths(o, &run->checkpoint->config, err))
        return -1;
    if ((double)count * s <= MAX_BENCH)
        return count;
    return fail(err, EXIT_USAGE,
                "--prompt-len %d: %d prompts (--num-prompts, or --gpu-batch-size x "
                "--num-gpu-batches) are over %d tokens",
                s, count, MAX_BENCH);
}

/* Adds a completion to the run's digest, which does not depend on the order in which they end. */
static int digest_done(void *ctx, int prompt, const int32_t *tokens, int n, FinishReason reason,
                       Error *err) {
    TaskRun *run = ctx;
    (void)reason;
    (void)err;
    run->digest += hash_bytes(HASH_START + prompt, tokens, n * sizeof *tokens);
    return 0;
}

/* Runs and reports a planned bench. On a GPU, a trace is of a second run; the measurements are
 * written before it, because it may not end. */
static int bench_planned(TaskRun *run, const Task *task, Error *err) {
    Listener listener = {.ctx = run, .done = digest_done};
    if (run_task(run, task, listener, NULL, err))
        return -1;
    if (follows(run))
        return 0;
    report_bench(run);
    if (!traced_later(run) || !run->options->trace)
        return 0;
    if (report_write(run, err))
        return -1;
    begin_traces(run);
    memset(run->device->count, 0, sizeof run->device->count);
    if (run_sweeps(run, task, &listener, err) || end_traces(run, err))
        return -1;
    report_traced(run);
    return 0;
}

static int bench(TaskRun *run, Error *err) {
    OptConfig *config = &run->checkpoint->config;
    int count = bench_count(run, err);
    if (count < 0)
        return -1;
    config->eos = -1; /* every sequence runs to its full length */
    config->nmore = 0;
    run->bench = true;
    run->trace_limit = run->options->trace ? 0 : MAX_SLICES;
    Task task = bench_task(run->options, count);
    int status = plan_task(run, &task, err);
    if (!status) {
        fill_prompts(&task, config, run->options->sampling.seed);
        status = bench_planned(run, &task, err);
    }
    prompts_free(&task);
    return status;
}

// -------------------------------------------------------------------------------------------------
// flexgen policy
// -------------------------------------------------------------------------------------------------

/* Finds the placement of one block by Appendix A.3. */
static int paper_policy(TaskRun *run, Error *err) {
    const Options *o = run->options;
    const OptConfig *config = &run->checkpoint->config;
    Block block = {o->prompt_len[1], o->gen_len[1], o->policy.gbs, o->policy.num_gpu_batches};
    Cost cost;
    Hardware *h = run->hardware = xcalloc(1, sizeof *h);
    if (check_lengths(o, config, err) || read_machine(h, o, err) ||
        paper_cost(&cost, h, config, &block, err))
        return -1;
    report_paper(run, &cost, &block);
    Search machine = {
        .hardware = h, .checkpoint = run->checkpoint, .capacity = {h->gmem, h->cmem, h->nmem}};
    return o->explain ? report_explained(run, &machine, NULL, &block, err) : 0;
}

/* Compares one machine, the pipeline, and the chain without offloading. */
static int cluster_policy(const TaskRun *run, const Search *search, Error *err) {
    Search alone = *search;
    Found one, pipeline, chain;
    Error too_small;
    alone.cluster.nodes = 1;
    if (cluster_search(&one, &alone, true, err) || cluster_search(&pipeline, search, true, err))
        return -1;
    bool chained = cluster_search(&chain, search, false, &too_small) == 0;
    const Found *const found[] = {&one, &pipeline, chained ? &chain : NULL};
    report_clusters(run, found, chained ? 0 : cluster_least(search));
    return 0;
}

/* Reports the best ten policies, or the frontier. */
static int single_policy(const TaskRun *run, Search *search, Error *err) {
    enum { TEN = 10 };
    bool frontier = run->options->frontier;
    static Found found[MANY_FOUND]; /* too much for a small stack */
    int n = frontier ? policy_frontier(found, MANY_FOUND, search, err)
                     : find_policies(found, MANY_FOUND, search, err);
    if (n < 0)
        return -1;
    report_found(run, frontier ? "frontier" : "best", found, frontier ? n : imin(n, TEN));
    return run->options->explain ? report_explained(run, search, &found->policy, NULL, err) : 0;
}

static int policy(TaskRun *run, Error *err) {
    const Options *o = run->options;
    if (o->paper_model)
        return paper_policy(run, err);
    int count = bench_count(run, err);
    if (count < 0 || choose_machine(run, true, err) || know_machine(run, err) ||
        settle_compression(run, err))
        return -1;
    Task task = bench_task(o, count);
    Search search = search_for(run, &task);
    int status = o->nodes ? cluster_policy(run, &search, err) : single_policy(run, &search, err);
    prompts_free(&task);
    return status;
}

// -------------------------------------------------------------------------------------------------
// flexgen profile, quantize and eval
// -------------------------------------------------------------------------------------------------

/* Measures this machine anew (at a model's shapes, if one is named), keeps the result for later
 * runs, and writes it. */
static int profile(TaskRun *run, Error *err) {
    const Options *o = run->options;
    const char *to = o->output ? o->output : "-";
    ProfileSize size;
    if (choose_machine(run, false, err) ||
        profile_size(&size, run->gpu, run->checkpoint ? &run->checkpoint->config : NULL,
                     run->memory, err))
        return -1;
    say_processors(run);
    ThisMachine here = {run->gpu, o->offload_dir, run->threads, run->capacity, stderr};
    if (profile_measure(run->hardware, &size, &here, err))
        return -1;
    profile_keep(run->hardware, &size, &here);
    FILE *out = output_open("--output", to, err);
    if (!out)
        return -1;
    profile_write(run->hardware, out);
    return output_close(out, "--output", to, err);
}

static int quantize(TaskRun *run, Error *err) {
    const Options *o = run->options;
    Bytes shard_bytes = 5000000000; /* the usual size of a shard of large checkpoints */
    CopyStats stats;
    stop_catch();
    choose_threads(run);
    if (checkpoint_quantize(&stats, o->model, o->output, shard_bytes, o->compress_head,
                            isatty(STDERR_FILENO) ? stderr : NULL, err))
        return -1;
    say_processors(run);
    if (stats.untied)
        say_untied(o->model);
    fprintf(stderr,
            "%.2f MB packed to %.2f MB, %d file%s in %s: %.2f bits a weight, %.2f in the matrices "
            "of the layers%s\n",
            stats.before / 1e6, stats.after / 1e6, stats.files, plural(stats.files), o->output,
            stats.bits, stats.packed_bits, o->compress_head ? " and the head" : "");
    return 0;
}

/* Reads what eval adds up, scores it, and reports the sums. */
static int add_up(TaskRun *run, Eval *eval, Error *err) {
    const Options *o = run->options;
    Job *job = &eval->job;
    if (follows(run))
        return follow_job(run, job, err);
    job->strict = true;
    if (o->perplexity ? eval_text(eval, o->perplexity, err) : job_read(job, o->last_word, err))
        return -1;
    if (!job->count)
        return fail(err, EXIT_FAILED, "%s: no lines; expected JSON lines {\"text\": ...}",
                    input_name(o->last_word));
    job_rest(job);
    if (follow_job(run, job, err))
        return -1;
    report_eval(run, eval);
    return 0;
}

static int eval(TaskRun *run, Error *err) {
    const Options *o = run->options;
    Eval eval = {.job = {.tokenizer = run->tokenizer,
                         .config = &run->checkpoint->config,
                         .format = "jsonl",
                         .limit = o->limit,
                         .stepwise = o->compress_cache || is_sparse(&o->policy),
                         .task.scored = true},
                 .window = o->window};
    int status = o->score ? run_job(run, &eval.job, err) : add_up(run, &eval, err);
    job_free(&eval.job);
    return status;
}

// -------------------------------------------------------------------------------------------------
// main
// -------------------------------------------------------------------------------------------------

/* Opens a directory's checkpoint, or makes a named size with random weights. Texts need a
 * tokenizer, which only a directory has. */
static int open_model(TaskRun *run, bool texts, Error *err) {
    const char *model = run->options->model;
    OptConfig config;
    const char *why = directory_fault(model);
    bool named = why && opt_config_by_name(&config, model) == 0;
    if (named && texts)
        return fail(err, EXIT_USAGE,
                    "--model %s: is a name, for random weights; texts need a model's directory",
                    model);
    if (why && !named && !texts)
        return fail(err, EXIT_USAGE,
                    "--model %s: %s; expected a Hugging Face directory, or one of %s", model, why,
                    opt_known_names());
    run->whole = named ? checkpoint_dummy(&config, run->options->sampling.seed)
                       : checkpoint_open(model, err);
    run->checkpoint = run->whole;
    if (!run->checkpoint || !texts)
        return run->checkpoint ? 0 : -1;
    run->tokenizer = tokenizer_open(model, run->checkpoint->config.vocab, err);
    return run->tokenizer ? 0 : -1;
}

/* Joins the pipeline, if this process was started under mpirun: it is then a stage and has only
 * some of the layers. */
static int join_pipeline(TaskRun *run, Command command, Error *err) {
    const Options *o = run->options;
    Net *net = run->net = net_open(o->wire_bytes_s, o->wire_delay_s, err);
    if (!net)
        return err->text[0] ? -1 : 0;
    if ((command != GENERATE && command != BENCH && command != EVAL) || device_is(o, "sim"))
        return fail(err, EXIT_USAGE,
                    "only generate, bench and eval run as a pipeline; start this without mpirun");
    return 0;
}

/* Takes this stage's layers of the model. If the machines are simulated, all are in this process,
 * and the run's checkpoint is the first one's part. */
static int take_stage(TaskRun *run, Error *err) {
    const Options *o = run->options;
    Net *net = run->net;
    Policy *p = &run->given;
    int m = net ? net->stages : device_is(o, "sim") ? o->nodes : 0;
    run->nstages = imax(m, 1);
    /* one flight for each stage and one on the wire; if the search chooses the block, it chooses
     * the flights too */
    if (!p->flights && m > 1 && p->gbs && p->num_gpu_batches)
        p->flights = m + 1;
    if (!m)
        return 0;
    if (!net) {
        if (stages_split(&run->stages, run->whole, m, o->stages, err))
            return -1;
        run->checkpoint = &run->stages.stage[0].part;
        return 0;
    }
    if (stage_join(net, run->whole, run->tokenizer, o->digest, err) ||
        stage_part(&run->part, &run->first_layer, run->whole, net, o->stages, err))
        return -1;
    run->checkpoint = &run->part;
    return 0;
}

/* Returns true if the text names the stage that has failed, so that it is not this process's own
 * failure alone. */
static bool names_stage(const Error *err) {
    return !strncmp(err->text, "stage ", strlen("stage "));
}

static void say_error(const Error *err) {
    fprintf(stderr, "%s: %s\n", names_stage(err) ? "flexgen" : speaker, err->text);
}

/* Leaves the pipeline. A stage that has failed ends all of them; a failure that all have agreed on
 * is printed by the first. */
static void leave_pipeline(TaskRun *run, int status, const Error *err) {
    Net *net = run->net;
    if (!net)
        return;
    if (status && (!names_stage(err) || !net->stage)) {
        say_error(err);
        net->fail(net, err);
    }
    net->close(net);
}

static void run_close(TaskRun *run) {
    if (run->stages.n)
        stages_close(&run->stages);
    else {
        if (run->device)
            run->device->close(run->device);
        plan_free(run->plan);
    }
    if (run->gpu)
        run->gpu->close(run->gpu);
    for (int s = 0; run->traces && s < run->nstages; s++)
        trace_free(&run->traces[s]);
    free(run->traces);
    free(run->hardware);
    tokenizer_close(run->tokenizer);
    checkpoint_close(run->whole);
}

static int (*const commands[NCOMMANDS])(TaskRun *, Error *) = {
    [GENERATE] = generate, [BENCH] = bench,       [POLICY] = policy,
    [PROFILE] = profile,   [QUANTIZE] = quantize, [EVAL] = eval};

/* Opens standard streams that were closed. Otherwise the next file opened would get the number of
 * one of them, and results would go into it. */
static void open_standard_streams(void) {
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 &&
            open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY) != fd)
            exit(EXIT_FAILED);
}

static int run_command(Options *o, char **args, int n, Error *err) {
    Command command;
    o->help = has_word(" help --help -h ", args[0]);
    o->version = !strcmp(args[0], "--version");
    if (!o->help && !o->version &&
        (command_parse(&command, args[0], err) || flags_parse(o, command, args + 1, n - 1, err)))
        return -1;
    if (o->help || o->version) {
        (o->help ? flags_help : flags_version)(stdout);
        return 0;
    }
    if (flags_check(o, command, err))
        return -1;
    bool opens = o->model && command != QUANTIZE, texts = command == GENERATE || command == EVAL;
    TaskRun run = {.options = o, .given = o->policy};
    int status =
        join_pipeline(&run, command, err) ||
                (!follows(&run) && (files_check(o, command, err) || report_open(&run, err))) ||
                (opens && (open_model(&run, texts, err) || take_stage(&run, err))) ||
                commands[command](&run, err)
            ? -1
            : 0;
    status = report_close(&run, status, err);
    leave_pipeline(&run, status, err);
    run_close(&run);
    return status;
}

int main(int argc, char **argv) {
    Options o = options_default();
    Error err = {0};
    /* a closed pipe or a limit on file sizes becomes a failed write and one line */
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);
    memory_share_heap();
    open_standard_streams();
    if (argc < 2) {
        flags_help(stderr);
        return EXIT_USAGE;
    }
    int status = run_command(&o, argv + 1, argc - 1, &err);
    if (!status)
        status = output_close(stdout, "standard", "output", &err);
    free(o.prompt.text);
    free(o.stop.text);
    free(o.with.text);
    if (status)
        say_error(&err);
    return status ? err.code : EXIT_OK;
}
