/* project_judge.c: judges an entry to the open project, docs/PROJECT.md.
 *
 *     project_judge MODEL TEXT STORIES SEED MACHINE WG WC CG CC HG HC GBS K SCHEDULE DELEGATED
 *
 * PROJECT_ENTRY is the command of a process that answers as docs/project/ask.h says; without it the exact model is judged.
 * What cannot be trusted answers questions about numbers. This program has all the rest: the texts, the model, the forward
 * pass, the bytes that are counted, and the clock. It prints one line of JSON, or says on standard error why there is none.
 *
 * The forward pass is reference_forward, in a copy of opt_model.c whose weights have been packed and unpacked, and where a
 * token behind the prompt attends to pages that have been. The clock is the device sim, in a copy of device/sim.c where ops
 * on weights and cache take the share of their time that the counted bytes are of the plan's. */
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "branches/walk.h"
#include "device/device.h"
#include "docs/project/ask.h"
#include "tests/project_judge.h"

enum { S = 128, N = 64, PROMPTS = 960, WINDOW = S + N }; /* of the texts, and of the run on the sim */
enum { SECONDS = 20 };                                   /* that an answer may take */
enum { JOIN_SESSION_KEYRING = 1 };                       /* KEYCTL_JOIN_SESSION_KEYRING of linux/keyctl.h */
#define SIM_MODEL "opt-2.7b"

static void refuse(const char *why) {
    fprintf(stderr, "%s\n", why);
    exit(1);
}
static void must(bool done, const Error *err) {
    if (!done) refuse(err->text);
}

// ---- the entry, which is other processes ----------------------------------------------------------------------------

typedef struct {
    pid_t pid;
    int to, from;
    int said; /* a file of its own with what it prints, so that two processes have no file in common */
} Entry;

static Entry entry_start(void) {
    int to[2], from[2];
    CHECK(!pipe2(to, O_CLOEXEC) && !pipe2(from, O_CLOEXEC));
    char path[] = "/tmp/flexgen-said-XXXXXX";
    const int said = mkostemp(path, O_CLOEXEC);
    CHECK(said >= 0 && !unlink(path));
    Entry e = {.pid = fork(), .to = to[1], .from = from[0], .said = said};
    CHECK(e.pid >= 0);
    if (!e.pid) {
        dup2(to[0], 0);
        /* By way of a high number, since one of the pipes may be file 3 itself. */
        dup2(fcntl(from[1], F_DUPFD_CLOEXEC, 10), ANSWERS_FD);
        dup2(said, 1), dup2(said, 2);
        syscall(SYS_keyctl, JOIN_SESSION_KEYRING, NULL); /* else it would be the one of all entries */
        execl("/bin/sh", "sh", "-c", getenv("PROJECT_ENTRY"), NULL);
        _exit(127);
    }
    close(to[0]), close(from[1]);
    CHECK(fcntl(e.to, F_SETFL, O_NONBLOCK) == 0);
    return e;
}

/* Appends the beginning of what an entry has printed to PROJECT_LOG. */
static void keep_said(const Entry *e) {
    static char text[1 << 16];
    const char *path = getenv("PROJECT_LOG");
    const int log = open(path ? path : "/dev/null", O_WRONLY | O_APPEND);
    const ssize_t n = pread(e->said, text, sizeof text, 0);
    if (log >= 0 && n > 0) CHECK(write(log, text, n) == n);
    if (log >= 0) close(log);
}

/* Ends an entry with all of its processes, of which this one is the reaper: when it returns none is left that could tell
 * the next entry something. Only one entry runs at a time. */
static void entry_end(Entry *e) {
    if (!e->pid) return;
    close(e->to), close(e->from);
    kill(e->pid, SIGKILL);
    while (waitpid(-1, NULL, 0) > 0) {
    }
    keep_said(e), close(e->said);
    *e = (Entry){0};
}

/* Waits until the file can be read or written. */
static void await(int file, short what) {
    struct pollfd wait = {file, what, 0};
    if (poll(&wait, 1, SECONDS * 1000) != 1) refuse("refused: no answer within 20 s");
}

