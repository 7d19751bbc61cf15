/* test_pipeline.c: the network of a pipeline alone, over MPI between processes: mpirun starts this program as stages
 * (--stage WHAT), each of which does a part, a function of its Net that returns the number of things that were wrong. How
 * stages agree is also tried between the threads of this process. At the end flexgen itself runs under mpirun, and
 * a stage of it fails. What stages compute is test_stages.c's. */
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests.h"

#define COUNT(a) (int)(sizeof(a) / sizeof *(a))
enum { KIB = 1 << 10, MIB = 1 << 20, MAX_STAGES = 5, MAX_THREADS = MAX_STAGES * 2 * NKINDS_OF_MESSAGES };

typedef int StagePart(Net *net);

/* A thread that does something with a stage's Net: a part, or messages of a kind between this stage and another, one way.
 */
typedef struct {
    Net *net;
    StagePart *part;
    int peer;
    bool sends;
    NetKind kind;
    int wrong;
    pthread_t thread;
} Thread;

static void start_threads(Thread *t, int n, void *(*run)(void *)) {
    for (int i = 0; i < n; i++) CHECK(!pthread_create(&t[i].thread, NULL, run, &t[i]));
}

/* Returns what was wrong in them. */
static int end_threads(Thread *t, int n) {
    int wrong = 0;
    for (int i = 0; i < n; i++) {
        pthread_join(t[i].thread, NULL);
        wrong += t[i].wrong;
    }
    return wrong;
}

// ---- messages among all pairs, of all kinds, at once ---------------------------------------------------------------

enum { MESSAGES = 8, LARGEST = 40 * MIB }; /* from one stage to another, of a kind */

/* Both sides know what each message is. Most are small; some lie at the edges of the pieces that large ones cross in. */
static size_t message_size(uint64_t *state) {
    static const size_t edges[] = {0, 1, 4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 8 * MIB};
    double u = (test_random(state) + 1) / 2, v = (test_random(state) + 1) / 2;
    return u < 0.1 ? edges[(int)(v * COUNT(edges))] : (size_t)exp(v * log(256 * KIB));
}

static uint8_t *filled(size_t size, uint64_t x) {
    uint8_t *bytes = xcalloc(size, 1);
    for (size_t i = 0; i < size; i += 8) {
        x = (x + i) * 0x9E3779B97F4A7C15ull;
        memcpy(bytes + i, &x, size - i < 8 ? size - i : 8);
    }
    return bytes;
}

static void *stream_main(void *arg) {
    Thread *s = arg;
    Net *net = s->net;
    const int from = s->sends ? net->stage : s->peer, to = s->sends ? s->peer : net->stage;
    uint64_t state = 100 * from + 10 * to + s->kind;
    Error err;
    for (int i = 0; i < MESSAGES; i++) {
        size_t size = from == 0 && to == 1 && s->kind == NET_STATES && i == 1 ? LARGEST : message_size(&state);
        uint8_t *message = filled(size, state), *bytes = xcalloc(size, 1);
        if (s->sends) {
            s->wrong += (i % 3 ? net->send : net->post)(net, s->peer, s->kind, message, size, &err) != 0;
            memset(message, 0xff, size); /* from now on it may change */
        } else {
            s->wrong += net->receive(net, s->peer, s->kind, bytes, size, &err) || memcmp(bytes, message, size);
        }
        free(message), free(bytes);
    }
    return NULL;
}

static int messages(Net *net) {
    Thread stream[MAX_THREADS];
    int n = 0;
    for (int i = 0; i < net->stages * 2 * NKINDS_OF_MESSAGES; i++) {
        stream[n] =
            (Thread){.net = net, .peer = i / 2 / NKINDS_OF_MESSAGES, .sends = i % 2, .kind = i / 2 % NKINDS_OF_MESSAGES};
        n += stream[n].peer != net->stage;
    }
    start_threads(stream, n, stream_main);
    return end_threads(stream, n);
}

// ---- sharing and agreeing ------------------------------------------------------------------------------------------

