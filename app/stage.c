/* stage.c: lets the stages of a pipeline agree before a run (section 4.4), and collects their
 * traces after it.
 *
 * The first stage reads the input, searches for the policy and writes the output; it sends the task
 * to the others. All stages then make the same admission decisions, so each knows which sequences
 * are in flight. If the machines are simulated, all stages are in this process, one thread each.
 *
 * MPI takes a tenth of a second and tens of megabytes. Therefore device/pipeline.c is a library of
 * its own beside the program, and it is loaded only where mpirun has started this process as one of
 * several.
 * Read next: flags.c. */
#include <dlfcn.h>
#include <unistd.h>

#include "app/app.h"

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
    else if ((net = open(bytes_s, delay_s, err)) && neighbours)
        net->neighbours = atoi(neighbours);
    return net;
}

int stage_share(Net *net, void *bytes, size_t size, Error *err) {
    if (net && net->stage)
        return net->receive(net, 0, NET_SETUP, bytes, size, err);
    for (int to = 1; net && to < net->stages; to++)
        if (net->send(net, to, NET_SETUP, bytes, size, err))
            return -1;
    return 0;
}

/* Stage 0 asks all stages in turn, and tells all of them the first that is not well. */
int stage_agree(Net *net, int status, Error *err) {
    Error first = {0}, other; /* code 0: all is well */
    if (!net)
        return status;
    if (status)
        fail_of_stage(&first, net->stage, err);
    if (net->stage && net->send(net, 0, NET_SETUP, &first, sizeof first, err))
        return -1;
    for (int from = 1; from < net->stages && !net->stage; from++) {
        if (net->receive(net, from, NET_SETUP, &other, sizeof other, err))
            return -1;
        if (!first.code)
            first = other;
    }
    if (stage_share(net, &first, sizeof first, err))
        return -1;
    if (first.code)
        *err = first;
    return first.code ? -1 : 0;
}

// -------------------------------------------------------------------------------------------------
// What must be the same on all stages
// -------------------------------------------------------------------------------------------------

/* Hashes of what must be the same on all stages. */
typedef struct {
    uint64_t model, tokenizer, flags, program;
} Identity;

int stage_join(Net *net, const Checkpoint *checkpoint, const Tokenizer *tokenizer, uint64_t flags,
               Error *err) {
    Identity mine = {
        checkpoint_digest(checkpoint), tokenizer_digest(tokenizer), flags,
        hash_bytes(HASH_START, PIPELINE_VERSION, strlen(PIPELINE_VERSION)) + sizeof(Policy)};
    Identity first = mine;
    if (stage_share(net, &first, sizeof first, err))
        return -1;
    const char *what = mine.program != first.program       ? "another version of flexgen"
                       : mine.model != first.model         ? "another model"
                       : mine.tokenizer != first.tokenizer ? "another tokenizer"
                       : mine.flags != first.flags         ? "other flags"
                                                           : NULL;
    return stage_agree(
        net,
        what ? fail(err, EXIT_USAGE, "has %s than stage 0; give all stages the same", what) : 0,
        err);
}

int stage_part(Checkpoint *part, int *first, const Checkpoint *whole, const Net *net,
               const char *given, Error *err) {
    int l = whole->config.l, m = net->stages, count = 0, layers = 0, sum = 0;
    if (m > l)
        return fail(err, EXIT_USAGE,
                    "a pipeline of %d stages: the model has %d layer%s; start fewer", m, l,
                    plural(l));
    for (const char *at = given; given ? at != NULL : count < m; count++) {
        int n = given ? atoi(at) : l * (count + 1) / m - sum;
        if (n < 1)
            return fail(err, EXIT_USAGE, "--stages: expected numbers of layers such as 10,10,10,8");
        if (count == net->stage) {
            *first = sum;
            layers = n;
        }
        sum += n;
        const char *comma = given ? strchr(at, ',') : NULL;
        at = comma ? comma + 1 : NULL;
    }
    if (count != m || sum != l)
        return fail(err, EXIT_USAGE,
                    "--stages: %d stage%s of together %d layer%s; expected %d, of together %d",
                    count, plural(count), sum, plural(sum), m, l);
    *part = checkpoint_stage(whole, net->stage, m, *first, layers);
    return 0;
}

// -------------------------------------------------------------------------------------------------
// The task
// -------------------------------------------------------------------------------------------------

/* A prompt as it is sent. The last `known` of its s tokens were generated before. */
typedef struct {
    Prompt prompt;
    int known;
    size_t stop; /* bytes of Request.stop */
} Sent;

