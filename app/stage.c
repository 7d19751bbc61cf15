/* stage.c: lets the stages of a pipeline agree before a run (section 4.4), and collects their
 * traces after it.
 *
 * The first stage reads the input, searches for the policy and writes the output; it sends the task
 * to the others. All stages then make the same admission decisions, so each knows which sequences
 * are in flight. If the machines are simulated, all stages are in this process, one thread each.
 * Read next: flags.c. */
#include <pthread.h>

#include "device/device.h"
#include "app/app.h"

/* Hashes of what must be the same on all stages. */
typedef struct {
    uint64_t model, flags, program;
} Identity;

uint64_t flags_digest(char **args, int n) {
    static const char *const own[] = {"--model",   "--offload-dir", "--threads",  "--gpu-mem",
                                      "--cpu-mem", "--disk-mem",    "--hardware", "--with",
                                      "--device"}; /* these may differ from machine to machine */
    uint64_t hash = HASH_START;
    for (int a = 0; a < n; a++) {
        bool skip = false;
        for (size_t i = 0; i < sizeof own / sizeof *own; i++)
            skip = skip || !strcmp(args[a], own[i]);
        a += skip;
        if (!skip)
            hash = hash_bytes(hash, args[a], strlen(args[a]) + 1);
    }
    return hash;
}

int stage_join(Net *net, const Checkpoint *checkpoint, uint64_t flags, Error *err) {
    const Identity mine = {
        checkpoint_digest(checkpoint), flags,
        hash_bytes(HASH_START, PIPELINE_VERSION, strlen(PIPELINE_VERSION)) + sizeof(Policy)};
    Identity first = mine;
    if (net->share(net, &first, sizeof first, err))
        return -1;
    const char *what = mine.program != first.program ? "another version of flexgen"
                       : mine.model != first.model   ? "another model"
                       : mine.flags != first.flags   ? "other flags"
                                                     : NULL;
    return net->agree(
        net,
        what ? fail(err, EXIT_USAGE, "has %s than stage 0; give all stages the same", what) : 0,
        err);
}

int stage_layers(int *first, int l, const Net *net, const Texts *given, Error *err) {
    const int m = net->stages, p = net->stage;
    int layers = 0, sum = 0;
    *first = l * p / m;
    if (m > l)
        return fail(err, EXIT_USAGE,
                    "a pipeline of %d stages: the model has %d layer%s; start fewer", m, l,
                    plural(l));
    if (!given->n)
        return l * (p + 1) / m - *first;
    for (int s = 0; s < given->n; s++) {
        const int n = atoi(given->text[s]);
        if (n < 1)
            return fail(err, EXIT_USAGE, "--stages: expected numbers of layers such as 10,10,10,8");
        if (s == p) {
            *first = sum;
            layers = n;
        }
        sum += n;
    }
    if (given->n == m && sum == l)
        return layers;
    return fail(err, EXIT_USAGE,
                "--stages: %d stage%s of together %d layer%s; expected %d, of together %d",
                given->n, plural(given->n), sum, plural(sum), m, l);
}

// -------------------------------------------------------------------------------------------------
// The task
// -------------------------------------------------------------------------------------------------

/* A prompt as it is sent to the other stages, without its tokens. The last `known` of its s tokens
 * were generated before. */
typedef struct {
    int s, n, from, place, known;
} Sent;

typedef struct {
    int count, requests;
    bool scored;
    Sampling sampling;
} TaskHead;

static size_t sent_tokens(const Task *task, const Sent *sent) {
    return (size_t)sent->s + (task->scored ? sent->n : 0);
}

/* Sends the tokens of all prompts, one behind the other. */
static int share_tokens(Net *net, Task *task, const Sent *sent, Error *err) {
    size_t n = 0, at = 0;
    for (int i = 0; i < task->count; i++)
        n += sent_tokens(task, &sent[i]);
    int32_t *ids = xcalloc(n, sizeof *ids);
    for (int i = 0; i < task->count && !net->stage; i++) {
        const size_t size = sent_tokens(task, &sent[i]);
        memcpy(ids + at, task->prompts[i].ids, size * sizeof *ids);
        at += size;
    }
    const int status = net->share(net, ids, n * sizeof *ids, err);
    at = 0;
    for (int i = 0; i < task->count && net->stage && !status; i++) {
        const Sent *q = &sent[i];
        const size_t size = sent_tokens(task, q);
        task->prompts[i] = (Prompt){.s = q->s, .n = q->n, .from = q->from, .place = q->place};
        task->prompts[i].ids = memcpy(xcalloc(size, sizeof *ids), ids + at, size * sizeof *ids);
        at += size;
    }
    free(ids);
    return status;
}