static int agreement(Net *net) {
    enum { BYTES = 3 * MIB };
    uint8_t *want = filled(BYTES, 7), *bytes = xcalloc(BYTES, 1);
    int wrong = 0;
    Error err;
    if (!net->stage) memcpy(bytes, want, BYTES);
    wrong += stage_share(net, bytes, BYTES, &err) || memcmp(bytes, want, BYTES) != 0;
    wrong += stage_agree(net, 0, &err) != 0;
    for (int failing = 0; failing < net->stages; failing++) { /* it and the last one fail */
        char text[64];
        int status = net->stage == failing || net->stage == net->stages - 1 ? fail(&err, EXIT_USAGE, "disk full") : 0;
        snprintf(text, sizeof text, "stage %d: disk full", failing);
        wrong += stage_agree(net, status, &err) != -1 || err.code != EXIT_USAGE || strcmp(err.text, text);
    }
    wrong += stage_agree(net, 0, &err) != 0; /* it goes on */
    free(want), free(bytes);
    return wrong;
}

// ---- failing -------------------------------------------------------------------------------------------------------

/* A call that nothing but a failure ends. */
static void *wait_for_nothing(void *arg) {
    enum { BYTES = 40 * MIB };
    Thread *w = arg;
    void *bytes = xcalloc(BYTES, 1);
    Error err;
    if (w->sends)
        w->net->send(w->net, w->peer, w->kind, bytes, BYTES, &err);
    else
        w->net->receive(w->net, w->peer, w->kind, bytes, BYTES, &err);
    free(bytes);
    return NULL;
}

/* Stage 1 fails while messages to it are under way and the others wait for each other. */
static int failure(Net *net) {
    enum { BYTES = 10 * MIB };
    char *bytes = xcalloc(BYTES, 1);
    const int other = 2 - net->stage;
    Error err;
    if (net->stage == 1) {
        for (int i = 0; i < 3; i++) net->receive(net, 0, NET_TOKENS, bytes, BYTES, &err);
        fail(&err, EXIT_FAILED, "disk full");
        net->fail(net, &err);
    }
    Thread waiting[] = {{.net = net, .peer = other, .sends = true, .kind = NET_STATES},
                        {.net = net, .peer = other, .kind = NET_SETUP},
                        {.net = net, .peer = 1, .kind = NET_STATES}};
    start_threads(waiting, COUNT(waiting), wait_for_nothing);
    while (!net->stage) net->send(net, 1, NET_TOKENS, bytes, BYTES, &err);
    return end_threads(waiting, COUNT(waiting)) + 1;
}

/* Messages of another size than the receiver expects. Large ones cross in pieces of 4 MiB. */
static const struct {
    size_t sent, expected;
    const char *says;
} sizes[] = {
    {12, 16, "stage 1: stage 0 has sent a message of 12 bytes instead of 16"},
    {16, 12, "stage 1: stage 0 has sent a message of 16 bytes instead of 12"},
    {8 * MIB, 4 * MIB, "of 8388608 bytes or more instead of 4194304"},
    {5 * MIB, 9 * MIB, "a message of 5242880 bytes instead of 9437184"},
};

static int way; /* of the parts that have several */

static int other_size(Net *net) {
    const size_t sent = sizes[way].sent, expected = sizes[way].expected;
    char *bytes = xcalloc(sent + expected, 1);
    Error err;
    if (net->stage)
        net->receive(net, 0, NET_STATES, bytes, expected, &err);
    else
        net->send(net, 1, NET_STATES, bytes, sent, &err);
    return net->receive(net, !net->stage, NET_TOKENS, bytes, 1, &err) + 1;
}

/* Stage 1 is killed, or kills mpirun, while the others wait. */
static int is_killed(Net *net) {
    char bytes[64] = "";
    Error err;
    int wrong = stage_share(net, bytes, sizeof bytes, &err) + stage_agree(net, 0, &err);
    if (net->stage == 1) kill(way ? getppid() : getpid(), SIGKILL);
    return wrong + net->receive(net, (net->stage + 1) % net->stages, NET_STATES, bytes, sizeof bytes, &err) + 1;
}

// ---- the slowed wire -----------------------------------------------------------------------------------------------

static const double BYTES_S = 2e6, DELAY_S = 0.04;