static void read_answer(const Entry *e, void *to, size_t bytes) {
    for (size_t had = 0; had < bytes;) {
        await(e->from, POLLIN);
        const ssize_t n = read(e->from, (char *)to + had, bytes - had);
        if (n <= 0) refuse("refused: it ended before it had answered");
        had += n;
    }
}

static void write_question(const Entry *e, const void *from, size_t bytes) {
    for (size_t had = 0; had < bytes;) {
        await(e->to, POLLOUT);
        const ssize_t n = write(e->to, (const char *)from + had, bytes - had);
        if (n <= 0) refuse("refused: it ended before it was asked");
        had += n;
    }
}

/* Asks, and returns the bytes of the answer, of which there are at most `most`. */
static size_t entry_ask(Entry *e, Ask ask, const void *given, void *answer, size_t most) {
    int32_t bytes;
    if (!e->pid) *e = entry_start();
    write_question(e, &ask, sizeof ask);
    write_question(e, given, ask.bytes);
    read_answer(e, &bytes, sizeof bytes);
    if (bytes < 0 || (size_t)bytes > most) refuse("refused: an answer is larger than it may be");
    read_answer(e, answer, bytes);
    return bytes;
}

// ---- what is packed -------------------------------------------------------------------------------------------------

static Entry packer, unpacker, chooser, seater;

static void end_all(void) { entry_end(&packer), entry_end(&unpacker), entry_end(&chooser), entry_end(&seater); }

static bool judged; /* false: the exact model */
/* Numbers that were packed, and the bytes that they took. [0] weights, [1] keys and values. */
static double numbers[2], packed_bytes[2];

/* A matrix that is to be packed and unpacked in place, and what is between. */
typedef struct {
    float *x;
    Matrix m;
    uint8_t *packed;
    size_t bytes;
} Passing;

/* Packs matrices, and unpacks them in place. What unpacks begins when what has packed has ended with all of its processes,
 * so that only the bytes that are counted pass from one to the other, and what chooses pages has neither beside it. */
static void pass_through(Passing *all, int n) {
    for (Passing *p = all; p < all + n; p++) {
        const size_t count = (size_t)p->m.rows * p->m.cols;
        const Ask ask = {.kind = ASK_PACK, .bytes = (int32_t)(4 * count), .matrix = p->m};
        p->packed = xcalloc(count, 2);
        p->bytes = entry_ask(&packer, ask, p->x, p->packed, 2 * count);
    }
    entry_end(&packer);
    for (Passing *p = all; p < all + n; p++) {
        const size_t count = (size_t)p->m.rows * p->m.cols;
        const Ask ask = {.kind = ASK_UNPACK, .bytes = (int32_t)p->bytes, .matrix = p->m};
        if (entry_ask(&unpacker, ask, p->packed, p->x, 4 * count) != 4 * count)
            refuse("refused: a matrix comes back with another size");
        for (size_t e = 0; e < count; e++) {
            p->x[e] = f16_to_f32(f32_to_f16(p->x[e]));
            if (!isfinite(p->x[e])) refuse("refused: a number that is not finite comes back");
        }
        free(p->packed);
        numbers[p->m.what != WEIGHTS] += count, packed_bytes[p->m.what != WEIGHTS] += p->bytes;
    }
    entry_end(&unpacker);
}

enum { TENSORS = 64 * NROLES };

/* Reads the tensors of all layers into `layers`, and packs and unpacks their matrices if an entry is judged. */
static void read_layers(float *layers[TENSORS], const Checkpoint *checkpoint) {
    static Passing passing[TENSORS];
    const OptConfig *c = &checkpoint->config;
    int n = 0;
    CHECK(c->l * NROLES <= TENSORS);
    for (int at = 0; at < c->l * NROLES; at++) {
        Error err;
        const Tensor *tensor = &checkpoint->layer[0][at];
        layers[at] = checkpoint_floats(checkpoint, tensor, &err);
        must(layers[at] != NULL, &err);
        const Matrix m = {WEIGHTS, tensor->rows, tensor->cols, c->h1 / c->nh};
        if (role_is_matrix(at % NROLES)) passing[n++] = (Passing){.x = layers[at], .m = m};
    }
    if (judged) pass_through(passing, n);
}

