/* test_pipeline.c: the network of a pipeline alone, over MPI between processes. A test "over mpi ..." starts this program
 * under mpirun as so many stages, which run the same test: in them stage_net gives their Net. How stages agree is also
 * tried between the threads of this process. At the end flexgen itself runs under mpirun: with the flags that decide what
 * stages wait for, and so that a stage of it fails. What stages compute is test_stages.c's. */
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests.h"

#define COUNT(a) (int)(sizeof(a) / sizeof *(a))
enum { KIB = 1 << 10, MIB = 1 << 20, MAX_STAGES = 5, MAX_THREADS = MAX_STAGES * 2 * NKINDS_OF_MESSAGES };

/* A thread that does something with a stage's Net: messages of a kind between this stage and another, one way, or all that
 * the stage does. */
typedef struct {
    Net *net;
    int peer;
    bool sends;
    NetKind kind;
    int wrong;
    pthread_t thread;
} Thread;

/* Runs them side by side, and returns what was wrong in them. */
static int run_threads(Thread *t, int n, void *(*run)(void *)) {
    int wrong = 0;
    for (int i = 0; i < n; i++) CHECK(!pthread_create(&t[i].thread, NULL, run, &t[i]));
    for (int i = 0; i < n; i++) {
        pthread_join(t[i].thread, NULL);
        wrong += t[i].wrong;
    }
    return wrong;
}

static uint8_t *filled(size_t size, uint64_t x) {
    uint8_t *bytes = xcalloc(size, 1);
    x *= 0xD1342543DE82EF95ull; /* Otherwise the bytes of x + 1 would be those of x, moved by one. */
    for (size_t i = 0; i < size; i++) bytes[i] = (uint8_t)((x + i) * 0x9E3779B97F4A7C15ull >> 56);
    return bytes;
}

// ---- mpirun ---------------------------------------------------------------------------------------------------------

/* For ThreadSanitizer: the order of Open MPI's own locks is not meant. */
const char *__tsan_default_suppressions(void) { return "deadlock:openmpi\n"; }

const char *test_missing(const char *name) {
    char path[MAX_PATH];
    program_file(path, "_mpi.so");
    if (strncmp(name, "over mpi", strlen("over mpi")) != 0) return NULL;
    if (access(path, F_OK)) return "the network over MPI, since there was no mpicc";
    return system("command -v mpirun >/dev/null") ? "the network over MPI, since there is no mpirun" : NULL;
}

/* Containers, root and fewer processors than stages are no hindrance; memory is shared without rights to other processes';
 * and no process looks for the devices of the PCI bus, which takes longer than all else at its start. */
static const char MPIRUN[] =
    "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 "
    "OMPI_MCA_hwloc_base_binding_policy=none OMPI_MCA_btl_vader_single_copy_mechanism=none HWLOC_COMPONENTS=-pci,-linuxio "
    "ASAN_OPTIONS=detect_leaks=0";

/* Where the processes of the newest mpirun leave their numbers, and whatever else. */
static const char *pids, *left_behind;

/* Starts mpirun with settings of MPI's. */
static FILE *start(const char *settings, const char *arguments) {
    char command[2 * MAX_PATH + 2000];
    pids = temp_dir(), left_behind = temp_dir();
    snprintf(command, sizeof command,
             "exec env %s %s FLEXGEN_TEST_PIDS='%s' TMPDIR='%s' OMPI_MCA_btl_vader_backing_directory='%s' timeout -k 5 200 "
             "mpirun %s 2>&1",
             MPIRUN, settings, pids, left_behind, left_behind, arguments);
    FILE *f = popen(command, "r");
    CHECK(f);
    return f;
}

static char said[8192]; /* by the newest mpirun */

/* Waits for its end. All processes whose numbers are in pids must have ended 20 seconds later at the latest; the command
 * line of one that has ended and is not yet waited for is empty. */
static int hear(FILE *f, int stages) {
    char command[600];
    said[fread(said, 1, sizeof said - 1, f)] = 0;
    while (fgetc(f) != EOF) continue;
    const int status = pclose(f);
    CU_ASSERT_EQUAL(count_files(pids), stages);
    snprintf(command, sizeof command,
             "cd '%s' && for i in $(seq 200); do cat $(ls | sed 's|.*|/proc/&/cmdline|') </dev/null 2>/dev/null | "
             "grep -q . || exit 0; sleep .1; done; exit 1",
             pids);
    CU_ASSERT_EQUAL(system(command), 0);
    return status;
}