/* Messages of 20 kB take 10 ms each on the wire and 40 more to arrive; all processes read the same clock. */
static int wire(Net *net) {
    enum { BYTES = 20000, N = 6 };
    char bytes[BYTES] = "";
    double begin = seconds_now();
    int wrong = 0;
    Error err;
    wrong += stage_share(net, &begin, sizeof begin, &err); /* not slowed */
    for (int i = 1; i <= N; i++) {
        NetKind kind = i % 2 ? NET_STATES : NET_TOKENS;
        if (net->stage == 0) wrong += (i % 3 ? net->send : net->post)(net, 1, kind, bytes, BYTES, &err) != 0;
        if (net->stage == 1) wrong += net->receive(net, 0, kind, bytes, BYTES, &err) != 0;
        const double took = seconds_now() - begin;
        wrong += net->stage == 1 && took < i * BYTES / BYTES_S + DELAY_S;
        wrong += net->stage == 0 && i % 3 && took < i * BYTES / BYTES_S;
    }
    return wrong;
}

// ---- between threads -----------------------------------------------------------------------------------------------

static void *local_main(void *arg) {
    Thread *s = arg;
    s->wrong = s->part(s->net);
    s->net->close(s->net);
    return NULL;
}

static int local(StagePart *part, int stages, bool rendezvous, int delay_us) {
    Thread stage[MAX_STAGES];
    Net *net[MAX_STAGES];
    local_net_open(net, stages, rendezvous, delay_us);
    for (int i = 0; i < stages; i++) stage[i] = (Thread){.net = net[i], .part = part};
    start_threads(stage, stages, local_main);
    return end_threads(stage, stages);
}

/* A prompt that an earlier run has begun: the last three of its tokens are what it had generated. */
static int begun(Net *net) {
    int32_t ids[] = {2, 11, 12, 13, 14};
    Request request = {.known = 3};
    Prompt prompt = {.ids = ids, .s = 5, .n = 4};
    Job job = {.request = &request, .count = 1};
    Task task = {.prompts = &prompt, .count = 1};
    Error err;
    if (net->stage) job = (Job){0}, task = (Task){0};
    int wrong = stage_share_task(net, &task, &job, &err);
    if (wrong || !net->stage) return wrong;
    const Request *r = job.request;
    wrong += task.count != 1 || memcmp(task.prompts->ids, ids, sizeof ids) != 0;
    wrong += r->n != 7 || r->known != 3 || memcmp(r->tokens, ids + 2, 3 * sizeof *ids) != 0;
    prompts_free(&task);
    free(r->tokens), free(job.request);
    return wrong;
}

/* Messages copied and not, at once and later. */
TEST(between_threads_stages_share_and_agree) {
    for (int stages = 2; stages <= MAX_STAGES; stages++)
        for (int w = 0; w < 4; w++) {
            CU_ASSERT_EQUAL(local(agreement, stages, w / 2, w % 2 * 1000), 0);
            CU_ASSERT_EQUAL(local(begun, stages, w / 2, w % 2 * 1000), 0);
        }
}

static int left_over(Net *net) {
    Error err;
    return net->stage == 0 && net->post(net, 1, NET_TOKENS, "x", 1, &err);
}

static int nothing_left(Net *net) { return !net; }

static void leave_nothing(void) {
    host_set_threads(1);
    local(nothing_left, 2, false, 0);
}

static void leave_over(void) {
    host_set_threads(1); /* ThreadSanitizer lets a child start threads only if its parent had none */
    local(left_over, 2, false, 0);
}

/* It is a bug of whoever uses the network. */
TEST(between_threads_a_message_too_many_is_found) { CU_ASSERT(aborts(leave_over) && !aborts(leave_nothing)); }

// ---- over MPI ------------------------------------------------------------------------------------------------------

static const struct {
    const char *name;
    StagePart *part;
} parts[] = {{"messages", messages}, {"agreement", agreement}, {"failure", failure},
             {"size", other_size},   {"killed", is_killed},    {"wire", wire}};

/* This process is one stage of several, which does a part in one of its ways: "size2" in way 2. It leaves a file with its
 * number, so that the test can look whether it is gone. */