/* Sends prompts and tokens. With a job, the other stages fill in its requests as far as their
 * listeners need them: the known tokens. */
int stage_share_task(Net *net, Task *task, Job *job, Error *err) {
    TaskHead head = {task->count, job ? job->count : 0, task->scored, task->sampling};
    if (net->share(net, &head, sizeof head, err))
        return -1;
    Sent *sent = xcalloc(head.count, sizeof *sent);
    for (int i = 0; i < head.count && !net->stage; i++) {
        const Prompt *q = &task->prompts[i];
        sent[i] = (Sent){q->s, q->n, q->from, q->place, job ? job->request[q->place].known : 0};
    }
    if (net->stage) {
        *task = (Task){.count = head.count, .scored = head.scored, .sampling = head.sampling};
        task->prompts = xcalloc(head.count, sizeof *task->prompts);
    }
    int status = net->share(net, sent, head.count * sizeof *sent, err);
    if (!status)
        status = share_tokens(net, task, sent, err);
    if (job && net->stage) {
        job->request = xcalloc(head.requests, sizeof *job->request);
        job->count = head.requests;
    }
    for (int i = 0; i < head.count && job && net->stage && !status; i++) {
        Request *r = &job->request[sent[i].place];
        const int known = sent[i].known;
        *r = (Request){.ids = task->prompts[i].ids,
                       .s = sent[i].s - known,
                       .n = sent[i].n + known,
                       .known = known};
        r->tokens = memcpy(xcalloc(2 * (size_t)known + 1, sizeof *r->tokens), r->ids + r->s,
                           known * sizeof *r->tokens);
    }
    free(sent);
    return status;
}

// -------------------------------------------------------------------------------------------------
// Plans
// -------------------------------------------------------------------------------------------------

/* A stage's plan in a few numbers, for its line on standard error. */
typedef struct {
    int first, layers;
    size_t total[NTIERS];
} PlanLine;

int stage_print_plans(Net *net, const Plan *plan, int first, Error *err) {
    PlanLine line = {.first = first, .layers = plan->config.l};
    memcpy(line.total, plan->total, sizeof line.total);
    if (net->stage)
        return net->send(net, 0, NET_SETUP, &line, sizeof line, err);
    for (int s = 0; s < net->stages; s++) {
        if (s && net->receive(net, s, NET_SETUP, &line, sizeof line, err))
            return -1;
        fprintf(stderr, "stage %d: layers %d to %d; planned (MiB) GPU %.2f, CPU %.2f, disk %.2f\n",
                s, line.first, line.first + line.layers - 1, line.total[0] / MEBIBYTE,
                line.total[1] / MEBIBYTE, line.total[2] / MEBIBYTE);
    }
    return 0;
}

// -------------------------------------------------------------------------------------------------
// Traces
// -------------------------------------------------------------------------------------------------

Trace *stage_trace(int stage, int first, int layers, size_t limit) {
    Trace *trace = xcalloc(1, sizeof *trace);
    trace->limit = limit;
    snprintf(trace->name, sizeof trace->name, "stage %d: layers %d to %d", stage, first,
             first + layers - 1);
    return trace;
}

static int receive_trace(Net *net, int from, Trace *trace, double ready_at, Error *err) {
    Trace sent;
    if (net->receive(net, from, NET_SETUP, &sent, sizeof sent, err))
        return -1;
    *trace = sent;
    trace->slice = xcalloc(sent.n, sizeof *sent.slice);
    trace->held = xcalloc(sent.sweeps, sizeof *sent.held);
    if (net->receive(net, from, NET_SETUP, trace->slice, sent.n * sizeof *sent.slice, err) ||
        net->receive(net, from, NET_SETUP, trace->held, sent.sweeps * sizeof *sent.held, err))
        return -1;
    for (size_t i = 0; i < sent.n; i++) {
        trace->slice[i].begin += ready_at - sent.ready_at;
        trace->slice[i].end += ready_at - sent.ready_at;
    }
    for (size_t i = 0; i < sent.sweeps; i++)
        trace->held[i].at += ready_at - sent.ready_at;
    return 0;
}