/* Tensors as floats, each of them read, and packed and unpacked, once. */
float *judged_floats(const Checkpoint *checkpoint, const Tensor *tensor, Error *err) {
    static float *layers[2][TENSORS];
    const Tensor *first = checkpoint->layer[0];
    const long at = tensor - first;
    if (tensor < first || at >= checkpoint->config.l * NROLES) return checkpoint_floats(checkpoint, tensor, err);
    if (!layers[judged][0]) read_layers(layers[judged], checkpoint);
    float **kept = &layers[judged][at];
    const size_t count = (size_t)tensor->rows * tensor->cols;
    float *copy = xcalloc(count, sizeof *copy);
    memcpy(copy, *kept, count * sizeof *copy);
    return copy;
}

// ---- attention to pages ---------------------------------------------------------------------------------------------

enum { PAGES = WINDOW / PAGE };
/* Numbers of keys and values that steps of generation could have read, and the bits that they did read. */
static double past_numbers, read_bits;

/* Computes row t of attention to the pages that are loaded and to the open page, and each page's share of it. */
static void attend_row(float *o, const float *q, float *const kv[2][2], const uint8_t *load, int t, const OptConfig *c,
                       float *mass) {
    const int hd = c->h1 / c->nh, full = t / PAGE * PAGE;
    memset(mass, 0, PAGES * sizeof *mass);
    for (int head = 0; head < c->nh; head++) {
        const float *qt = q + t * c->h1 + head * hd;
        float *ot = o + t * c->h1 + head * hd, score[WINDOW], max = -INFINITY, sum = 0;
        for (int u = 0; u <= t; u++) {
            const float *ku = kv[u < full][0] + u * c->h1 + head * hd;
            if (u < full && !load[u / PAGE]) continue;
            score[u] = 0;
            for (int d = 0; d < hd; d++) score[u] += qt[d] * ku[d];
            score[u] /= sqrtf(hd), max = fmaxf(max, score[u]);
        }
        for (int u = 0; u <= t; u++)
            if (u >= full || load[u / PAGE]) sum += score[u] = expf(score[u] - max);
        memset(ot, 0, hd * sizeof *ot);
        for (int u = 0; u <= t; u++) {
            if (u < full && !load[u / PAGE]) continue;
            const float *vu = kv[u < full][1] + u * c->h1 + head * hd;
            for (int d = 0; d < hd; d++) ot[d] += score[u] / sum * vu[d];
            mass[u / PAGE] += score[u] / sum / c->nh;
        }
    }
}