int test_stage(const char *what) {
    const bool slowed = !strncmp(what, "wire", 4);
    char pid[16];
    Error err;
    snprintf(pid, sizeof pid, "%d", (int)getpid());
    if (getenv("PIDS")) write_file(getenv("PIDS"), pid, "", 0);
    Net *net = net_open(slowed ? BYTES_S : 0, slowed ? DELAY_S : 0, &err);
    if (!net) return printf("no network: %s\n", err.text), EXIT_FAILED;
    int stage = net->stage, wrong = 1;
    for (int i = 0; i < COUNT(parts); i++)
        if (!strncmp(parts[i].name, what, strlen(parts[i].name))) {
            way = atoi(what + strlen(parts[i].name));
            wrong = parts[i].part(net);
        }
    net->close(net);
    printf("stage %d: %d wrong\n", stage, wrong);
    return wrong ? EXIT_FAILED : 0;
}

/* For ThreadSanitizer: the order of Open MPI's own locks is not meant. */
const char *__tsan_default_suppressions(void) { return "deadlock:openmpi\n"; }

const char *test_missing(const char *name) {
    char path[MAX_PATH];
    program_file(path, "_mpi.so");
    if (strncmp(name, "over mpi", strlen("over mpi")) != 0) return NULL;
    if (access(path, F_OK)) return "the network over MPI, since there was no mpicc";
    return system("command -v mpirun >/dev/null") ? "the network over MPI, since there is no mpirun" : NULL;
}

/* Containers, root and fewer processors than stages are no hindrance; memory is shared without rights to other processes'.
 */
static const char MPIRUN[] =
    "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 "
    "OMPI_MCA_hwloc_base_binding_policy=none OMPI_MCA_btl_vader_single_copy_mechanism=none ASAN_OPTIONS=detect_leaks=0";

/* Where the processes of the newest mpirun leave their numbers, and whatever else. */
static const char *pids, *left_behind;

/* Starts mpirun with settings of MPI's. */
static FILE *start(const char *settings, const char *arguments) {
    char command[2 * MAX_PATH + 2000];
    pids = temp_dir(), left_behind = temp_dir();
    snprintf(
        command, sizeof command,
        "exec env %s %s PIDS='%s' TMPDIR='%s' OMPI_MCA_btl_vader_backing_directory='%s' timeout -k 5 200 mpirun %s 2>&1",
        MPIRUN, settings, pids, left_behind, left_behind, arguments);
    FILE *f = popen(command, "r");
    CHECK(f);
    return f;
}

/* True if all processes whose numbers are in pids have ended, 20 seconds later at the latest. The command line of one that
 * has ended and is not yet waited for is empty. */
static bool have_ended(void) {
    char command[600];
    snprintf(command, sizeof command,
             "cd '%s' && for i in $(seq 200); do cat $(ls | sed 's|.*|/proc/&/cmdline|') </dev/null 2>/dev/null | "
             "grep -q . || exit 0; sleep .1; done; exit 1",
             pids);
    return !system(command);
}

static char said[8192]; /* by the newest mpirun */

/* Waits for its end. */
static int hear(FILE *f, int stages) {
    said[fread(said, 1, sizeof said - 1, f)] = 0;
    while (fgetc(f) != EOF) continue;
    int status = pclose(f);
    CU_ASSERT_EQUAL(count_files(pids), stages);
    CU_ASSERT(have_ended());
    return status;
}

/* Runs a part as so many processes. */
static int mpi_says(const char *part, int in_way, int stages, const char *settings) {
    char program[MAX_PATH], arguments[MAX_PATH + 100];
    program_file(program, "");
    snprintf(arguments, sizeof arguments, "-n %d '%s' --stage %s%d", stages, program, part, in_way);
    return hear(start(settings, arguments), stages);
}

static void mpi(const char *part, int stages, const char *settings) {
    int status = mpi_says(part, 0, stages, settings), well = 0;
    for (const char *s = said; (s = strstr(s, ": 0 wrong")); s++) well++;
    CU_ASSERT_EQUAL(status, 0);
    CU_ASSERT_EQUAL(well, stages);
    if (status || well != stages) fprintf(stderr, "\n    %s %s\n%s\n", settings, part, said);
}