enum { NOT_0 = -1, MOST_RUNS = 4 };

/* One value stands for a run of a test as so many stages: mpirun must end with this status and print this text. With status
 * 0 the test passes in all stages; otherwise nobody gets to its end. */
typedef struct {
    int stages;
    const char *settings;
    int status;
    const char *says;
} Run;

/* Makes all of these runs of the current test, asserts that they end so, and returns NULL. In a process that is one of
 * their stages it returns the network, with a wire as slow as is said. A stage leaves a file with the number of its
 * process, so that the test can look whether it is gone. */
static Net *stage_net(double bytes_s, double delay_s, const Run runs[MOST_RUNS]) {
    char program[MAX_PATH], arguments[MAX_PATH + 200], pid[16];
    const char *dir = getenv("FLEXGEN_TEST_PIDS"); /* NULL: this process is no stage */
    Error err;
    program_file(program, "");
    for (const Run *r = runs; !dir && r < runs + MOST_RUNS && r->stages; r++) {
        snprintf(arguments, sizeof arguments, "-n %d '%s' --only '%s'", r->stages, program, CU_get_current_test()->pName);
        const int ended = hear(start(r->settings, arguments), r->stages);
        int passed = 0;
        for (const char *s = said; (s = strstr(s, "passed")); s++) passed++;
        const bool right = (r->status == NOT_0 ? ended != 0 : WIFEXITED(ended) && WEXITSTATUS(ended) == r->status) &&
                           passed == (r->status ? 0 : r->stages) && strstr(said, r->says) && !strstr(said, "FAILED") &&
                           strlen(said) < sizeof said - 1; /* nothing was left out */
        if (!right) fprintf(stderr, "\n    %d stages, %s: status %d\n%s\n", r->stages, r->settings, ended, said);
        CU_ASSERT(right);
    }
    if (!dir) return NULL;
    snprintf(pid, sizeof pid, "%d", (int)getpid());
    write_file(dir, pid, "", 0);
    Net *net = net_open(bytes_s, delay_s, &err);
    if (!net) fprintf(stderr, "no network: %s\n", err.text);
    CU_ASSERT_PTR_NOT_NULL_FATAL(net);
    return net;
}

/* Ends a stage that should have been ended before it came here, with a status and a text that nothing else gives. */
static void goes_on(void) {
    fprintf(stderr, "FAILED: it goes on\n");
    _exit(99);
}

// ---- messages among all pairs, of all kinds, at once ----------------------------------------------------------------