/* Rows of the prompt attend to all exactly. Later rows attend to full pages as they come back from pack and unpack. */
void judged_attention(float *o, const float *q, const float *k, const float *v, int n, const OptConfig *c) {
    plain_attention(o, q, k, v, n, c);
    if (!judged) return;
    const size_t size = (size_t)n * c->h1, page = (size_t)PAGE * c->h1;
    float *back = xcalloc(2 * size, sizeof *back), *const kv[2][2] = {{(float *)k, (float *)v}, {back, back + size}};
    memcpy(back, k, size * sizeof *back), memcpy(back + size, v, size * sizeof *back);
    double bits[PAGES] = {0};
    Passing passing[2 * PAGES] = {0}; /* the keys and the values of each page */
    for (int i = 0; i < n / PAGE * 2; i++) {
        const Matrix m = {i % 2 ? VALUES : KEYS, PAGE, c->h1, c->h1 / c->nh};
        passing[i] = (Passing){.x = back + i % 2 * size + i / 2 * page, .m = m};
    }
    pass_through(passing, n / PAGE * 2);
    for (int i = 0; i < n / PAGE * 2; i++) bits[i / 2] += 8. * passing[i].bytes;
    float mass[PAGES], now[PAGES];
    int32_t age[PAGES];
    uint8_t load[PAGES];
    /* The last row of the prompt was exact, and is here computed again only for its shares. */
    memset(load, 1, sizeof load);
    attend_row(o, q, (float *const[2][2]){{kv[0][0], kv[0][1]}, {kv[0][0], kv[0][1]}}, load, S - 1, c, mass);
    for (int p = 0; p < PAGES; p++) age[p] = 1;
    for (int t = S; t < n; t++) {
        const int pages = t / PAGE;
        struct {
            float mass[PAGES];
            int32_t age[PAGES];
        } given;
        memcpy(given.mass, mass, pages * sizeof *mass), memcpy(given.mass + pages, age, pages * sizeof *age);
        const Ask ask = {.kind = ASK_PAGES, .bytes = 8 * pages, .pages = pages};
        if (entry_ask(&chooser, ask, &given, load, pages) != (size_t)pages) refuse("refused: pages are not chosen");
        attend_row(o, q, kv, load, t, c, now);
        read_bits += 2. * 16 * c->h1 * (t % PAGE + 1), past_numbers += 2. * c->h1 * (t + 1);
        for (int p = 0; p <= pages; p++) {
            const bool read = p == pages || load[p];
            if (p < pages && read) read_bits += bits[p];
            mass[p] = read ? now[p] : mass[p], age[p] = read ? 1 : age[p] + 1;
        }
    }
    entry_end(&chooser); /* the next layer's steps are asked in another process */
    free(back);
}

// ---- texts ----------------------------------------------------------------------------------------------------------

/* Adds to *nats the surprise of the N tokens behind each prompt, and writes the model's choice of each. */
static void score(double *nats, int32_t *choice, const Checkpoint *model, const int32_t *ids) {
    const int vocab = model->config.vocab;
    float *logits = xcalloc((size_t)WINDOW * vocab, sizeof *logits);
    Error err;
    must(!reference_forward(logits, model, ids, WINDOW, &err), &err);
    for (int t = S - 1; t < WINDOW - 1; t++) {
        const float *row = logits + (size_t)t * vocab;
        double sum = 0;
        int best = 0;
        for (int e = 1; e < vocab; e++) best = row[e] > row[best] ? e : best;
        for (int e = 0; e < vocab; e++) sum += exp(row[e] - row[best]);
        *nats += log(sum) + row[best] - row[ids[t + 1]];
        *choice++ = best;
    }
    free(logits);
}

typedef struct {
    double perplexity, exact; /* exact: that of the exact model */
    int tokens, same;         /* tokens that were scored, and those where the exact model would choose the same */
} Score;

/* Reads the stories of a text, which blank lines separate: those that are long enough. Returns their number. */
static int read_stories(int32_t (**stories)[WINDOW], const char *path, const Tokenizer *tokenizer) {
    Error err;
    size_t len;
    int count = 0;
    char *text = file_read(path, 1 << 24, &len, &err);
    must(text != NULL, &err);
    for (char *story = text; story;) {
        char *end = strstr(story, "\n\n");
        int32_t *ids;
        const int n = tokenizer_encode(tokenizer, story, end ? (size_t)(end - story) : strlen(story), &ids, &err);
        must(n >= 0, &err);
        if (n >= WINDOW - 1) {
            *stories = with_room(*stories, count, sizeof **stories);
            (*stories)[count][0] = tokenizer_bos(tokenizer);
            memcpy(&(*stories)[count++][1], ids, (WINDOW - 1) * sizeof *ids);
        }
        free(ids);
        story = end ? end + strspn(end, "\n") : NULL;
    }
    free(text);
    return count;
}