/* Through memory and through sockets; copied as far as MPI copies (32 KiB, more than most messages), and nothing copied. */
TEST(over_mpi_messages_arrive_as_they_were_sent) {
    mpi("messages", 2, "OMPI_MCA_btl_vader_eager_limit=32768 OMPI_MCA_btl=vader,self");
    mpi("messages", 3, "OMPI_MCA_btl_tcp_eager_limit=128 OMPI_MCA_btl=tcp,self OMPI_MCA_btl_tcp_if_include=lo");
    mpi("messages", 5, "OMPI_MCA_btl_vader_eager_limit=128 OMPI_MCA_btl=vader,self");
}

TEST(over_mpi_stages_share_and_agree) {
    mpi("agreement", 2, "");
    mpi("agreement", 5, "");
}

/* The job ends with this status and text, whatever the others wait for. */
static void expect_aborted(const char *part, int in_way, int stages, const char *text) {
    const int status = mpi_says(part, in_way, stages, "");
    CU_ASSERT(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_FAILED);
    CU_ASSERT_PTR_NOT_NULL(strstr(said, text));
    CU_ASSERT_PTR_NULL(strstr(said, " wrong")); /* nobody has gone on */
}

TEST(over_mpi_a_stage_that_fails_ends_all) { expect_aborted("failure", 0, 3, ""); }

TEST(over_mpi_a_message_of_another_size_ends_all) {
    for (int i = 0; i < COUNT(sizes); i++) expect_aborted("size", i, 2, sizes[i].says);
}

TEST(over_mpi_a_killed_stage_ends_all) {
    CU_ASSERT_NOT_EQUAL(mpi_says("killed", 0, 3, ""), 0);
    CU_ASSERT_PTR_NOT_NULL(strstr(said, "rank 1"));
    CU_ASSERT_NOT_EQUAL(mpi_says("killed", 1, 3, ""), 0);
}

TEST(over_mpi_nothing_arrives_before_the_slowed_wire_allows_it) { mpi("wire", 2, ""); }

// ---- the program ---------------------------------------------------------------------------------------------------

/* Starts the program as two stages, each with its model; the second begins with a command of the shell. A file of each
 * stage's name has the number of its process. */
static FILE *start_program(const char *flags, const char *model, const char *second, const char *begins) {
    static const char stage[] =
        "-n 1 sh -c ': >\"$PIDS/$$\"; echo $$ >\"$TMPDIR/$OMPI_COMM_WORLD_RANK\"; %s; exec \"$0\" \"$@\"' %s %s --model "
        "'%s'";
    char one[700], two[700], arguments[sizeof one + sizeof two + 3];
    const char *bin = getenv("FLEXGEN_BIN");
    if (!bin) bin = "./flexgen";
    snprintf(one, sizeof one, stage, ":", bin, flags, model);
    snprintf(two, sizeof two, stage, begins, bin, flags, second);
    snprintf(arguments, sizeof arguments, "%s : %s", one, two);
    return start("TSAN_OPTIONS=halt_on_error=1:detect_deadlocks=0", arguments); /* Open MPI's own are not meant */
}

/* Starts a job in dir, whose first stage stores so many bytes/s of new k and v. */
static FILE *start_job(const char *dir, const char *second, int tokens, const char *rate) {
    char flags[600];
    snprintf(flags, sizeof flags,
             "generate --prompt Once --max-tokens %d --output %s/output --link gtoc=%s --threads 1 "
             "--percent 100 0 0 100 100 0 --gpu-batch-size 1 --num-gpu-batches 1",
             tokens, dir, rate);
    return start_program(flags, "models/opt-tiny", second, ":");
}

/* How long a file has become that may not be there yet: longer than so much, 100 seconds later at the latest. */
static off_t grown(const char *path, off_t than) {
    struct stat st = {.st_size = 0};
    for (int i = 0; i < 100000 && (stat(path, &st) || st.st_size <= than); i++) usleep(1000);
    return st.st_size;
}