int stage_share_task(Net *net, Task *task, Job *job, Error *err) {
    struct {
        Task task;
        int requests;
    } head = {*task, job ? job->count : 0};
    if (!net)
        return 0;
    if (stage_share(net, &head, sizeof head, err))
        return -1;
    if (net->stage) {
        *task = head.task;
        task->prompts = xcalloc(task->count, sizeof *task->prompts);
    }
    if (net->stage && job) {
        job->request = xcalloc(head.requests, sizeof *job->request);
        job->count = head.requests;
    }
    for (int i = 0; i < task->count; i++) {
        Prompt *q = &task->prompts[i];
        Sent sent = {.prompt = *q};
        if (job && !net->stage) {
            const Request *r = &job->request[q->place];
            sent = (Sent){*q, r->known, r->stop.len};
        }
        if (stage_share(net, &sent, sizeof sent, err))
            return -1;
        *q = sent.prompt;
        size_t n = q->s + (task->scored ? q->n : 0), known = sent.known;
        if (net->stage)
            q->ids = xcalloc(n, sizeof *q->ids);
        if (stage_share(net, q->ids, n * sizeof *q->ids, err))
            return -1;
        if (!job)
            continue;
        Request *r = &job->request[q->place];
        if (net->stage) { /* the request has what the stage's listener needs */
            *r = (Request){.ids = q->ids, .n = q->n + known, .known = known};
            r->tokens = memcpy(xcalloc(2 * known + 1, sizeof *r->tokens), q->ids + q->s - known,
                               known * sizeof *r->tokens);
            r->stop = (Text){xcalloc(sent.stop, 1), sent.stop, sent.stop};
        }
        if (sent.stop && stage_share(net, r->stop.text, sent.stop, err))
            return -1;
    }
    return 0;
}

// -------------------------------------------------------------------------------------------------
// Plans
// -------------------------------------------------------------------------------------------------

int stage_print_plans(Net *net, const Plan *plan, int first, Error *err) {
    char line[200];
    snprintf(line, sizeof line,
             "stage %d: layers %d to %d; planned (MiB) GPU %.2f, CPU %.2f, disk %.2f\n", net->stage,
             first, first + plan->config.l - 1, plan->total[TIER_GPU] / MEBIBYTE,
             plan->total[TIER_CPU] / MEBIBYTE, plan->total[TIER_DISK] / MEBIBYTE);
    if (net->stage)
        return net->send(net, 0, NET_SETUP, line, sizeof line, err);
    for (int s = 0; s < net->stages; s++) {
        if (s && net->receive(net, s, NET_SETUP, line, sizeof line, err))
            return -1;
        fprintf(stderr, "%s", line);
    }
    return 0;
}

// -------------------------------------------------------------------------------------------------
// Traces
// -------------------------------------------------------------------------------------------------

Trace stage_trace(int stage, int first, int layers, size_t limit) {
    Trace trace = {.limit = limit};
    snprintf(trace.name, sizeof trace.name, "stage %d: layers %d to %d", stage, first,
             first + layers - 1);
    return trace;
}

static int receive_trace(Net *net, int from, Trace *trace, double ready_at, Error *err) {
    Trace sent;
    if (net->receive(net, from, NET_SETUP, &sent, sizeof sent, err))
        return -1;
    double later = ready_at - sent.ready_at;
    sent.slice = xcalloc(sent.n, sizeof *sent.slice);
    sent.held = xcalloc(sent.sweeps, sizeof *sent.held);
    *trace = sent;
    if (net->receive(net, from, NET_SETUP, sent.slice, sent.n * sizeof *sent.slice, err) ||
        net->receive(net, from, NET_SETUP, sent.held, sent.sweeps * sizeof *sent.held, err))
        return -1;
    for (size_t i = 0; i < sent.n; i++) {
        sent.slice[i].begin += later;
        sent.slice[i].end += later;
    }
    for (size_t i = 0; i < sent.sweeps; i++)
        sent.held[i].at += later;
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

int stages_split(Stages *all, const Checkpoint *whole, int m, const char *given, Error *err) {
    *all = (Stages){.n = m, .stage = xcalloc(m, sizeof *all->stage)};
    for (int s = 0; s < m; s++) {
        Stage *stage = &all->stage[s];
        if (stage_part(&stage->part, &stage->first, whole, &(Net){.stage = s, .stages = m}, given,
                       err))
            return -1;
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
    for (int s = 0; s < all->n; s++)
        sim[s] = all->stage[s].device = sim_open(all->stage[s].plan, hardware);
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
    int started;
    first->listener = *listener;
    for (int s = 0; s < all->n; s++)
        all->stage[s].task = task;
    for (started = 1; started < all->n; started++) {
        Stage *stage = &all->stage[started];
        int why = pthread_create(&stage->thread, NULL, run_stage, stage);
        if (!why)
            continue;
        fail_to_start(err, why);
        first->device->net->fail(first->device->net, err);
        break;
    }
    run_stage(first);
    while (--started)
        pthread_join(all->stage[started].thread, NULL);
    *stats = first->stats;
    if (!first->err.text[0])
        return 0;
    *err = first->err;
    return -1;
}

void stages_close(Stages *all) {
    if (all->world)
        world_close(all->world);
    for (int s = 0; s < all->n; s++)
        plan_free(all->stage[s].plan);
    free(all->stage);
}