int stage_gather_traces(Net *net, Trace *all, Error *err) {
    if (net->stage)
        return net->send(net, 0, NET_SETUP, all, sizeof *all, err) ||
                       net->send(net, 0, NET_SETUP, all->slice, all->n * sizeof *all->slice, err) ||
                       net->send(net, 0, NET_SETUP, all->held, all->sweeps * sizeof *all->held, err)
                   ? -1
                   : 0;
    for (int s = 1; s < net->stages; s++)
        if (receive_trace(net, s, &all[s], all->ready_at, err))
            return -1;
    return 0;
}

// -------------------------------------------------------------------------------------------------
// A pipeline of simulated machines, all in this process
// -------------------------------------------------------------------------------------------------

int stages_split(Stages *all, const Checkpoint *whole, int m, const Texts *given, Error *err) {
    *all = (Stages){.n = m, .stage = xcalloc(m, sizeof *all->stage)};
    for (int s = 0; s < m; s++) {
        Stage *stage = &all->stage[s];
        const int layers = stage_layers(&stage->first, whole->config.l,
                                        &(Net){.stage = s, .stages = m}, given, err);
        if (layers < 0)
            return -1;
        stage->part = checkpoint_stage(whole, s, m, stage->first, layers);
    }
    return 0;
}

int stages_plan(Stages *all, const Policy *policy, const Task *task, Type act_type,
                const Bytes capacity[NTIERS], Error *err) {
    Error why;
    for (int s = 0; s < all->n; s++) {
        Stage *stage = &all->stage[s];
        Policy p = *policy;
        plan_free(stage->plan);
        stage->plan = NULL;
        if (fit_policy(&p, &stage->part, task, act_type, capacity, &why))
            return fail_of_stage(err, s, &why);
        stage->plan = plan_make(&stage->part, &p, task, act_type, err);
    }
    return 0;
}

void stages_open(Stages *all, const Hardware *hardware, double bytes_s, double delay_s) {
    Device **sim = xcalloc(all->n, sizeof(Device *));
    Error none; /* a sim always opens */
    for (int s = 0; s < all->n; s++)
        sim[s] = all->stage[s].device = sim_open(all->stage[s].plan, hardware, &none);
    all->world = world_open(sim, all->n, bytes_s, delay_s);
    free(sim);
}

static void *run_stage(void *arg) {
    Stage *s = arg;
    if (schedule_run(s->plan, s->task, s->device, &s->listener, &s->stats, &s->err) &&
        s->device->net)
        s->device->net->fail(s->device->net, &s->err);
    world_leave(s->device);
    return NULL;
}

int stages_run(Stages *all, const Task *task, const Listener *listener, RunStats *stats,
               Error *err) {
    Stage *first = &all->stage[0];
    int started = 1;
    for (int s = 0; s < all->n; s++) {
        Stage *stage = &all->stage[s];
        stage->task = task;
        stage->listener = s ? (Listener){.done = completion_ignored} : *listener;
        const int status = s ? pthread_create(&stage->thread, NULL, run_stage, stage) : 0;
        if (status) {
            fail_to_start(err, status);
            first->device->net->fail(first->device->net, err);
            break;
        }
        started = s + 1;
    }
    run_stage(first);
    for (int s = 1; s < started; s++)
        pthread_join(all->stage[s].thread, NULL);
    *stats = first->stats;
    if (first->err.text[0])
        *err = first->err;
    return first->err.text[0] ? -1 : 0;
}

void stages_close(Stages *all) {
    for (int s = 0; all->world && s < all->n; s++) {
        Trace *trace = all->stage[s].device->trace;
        if (trace)
            trace_free(trace);
        free(trace);
    }
    if (all->world)
        world_close(all->world);
    for (int s = 0; s < all->n; s++)
        plan_free(all->stage[s].plan);
    free(all->stage);
}