/* Scores `count` stories, of which the seed says which. */
static Score score_texts(const char *model_dir, const char *path, int count, uint64_t seed) {
    Error err;
    int32_t exact[N], choice[N], (*stories)[WINDOW] = NULL;
    Checkpoint *model = checkpoint_open(model_dir, &err);
    must(model != NULL, &err);
    Tokenizer *tokenizer = tokenizer_open(model_dir, model->config.vocab, &err);
    must(tokenizer != NULL, &err);
    const int all = read_stories(&stories, path, tokenizer);
    if (count < 1 || count > all) refuse("the text has not so many stories of 192 tokens");
    double nats = 0, exact_nats = 0;
    int same_tokens = 0;
    for (int i = 0; i < count; i++) {
        const int32_t *ids = stories[(seed + (uint64_t)i * all / count) % all];
        judged = false;
        score(&exact_nats, exact, model, ids);
        judged = getenv("PROJECT_ENTRY");
        score(&nats, choice, model, ids);
        for (int t = 0; t < N; t++) same_tokens += choice[t] == exact[t];
    }
    return (Score){exp(nats / (count * N)), exp(exact_nats / (count * N)), count * N, same_tokens};
}

// ---- the clock ------------------------------------------------------------------------------------------------------

/* The bytes that are counted, as shares of the plan's: of weights; of the cache that is stored, that rests, that is read.
 */
static struct { double weights, stored, rests, read; } share = {1, 1, 1, 1};
static int sim_layers;

double judged_share(const Op *op) {
    if (op->kind == WEIGHT && (op->lane == W_READ || op->lane == W_LOAD)) return op->j < sim_layers ? share.weights : 1;
    if (op->code == OP_ATTEND && op->lane == ATTEND) return share.read;
    if (op->kind == CACHE && (op->lane == C_READ || op->lane == C_LOAD)) return share.read;
    if (op->kind == CACHE && (op->lane == STORE || op->lane == D_WRITE)) return share.stored;
    return 1;
}

static void count_shares(int hd) {
    const double plan_bits = 8. * quant_bytes(hd) / hd, bits = 8 * packed_bytes[1] / numbers[1];
    share.weights = 8 * packed_bytes[0] / numbers[0] / (8. * GROUP_BYTES / GROUP);
    share.stored = bits / plan_bits;
    share.rests = (bits * (WINDOW - PAGE) + 16 * PAGE) / WINDOW / plan_bits; /* the last page stays as F16 */
    share.read = read_bits / past_numbers / plan_bits;
}

static double region_share(RegionId id, const Policy *policy) {
    if (id == RESTING_WEIGHTS) return share.weights;
    /* The head's slot has F16 if the head streams. */
    if (id == WEIGHT_SLOT || id == WEIGHT_SLOT_1)
        return policy->table_home == TIER_GPU ? share.weights : fmax(1, share.weights);
    return id == KV_CACHE || id == KV_STAGING ? share.rests : 1;
}

/* Returns the tier that is too small for the plan with the bytes that are counted; NTIERS: none. */
static Tier too_small(const Plan *plan, const Hardware *h, double *needs) {
    const double capacity[NTIERS] = {h->gmem, h->cmem, h->nmem};
    for (Tier t = 0; t < NTIERS; t++) {
        *needs = 0;
        for (RegionId id = 0; id < NREGIONS; id++) *needs += plan->region[id][t].bytes * region_share(id, &plan->policy);
        if (*needs > capacity[t]) return t;
    }
    return NTIERS;
}

/* Asks how many may enter, once for each state. */
static int asked_seats(const Admission *a) {
    static struct {
        Line line;
        int32_t may;
    } * known;
    static int nknown;
    const Policy *p = a->policy;
    const Line line = {(int32_t)a->sweep, a->nseats, a->seated, p->gbs, p->num_gpu_batches, (int32_t)a->n};
    for (int i = 0; i < nknown; i++)
        if (!memcmp(&known[i].line, &line, sizeof line)) return known[i].may;
    int32_t may;
    const Ask ask = {.kind = ASK_ENTER, .bytes = sizeof line};
    if (entry_ask(&seater, ask, &line, &may, sizeof may) != sizeof may) refuse("refused: may_enter gives no number");
    known = with_room(known, nknown, sizeof *known);
    known[nknown].line = line;
    known[nknown++].may = imax(0, imin(may, a->nseats - a->seated));
    return known[nknown - 1].may;
}