/* Both sides know what each message is. Most are small; some lie at the edges of the pieces that large ones cross in. */
static void *stream_main(void *arg) {
    static const size_t edges[] = {0, 1, 4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 8 * MIB};
    Thread *s = arg;
    Net *net = s->net;
    const int from = s->sends ? net->stage : s->peer, to = s->sends ? s->peer : net->stage;
    uint64_t state = 100 * from + 10 * to + s->kind;
    Error err;
    for (int i = 0; i < 8; i++) {
        const double u = (test_random(&state) + 1) / 2, v = (test_random(&state) + 1) / 2;
        size_t size = u < 0.1 ? edges[(int)(v * COUNT(edges))] : (size_t)exp(v * log(256 * KIB));
        if (from == 0 && to == 1 && s->kind == NET_STATES && i == 1) size = 40 * MIB;
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

/* Messages go through memory and through sockets; they are copied as far as MPI copies (32 KiB, more than most), or not at
 * all. */
TEST(over_mpi_messages_arrive_as_they_were_sent) {
    static const Run runs[MOST_RUNS] = {
        {2, "OMPI_MCA_btl_vader_eager_limit=32768 OMPI_MCA_btl=vader,self", 0, ""},
        {3, "OMPI_MCA_btl_tcp_eager_limit=128 OMPI_MCA_btl=tcp,self OMPI_MCA_btl_tcp_if_include=lo", 0, ""},
        {5, "OMPI_MCA_btl_vader_eager_limit=128 OMPI_MCA_btl=vader,self", 0, ""}};
    Net *net = stage_net(0, 0, runs);
    if (!net) return;
    Thread stream[MAX_THREADS];
    int n = 0;
    for (int i = 0; i < net->stages * 2 * NKINDS_OF_MESSAGES; i++) {
        const int peer = i / 2 / NKINDS_OF_MESSAGES;
        if (peer != net->stage)
            stream[n++] = (Thread){.net = net, .peer = peer, .sends = i % 2, .kind = i / 2 % NKINDS_OF_MESSAGES};
    }
    CU_ASSERT_EQUAL(run_threads(stream, n, stream_main), 0);
    net->close(net);
}

// ---- sharing and agreeing -------------------------------------------------------------------------------------------

/* What a stage does. The task has a prompt that an earlier run has begun: the last three of its tokens are what it had
 * generated. */
static void *agree(void *arg) {
    enum { BYTES = 3 * MIB };
    Thread *s = arg;
    Net *net = s->net;
    uint8_t *want = filled(BYTES, 7), *bytes = xcalloc(BYTES, 1);
    Error err;
    if (!net->stage) memcpy(bytes, want, BYTES);
    int wrong = stage_share(net, bytes, BYTES, &err) || memcmp(bytes, want, BYTES) != 0;
    wrong += stage_agree(net, 0, &err) != 0;
    for (int failing = 0; failing < net->stages; failing++) { /* it and the last one fail */
        char text[64];
        int status = net->stage == failing || net->stage == net->stages - 1 ? fail(&err, EXIT_USAGE, "disk full") : 0;
        snprintf(text, sizeof text, "stage %d: disk full", failing);
        wrong += stage_agree(net, status, &err) != -1 || err.code != EXIT_USAGE || strcmp(err.text, text);
    }
    int32_t ids[] = {2, 11, 12, 13, 14};
    Request request = {.known = 3};
    Prompt prompt = {.ids = ids, .s = 5, .n = 4};
    Job job = {.request = &request, .count = 1};
    Task task = {.prompts = &prompt, .count = 1};
    if (net->stage) job = (Job){0}, task = (Task){0};
    const int failed = stage_share_task(net, &task, &job, &err);
    if (net->stage && !failed) {
        const Request *r = job.request;
        wrong += task.count != 1 || memcmp(task.prompts->ids, ids, sizeof ids) != 0;
        wrong += r->n != 7 || r->known != 3 || memcmp(r->tokens, ids + 2, 3 * sizeof *ids) != 0;
        prompts_free(&task);
        free(r->tokens), free(r->stop.text), free(job.request);
    }
    s->wrong = wrong + (failed != 0) + (stage_agree(net, 0, &err) != 0); /* it goes on */
    net->close(net);
    free(want), free(bytes);
    return NULL;
}

/* Messages copied and not, at once and later. */
TEST(between_threads_stages_share_and_agree) {
    for (int stages = 2; stages <= MAX_STAGES; stages++)
        for (int way = 0; way < 4; way++) {
            Thread stage[MAX_STAGES];
            Net *net[MAX_STAGES];
            local_net_open(net, stages, way / 2, way % 2 * 1000);
            for (int i = 0; i < stages; i++) stage[i] = (Thread){.net = net[i]};
            CU_ASSERT_EQUAL(run_threads(stage, stages, agree), 0);
        }
}

TEST(over_mpi_stages_share_and_agree) {
    Thread self = {.net = stage_net(0, 0, (Run[MOST_RUNS]){{2, "", 0, ""}, {5, "", 0, ""}})};
    if (!self.net) return;
    agree(&self);
    CU_ASSERT_EQUAL(self.wrong, 0);
}

static int left_over; /* messages that nobody receives */

static void leave_over(void) {
    Net *net[2];
    Error err;
    local_net_open(net, 2, false, 0);
    for (int i = 0; i < left_over; i++) net[0]->post(net[0], 1, NET_TOKENS, "x", 1, &err);
    for (int i = 0; i < 2; i++) net[i]->close(net[i]);
}

/* It is a bug of whoever uses the network. */
TEST(between_threads_a_message_too_many_is_found) {
    for (left_over = 0; left_over < 2; left_over++) CU_ASSERT_EQUAL(aborts(leave_over), left_over);
}

// ---- the slowed wire ------------------------------------------------------------------------------------------------

/* Messages of 20 kB take 10 ms each on the wire and 40 more to arrive; all processes read the same clock. */
TEST(over_mpi_nothing_arrives_before_the_slowed_wire_allows_it) {
    enum { BYTES = 20000, N = 6 };
    const double bytes_s = 2e6, delay_s = .04;
    char bytes[BYTES] = "";
    Error err;
    Net *net = stage_net(bytes_s, delay_s, (Run[MOST_RUNS]){{2, "", 0, ""}});
    if (!net) return;
    double begin = seconds_now();
    CU_ASSERT_EQUAL(stage_share(net, &begin, sizeof begin, &err), 0); /* not slowed */
    for (int i = 1; i <= N; i++) {
        const NetKind kind = i % 2 ? NET_STATES : NET_TOKENS;
        const int status = net->stage ? net->receive(net, 0, kind, bytes, BYTES, &err)
                                      : (i % 3 ? net->send : net->post)(net, 1, kind, bytes, BYTES, &err);
        const double took = seconds_now() - begin, least = i * BYTES / bytes_s;
        CU_ASSERT_EQUAL(status, 0);
        CU_ASSERT(net->stage ? took >= least + delay_s : i % 3 == 0 || took >= least);
    }
    net->close(net);
}

// ---- failing --------------------------------------------------------------------------------------------------------

enum { UNHEARD = 40 * MIB }; /* bytes of a message that is never received */

/* Calls that nothing but a failure ends; tokens are sent again and again. */
static void *wait_for_nothing(void *arg) {
    Thread *w = arg;
    void *bytes = xcalloc(UNHEARD, 1);
    Error err;
    do {
        if (w->sends)
            w->net->send(w->net, w->peer, w->kind, bytes, UNHEARD, &err);
        else
            w->net->receive(w->net, w->peer, w->kind, bytes, UNHEARD, &err);
    } while (w->kind == NET_TOKENS);
    free(bytes);
    return NULL;
}

/* Stage 1 fails while messages to it are under way and the others wait for each other. */
TEST(over_mpi_a_stage_that_fails_ends_all) {
    Error err;
    Net *net = stage_net(0, 0, (Run[MOST_RUNS]){{3, "", EXIT_FAILED, ""}});
    if (!net) return;
    if (net->stage == 1) {
        char *bytes = xcalloc(UNHEARD, 1);
        for (int i = 0; i < 3; i++) net->receive(net, 0, NET_TOKENS, bytes, UNHEARD, &err);
        fail(&err, EXIT_FAILED, "disk full");
        net->fail(net, &err);
    }
    const int other = 2 - net->stage;
    Thread waiting[] = {{.net = net, .peer = other, .sends = true, .kind = NET_STATES},
                        {.net = net, .peer = other, .kind = NET_SETUP},
                        {.net = net, .peer = 1, .kind = NET_STATES},
                        {.net = net, .peer = 1, .sends = true, .kind = NET_TOKENS}};
    const int n = net->stage ? COUNT(waiting) - 1 : COUNT(waiting); /* stage 0 alone sends tokens */
    run_threads(waiting, n, wait_for_nothing);
    goes_on();
}

/* Large messages cross in pieces of 4 MiB. */
TEST(over_mpi_a_message_of_another_size_ends_all) {
    static const Run runs[MOST_RUNS] = {
        {2, "CASE=0", EXIT_FAILED, "stage 1: stage 0 has sent a message of 12 bytes instead of 16"},
        {2, "CASE=1", EXIT_FAILED, "stage 1: stage 0 has sent a message of 16 bytes instead of 12"},
        {2, "CASE=2", EXIT_FAILED, "of 8388608 bytes or more instead of 4194304"},
        {2, "CASE=3", EXIT_FAILED, "a message of 5242880 bytes instead of 9437184"}};
    static const size_t cases[MOST_RUNS][2] = {{12, 16}, {16, 12}, {8 * MIB, 4 * MIB}, {5 * MIB, 9 * MIB}};
    Error err;
    Net *net = stage_net(0, 0, runs);
    if (!net) return;
    const size_t *size = cases[atoi(getenv("CASE"))]; /* sent, expected */
    char *bytes = xcalloc(size[0] + size[1], 1);
    if (net->stage)
        net->receive(net, 0, NET_STATES, bytes, size[1], &err);
    else
        net->send(net, 1, NET_STATES, bytes, size[0], &err);
    net->receive(net, !net->stage, NET_TOKENS, bytes, 1, &err);
    goes_on();
}

/* Stage 1 is killed, or kills mpirun, while the others wait. */
TEST(over_mpi_a_stage_or_an_mpirun_that_is_killed_ends_all) {
    char bytes[64] = "";
    Error err;
    Net *net = stage_net(0, 0, (Run[MOST_RUNS]){{3, "KILLED=stage", NOT_0, "rank 1"}, {3, "KILLED=mpirun", NOT_0, ""}});
    if (!net) return;
    CU_ASSERT_EQUAL(stage_share(net, bytes, sizeof bytes, &err), 0);
    CU_ASSERT_EQUAL(stage_agree(net, 0, &err), 0);
    if (net->stage == 1) kill(strcmp(getenv("KILLED"), "stage") ? getppid() : getpid(), SIGKILL);
    net->receive(net, (net->stage + 1) % net->stages, NET_STATES, bytes, sizeof bytes, &err);
    goes_on();
}

// ---- the program ----------------------------------------------------------------------------------------------------

/* Starts the program as two stages, each with its model; the second begins with a command of the shell. A file of each
 * stage's name has the number of its process. */
static FILE *start_program(const char *flags, const char *model, const char *second, const char *begins) {
    static const char stage[] =
        "-n 1 sh -c ': >\"$FLEXGEN_TEST_PIDS/$$\"; echo $$ >\"$TMPDIR/$OMPI_COMM_WORLD_RANK\"; %s; exec \"$0\" \"$@\"' "
        "%s %s --model '%s'";
    char one[700], two[700], arguments[sizeof one + sizeof two + 3];
    const char *bin = getenv("FLEXGEN_BIN");
    if (!bin) bin = "./flexgen";
    snprintf(one, sizeof one, stage, ":", bin, flags, model);
    snprintf(two, sizeof two, stage, begins, bin, flags, second);
    snprintf(arguments, sizeof arguments, "%s : %s", one, two);
    return start("TSAN_OPTIONS=halt_on_error=1:detect_deadlocks=0", arguments); /* Open MPI's own are not meant */
}

/* How long a file has become that may not be there yet: longer than so much, 100 seconds later at the latest. */
static off_t grown(const char *path, off_t than) {
    struct stat st = {.st_size = 0};
    for (int i = 0; i < 100000 && (stat(path, &st) || st.st_size <= than); i++) usleep(1000);
    return st.st_size;
}

/* What stages wait for depends on the flags, and each combination may have a circle of its own: then mpirun is ended when
 * its time is over. There are more prompts than seats, and their numbers of tokens differ, so that on the diagonal seats
 * refill.
 */
static const char *const policies[] = {
    "--schedule row --flights 1 --synchronize --compress-weight --compress-cache",
    "--schedule zigzag --flights 2 --synchronize --cpu-cache-compute",
    "--schedule diagonal --flights 1 --synchronize",
    "--schedule diagonal --flights 3 --no-overlap --attn-sparsity 0.3 --cpu-cache-compute",
};

TEST(over_mpi_every_policy_gives_the_text_of_one_machine) {
    const char *bin = getenv("FLEXGEN_BIN");
    char dir[200], prompts[2000] = "", flags[1000], arguments[1400];
    snprintf(dir, sizeof dir, "%s", temp_dir());
    if (!bin) bin = "./flexgen";
    for (int i = 0; i < 14; i++)
        sprintf(prompts + strlen(prompts), "{\"prompt\": \"Tom has %d\", \"max_tokens\": %d%s}\n", i, 1 + i * 5 % 7,
                i % 3   ? ""
                : i % 2 ? ", \"stop\": [\"t\", \"a\"]"
                        : ", \"temperature\": 1, \"seed\": 3");
    write_file(dir, "prompts", prompts, strlen(prompts));
    for (int i = 0; i < COUNT(policies); i++)
        for (int stages = 1; stages <= MAX_STAGES && test_takes(i); stages++) {
            snprintf(flags, sizeof flags,
                     "generate --model models/opt-tiny --prompts %s/prompts --output %s/%s --overwrite --threads 1 "
                     "--gpu-mem 256M --cpu-mem 256M --disk-mem 512M --percent 50 30 40 30 40 30 "
                     "--gpu-batch-size 2 --num-gpu-batches 2 %s",
                     dir, dir, stages == 1 ? "alone" : "shared", policies[i]);
            if (stages == 1) { /* without mpirun */
                snprintf(arguments, sizeof arguments, "%s %s 2>/dev/null", bin, flags);
                CU_ASSERT_EQUAL_FATAL(system(arguments), 0);
                continue;
            }
            snprintf(arguments, sizeof arguments, "-n %d sh -c ': >\"$FLEXGEN_TEST_PIDS/$$\"; exec \"$0\" \"$@\"' %s %s",
                     stages, bin, flags);
            const int status = hear(start("", arguments), stages);
            if (status) fprintf(stderr, "\n    %d stages, %s:\n%s\n", stages, policies[i], said);
            CU_ASSERT_EQUAL_FATAL(status, 0);
            char *alone = contents(in_dir(dir, "alone"), NULL), *shared = contents(in_dir(dir, "shared"), NULL);
            CU_ASSERT_STRING_EQUAL(shared, alone);
            free(alone), free(shared);
        }
}

/* The first stage stores its new k and v slowly. Either it alone gets a signal, and its lanes stop while it waits for
 * tokens that nobody can make any more; or the second stage's copy of the model changes when the job has begun, so that its
 * part is worth nothing. That one finds it when it has stored its k and v, 50 ms a layer, while the first has all tokens.
 */
TEST(over_mpi_a_job_ends_when_one_stage_must_and_keeps_its_journal) {
    for (int stopped = 0; stopped < 2; stopped++) {
        const char *dir = temp_dir(), *journal = in_dir(dir, "output.journal");
        char flags[600];
        snprintf(flags, sizeof flags, "cp models/opt-tiny/* '%s'", dir);
        CHECK(!system(flags));
        snprintf(flags, sizeof flags,
                 "generate --prompt Once --max-tokens %d --output %s/output --link gtoc=%s --threads 1 "
                 "--percent 100 0 0 100 100 0 --gpu-batch-size 1 --num-gpu-batches 1",
                 stopped ? 500 : 4, dir, stopped ? "200K" : "20K");
        FILE *f = start_program(flags, "models/opt-tiny", dir, ":");
        const off_t begun = grown(journal, 0);
        CU_ASSERT(begun > 0);
        if (stopped) {
            CU_ASSERT(grown(journal, begun) > begun); /* it sweeps */
            char *first = contents(in_dir(left_behind, "0"), NULL);
            CU_ASSERT_EQUAL(kill(atoi(first), SIGTERM), 0);
            free(first);
        } else {
            write_file(dir, "model.safetensors", "", 0);
        }
        CU_ASSERT_NOT_EQUAL(hear(f, 2), 0);
        CU_ASSERT_PTR_NOT_NULL(
            strstr(said, stopped ? "flexgen: stage 0: stopped by SIGTERM; go on with --resume" : "flexgen: stage 1: "));
        CU_ASSERT(stopped || strstr(said, "was changed while it was in use"));
        CU_ASSERT(!access(journal, F_OK));
    }
}

/* The second stage's copy of the model differs: in a matrix between its ends, or in which ids two tokens have. */
TEST(over_mpi_a_stage_with_another_model_or_tokenizer_names_itself) {
    static const char *const says[] = {"flexgen: stage 1: has another model than stage 0",
                                       "flexgen: stage 1: has another tokenizer than stage 0"};
    enum { ENDS = 4096 };
    static const char zeros[1 << 20];
    for (int way = 0; way < 2; way++) {
        char command[600];
        Error err;
        const char *dir = temp_dir();
        snprintf(command, sizeof command, "cd models/opt-tiny && cp * '%s' && sed -i '%s' '%s/vocab.json'", dir,
                 way ? "s/\"!\": 4, \"\\\\\"\": 5/\"!\": 5, \"\\\\\"\": 4/" : "", dir);
        CHECK(!system(command));
        Checkpoint *c = checkpoint_open(dir, &err);
        const Tensor *fc1 = &c->layer[3][FC1_W];
        const int fd = open(in_dir(dir, "model.safetensors"), O_WRONLY);
        if (!way) CHECK(pwrite(fd, zeros, tensor_bytes(*fc1) - 2 * ENDS, (off_t)fc1->offset + ENDS) > 0);
        CHECK(!close(fd));
        checkpoint_close(c);
        CU_ASSERT_NOT_EQUAL(
            hear(start_program("generate --prompt Once --max-tokens 2 --threads 1", "models/opt-tiny", dir, ":"), 2), 0);
        CU_ASSERT_PTR_NOT_NULL(strstr(said, says[way]));
    }
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

/* With the memory that it is given the first stage finds a batch whose logits the second has no room for. With less memory,
 * at the third try, it finds one that both have room for. */
TEST(over_mpi_the_search_takes_less_memory_if_another_stage_has_too_little) {
    static const char flags[] =
        "bench --threads 1 --prompt-len 8 --gen-len 2 --num-prompts 64 --num-gpu-batches 1 --percent 100 0 100 0 100 0 "
        "--gpu-mem 11750K --cpu-mem 100M --disk-mem 1G --hardware hardware/laptop.json";
    CU_ASSERT_EQUAL(hear(start_program(flags, "models/opt-tiny", "models/opt-tiny", ":"), 2), 0);
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
    char path[MAX_PATH];
    program_file(path, "_mpi.so");
    CU_ASSERT_PTR_NULL(dlopen(path, RTLD_NOW | RTLD_NOLOAD));
}