/* The second stage reads a copy of the model, which changes when the job has begun: then its part is worth nothing. It
 * finds that when it has stored its new k and v, 50 ms a layer, while the first has all tokens; but that one keeps the
 * journal. */
TEST(over_mpi_a_job_has_ended_when_all_stages_have) {
    char copy[400];
    const char *dir = temp_dir(), *journal = in_dir(dir, "output.journal");
    snprintf(copy, sizeof copy, "cp models/opt-tiny/* '%s'", dir);
    CHECK(!system(copy));
    FILE *f = start_job(dir, dir, 4, "20K");
    CU_ASSERT(grown(journal, 0) > 0);
    write_file(dir, "model.safetensors", "", 0);
    CU_ASSERT_NOT_EQUAL(hear(f, 2), 0);
    CU_ASSERT_PTR_NOT_NULL(strstr(said, "flexgen: stage 1: "));
    CU_ASSERT_PTR_NOT_NULL(strstr(said, "was changed while it was in use"));
    CU_ASSERT(!access(journal, F_OK));
}

/* A signal to the first stage alone: its lanes stop while it waits for tokens, which nobody can make any more. */
TEST(over_mpi_a_stopped_stage_ends_all) {
    const char *dir = temp_dir(), *journal = in_dir(dir, "output.journal");
    FILE *f = start_job(dir, "models/opt-tiny", 500, "200K");
    const off_t begun = grown(journal, 0);
    CU_ASSERT(grown(journal, begun) > begun); /* it sweeps */
    char *first = contents(in_dir(left_behind, "0"), NULL);
    CU_ASSERT_EQUAL(kill(atoi(first), SIGTERM), 0);
    free(first);
    CU_ASSERT_NOT_EQUAL(hear(f, 2), 0);
    CU_ASSERT_PTR_NOT_NULL(strstr(said, "flexgen: stage 0: stopped by SIGTERM; go on with --resume"));
    CU_ASSERT(!access(journal, F_OK));
}

/* One line says which stage is short of something, and everything ends; no file of it is left. The model is of some size,
 * so that the first stage is slow to end. */
TEST(over_mpi_a_stage_without_room_names_itself) {
    static const struct {
        const char *begins, *percent, *says;
    } cases[] = {{"ulimit -f 50000", "0 0 0 0 0 0", "flexgen: stage 1: cannot reserve"},
                 {"ulimit -v 150000", "100 0 100 0 100 0", "; this process may have tiers of "},
                 {"ulimit -v 60000", "100 0 100 0 100 0", "flexgen: stage 1: too little address space"}};
#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__ /* they take terabytes of it */
    enum { CASES = 1 };
#else
    enum { CASES = COUNT(cases) };
#endif
    for (int i = 0; i < CASES; i++) {
        char flags[600];
        const char *dir = temp_dir();
        snprintf(flags, sizeof flags,
                 "bench --threads 1 --prompt-len 8 --gen-len 2 --gpu-batch-size 1 --num-gpu-batches 1 --percent %s "
                 "--gpu-mem 1G --cpu-mem 1G --disk-mem 1G --offload-dir %s",
                 cases[i].percent, dir);
        CU_ASSERT_NOT_EQUAL(hear(start_program(flags, "opt-125m", "opt-125m", cases[i].begins), 2), 0);
        CU_ASSERT_PTR_NOT_NULL(strstr(said, cases[i].says));
        CU_ASSERT_EQUAL(count_files(dir), 0);
    }
}

/* Without mpirun, or alone under it, there is no network; and no MPI was loaded. */
TEST(a_process_that_mpirun_has_not_started_has_no_network) {
    Error err;
    for (int alone = 0; alone < 2; alone++) {
        if (alone) setenv("OMPI_COMM_WORLD_SIZE", "1", 1);
        strcpy(err.text, "?");
        CU_ASSERT_PTR_NULL(net_open(0, 0, &err));
        CU_ASSERT_EQUAL(err.text[0], 0);
    }
    unsetenv("OMPI_COMM_WORLD_SIZE");
    char *maps = contents("/proc/self/maps", NULL);
    CU_ASSERT_PTR_NULL(strstr(maps, "mpi.so"));
    free(maps);
}