/* Runs the task on the sim. Returns token/s. */
static double play(const Hardware *machine, Policy policy) {
    static Prompt prompts[PROMPTS];
    static int32_t ids[S];
    const Task task = {.prompts = prompts, .count = PROMPTS};
    Error err;
    OptConfig config;
    CHECK(!opt_config_by_name(&config, SIM_MODEL));
    config.eos = -1;
    for (int i = 0; i < PROMPTS; i++) prompts[i] = (Prompt){.ids = ids, .s = S, .n = N};
    const Checkpoint *model = checkpoint_dummy(&config, 1);
    sim_layers = config.l;
    if (judged) count_shares(config.h1 / config.nh);
    Plan *plan = NULL;
    Tier full = NTIERS;
    double needs = 0;
    /* As fit_policy does, with the bytes that are counted: fewer workspaces first, then a lower home of the token table. */
    for (int way = 0; way < 4 && (!plan || full != NTIERS); way++) {
        plan_free(plan);
        policy.workspaces = way % 2 ? LEAST_WORKSPACES : WORKSPACES;
        policy.table_home = way / 2 ? TIER_CPU : TIER_GPU;
        plan = plan_make(model, &policy, &task, F16, &err);
        must(plan != NULL, &err);
        full = too_small(plan, machine, &needs);
    }
    if (full != NTIERS) {
        fprintf(stderr, "refused: the %s tier needs %.0f MiB\n", tier_name[full], needs / 1048576);
        exit(1);
    }
    Device *device = sim_open(plan, machine);
    const Listener none = {0};
    RunStats stats = {0};
    must(!schedule_run(plan, &task, device, &none, &stats, &err), &err);
    if (stats.generated != PROMPTS * N) refuse("refused: not all prompts have got their tokens");
    return stats.generated / stats.total_s;
}

int main(int argc, char **argv) {
    Error err;
    Hardware machine;
    if (argc != 16) refuse("project_judge MODEL TEXT STORIES SEED MACHINE WG WC CG CC HG HC GBS K SCHEDULE DELEGATED");
    signal(SIGPIPE, SIG_IGN);
    CHECK(!prctl(PR_SET_CHILD_SUBREAPER, 1));
    atexit(end_all);
    must(!hardware_read(&machine, argv[5], &err), &err);
    Policy policy = {.overlap = true, .page_tokens = 16, .weight_packed = true, .cache_packed = true};
    for (int i = 0; i < 6; i++) policy.share[i] = atof(argv[6 + i]) / 100;
    policy.gbs = atoi(argv[12]), policy.num_gpu_batches = atoi(argv[13]), policy.delegated = atoi(argv[15]);
    const bool own = !strcmp(argv[14], "own");
    if (own) seats_for[SCHEDULE_DIAGONAL] = asked_seats;
    policy.schedule = !strcmp(argv[14], "zigzag") ? SCHEDULE_ZIGZAG
                      : !strcmp(argv[14], "row")  ? SCHEDULE_ROW
                                                  : SCHEDULE_DIAGONAL;
    const Score texts = score_texts(argv[1], argv[2], atoi(argv[3]), strtoull(argv[4], NULL, 10));
    if (isnan(texts.perplexity)) refuse("refused: the perplexity is not a number");
    const double speed = play(&machine, policy);
    printf("{\"token_s\": %.4f, \"perplexity\": %.4f, \"exact\": %.4f, \"tokens\": %d, \"same\": %d", speed,
           texts.perplexity, texts.exact, texts.tokens, texts.same);
    if (judged)
        printf(", \"weight_bits\": %.3f, \"cache_bits\": %.3f, \"read_bits\": %.3f", 8 * packed_bytes[0] / numbers[0],
               8 * packed_bytes[1] / numbers[1], read_bits / past_numbers);
    printf("}\n");
}
