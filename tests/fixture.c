/* fixture.c: what the suites share: directories, files, data, policies. tests.h says what each function does. */
#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <inttypes.h>
#include <signal.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests.h"

#define ROOT "flexgen-test-"
static char temp_root[MAX_PATH]; /* made when the first directory is asked for; locked as long as the suite runs */
static pid_t temp_owner;         /* which removes it; a child of a test does not */
static int temp_count;

static int remove_one(const char *path, const struct stat *st, int flag, struct FTW *ftw) {
    (void)st, (void)flag, (void)ftw;
    return remove(path);
}

static void remove_tree(const char *path) { nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS | FTW_MOUNT); }

void forget_temp_dirs(void) { temp_root[0] = 0; }

void remove_temp_dirs(void) {
    if (temp_owner == getpid()) remove_tree(temp_root);
}

/* Removes what suites that were killed have left there: like a result that was not finished (io.h), a name proves it. */
static void remove_dead_roots(const char *base) {
    DIR *beside = opendir(base);
    CHECK(beside);
    for (const struct dirent *e; (e = readdir(beside));) {
        char path[MAX_PATH];
        if (strncmp(e->d_name, ROOT, strlen(ROOT))) continue;
        const int fd = openat(dirfd(beside), e->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        snprintf(path, sizeof path, "%s/%s", base, e->d_name);
        if (fd >= 0 && file_is_dead(fd, e->d_name)) remove_tree(path);
        close(fd);
    }
    closedir(beside);
}

static void make_root(void) {
    const char *base = getenv("TMPDIR");
    uint64_t random;
    if (!base) base = "/tmp";
    remove_dead_roots(base);
    CHECK(!getentropy(&random, sizeof random));
    snprintf(temp_root, sizeof temp_root, "%s/" ROOT "%016" PRIx64, base, random);
    CHECK(!mkdir(temp_root, 0700));
    const int fd = open(temp_root, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    CHECK(fd >= 0 && file_lock(fd, 0));
    CHECK(!file_prove(temp_root, fd));
    temp_owner = getpid();
    atexit(remove_temp_dirs);
}

const char *temp_dir(void) {
    static char dirs[4][300];
    char *dir = dirs[temp_count % 4];
    if (!temp_root[0]) make_root();
    CHECK((size_t)snprintf(dir, sizeof *dirs, "%s/%d", temp_root, temp_count++) < sizeof *dirs);
    CHECK(mkdir(dir, 0777) == 0);
    return dir;
}

int count_files(const char *dir) {
    int n = -2; /* . and .. */
    DIR *d = opendir(dir);
    CHECK(d);
    while (readdir(d)) n++;
    closedir(d);
    return n;
}

void write_file(const char *dir, const char *name, const void *bytes, size_t len) {
    char path[600];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(bytes, 1, len, f) == len && fclose(f) == 0);
}

char *in_dir(const char *dir, const char *name) {
    static char path[4][700];
    static int next;
    next = (next + 1) % 4;
    snprintf(path[next], sizeof path[next], "%s/%s", dir, name);
    return path[next];
}

char *contents(const char *path, size_t *len) {
    enum { MOST = 1 << 28 };
    Error err;
    size_t bytes;
    char *text = file_read(path, MOST, &bytes, &err);
    if (!text) {
        fprintf(stderr, "\n    %s\n", err.text);
        CU_FAIL_FATAL("a file cannot be read");
    }
    if (len) *len = bytes;
    return text;
}

void copy_file(const char *from, const char *to, const char *name) {
    size_t len;
    char *text = contents(in_dir(from, name), &len);
    write_file(to, name, text, len);
    free(text);
}

const char *leave_unfinished(const char *path, bool directory) {
    static char name[MAX_PATH];
    int ends[2], status;
    CHECK(!pipe(ends));
    fflush(NULL);
    const pid_t child = fork();
    if (!child) {
        Error err;
        CHECK(unfinished_begin("--output", path, directory, &err) >= 0);
        if (directory) write_file(unfinished_name(), "config.json", "{}", 2);
        CHECK(write(ends[1], unfinished_name(), MAX_PATH) == MAX_PATH);
        _exit(0);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child && !status);
    CHECK(read(ends[0], name, sizeof name) == MAX_PATH && !access(name, F_OK));
    close(ends[0]), close(ends[1]);
    return name;
}

bool has_python(void) {
    static int status = -1;
    if (status < 0) status = system("python3 -c '' 2>/dev/null");
    return !status;
}

int python(const char *begin, const char *lines) {
    const char *dir = temp_dir();
    const char first[] =
        "import json, os, subprocess, sys\nsys.path.insert(0, 'scripts')\ndir = os.environ['DIR']\n"
        "def same(found, expected):\n"
        "    if found != expected: sys.exit('expected %r, found %r' % (expected, found))\n";
    FILE *f = fopen(in_dir(dir, "lines.py"), "w");
    CHECK(f && fprintf(f, "%s%s%s", first, begin, lines) > 0 && !fclose(f));
    setenv("DIR", dir, 1);
    return system("python3 -B $DIR/lines.py");
}

void redirect(int fd, const char *path, int flags) {
    const int opened = open(path, flags, 0644);
    CHECK(opened >= 0 && dup2(opened, fd) == fd);
    close(opened);
}

bool aborts(void (*run)(void)) {
    int status;
    fflush(NULL);
    const pid_t child = fork();
    if (!child) {
        fclose(stderr);
        signal(SIGABRT, SIG_DFL);
        run();
        _exit(0);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

int split_words(char *text, char *words[], int most) {
    int n = 0;
    for (char *at = text + strspn(text, " "); *at; at += strspn(at, " ")) {
        const bool quoted = *at == '\'';
        CHECK(n + 1 < most);
        words[n++] = at += quoted;
        at += strcspn(at, quoted ? "'" : " ");
        if (*at) *at++ = 0;
    }
    words[n] = NULL;
    return n;
}

double max_norm_error(const float *a, const float *b, size_t n) {
    double diff = 0, ref = 0;
    for (size_t i = 0; i < n; i++) {
        const double d = fabs((double)a[i] - b[i]);
        if (isnan(d)) return NAN;
        diff = fmax(diff, d);
        ref = fmax(ref, fabs(b[i]));
    }
    return ref > 0 ? diff / ref : diff;
}

bool plain_pack(uint8_t *to, const f16 *x, size_t stride, int n) {
    bool all = true;
    for (int first = 0; first < n; first += GROUP, to += GROUP_BYTES) {
        const int count = imin(GROUP, n - first);
        float v[GROUP], min = INFINITY, max = -INFINITY;
        f16 header[2] = {0x7e00, 0};
        bool finite = true;
        for (int i = 0; i < count; i++) {
            v[i] = f16_to_f32(x[(first + i) * stride]);
            min = fminf(min, v[i]), max = fmaxf(max, v[i]), finite &= isfinite(v[i]) != 0;
        }
        if (finite) {
            const float exact = (max - min) / 15;
            header[0] = f32_to_f16(min + 0.f), header[1] = f32_to_f16(exact);
            if (f16_to_f32(header[1]) < exact) header[1]++;
            if (min + 15 * f16_to_f32(header[1]) >= 65520) header[1]--;
        }
        memset(to, 0, quant_bytes(count));
        memcpy(to, header, sizeof header);
        for (int i = 0; i < count && header[1]; i++) {
            const int code = (int)rintf((v[i] - min) * (1 / f16_to_f32(header[1])));
            to[4 + i / 32 * 16 + i % 16] |= (uint8_t)(code << i % 32 / 16 * 4);
        }
        all &= finite;
    }
    return all;
}

void plain_numbers(float *x, const uint8_t *from, int n) {
    for (int i = 0; i < n; i++) {
        const uint8_t *group = from + i / GROUP * GROUP_BYTES;
        f16 header[2];
        memcpy(header, group, sizeof header);
        const int code = group[4 + i % GROUP / 32 * 16 + i % 16] >> i % 32 / 16 * 4 & 15;
        x[i] = f16_to_f32(header[0]) + f16_to_f32(header[1]) * (float)code;
    }
}

Hardware machine_with(const char *changes) {
    char change[80];
    int used;
    Error err;
    Hardware h = {.name = "fast", .gmem = 1e18, .cmem = 1e18, .nmem = 1e18};
    for (int p = 0; p < 2; p++) {
        h.ctog_bdw[p] = h.gtoc_bdw[p] = h.dtoc_bdw[p] = h.ctod_bdw[p] = 1e25;
        h.mm_flops[p] = h.bmm_flops[p] = h.cpu_flops[p] = 1e25;
    }
    for (; sscanf(changes, " %79s%n", change, &used) == 1; changes += used) CHECK(!hardware_change(&h, change, &err));
    return h;
}

float test_random(uint64_t *state) {
    uint64_t z = (*state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return (float)((double)((z ^ (z >> 31)) >> 40) / 8388608.0 - 1.0);
}

int test_below(uint64_t *state, int n) { return imin(n - 1, (int)((test_random(state) + 1) / 2 * (float)n)); }
double test_spread(uint64_t *state, double low, double high) { return low * pow(high / low, (test_random(state) + 1) / 2); }

OptConfig opt_named(const char *name) {
    OptConfig config;
    CHECK(opt_config_by_name(&config, name) == 0);
    return config;
}

static Task task_of(int count, const int *s, const int *n, int step) {
    Task task = {.prompts = xcalloc(count, sizeof(Prompt)), .count = count};
    for (int i = 0; i < count; i++, s += step, n += step)
        task.prompts[i] = (Prompt){.ids = xcalloc(*s + *n, sizeof(int32_t)), .s = *s, .n = *n, .from = 1, .place = i};
    return task;
}

void sample(Task *task, Sampling sampling) {
    for (int i = 0; i < task->count; i++) task->prompts[i].sampling = sampling;
    task->sampled = sampling.temperature > 0 && !task->scored;
}

Task equal_task(int count, int s, int n) { return task_of(count, &s, &n, 0); }

Task random_task(int count, const int *s, const int *n, int vocab, uint64_t seed) {
    Task task = task_of(count, s, n, 1);
    for (int i = 0; i < count; i++)
        for (int t = 0; t < s[i] + n[i]; t++) task.prompts[i].ids[t] = t ? test_below(&seed, vocab - 1) : 2;
    return task;
}

void free_task(Task *task) {
    for (int i = 0; i < task->count; i++) free(task->prompts[i].ids);
    free(task->prompts);
}

Policy placed(const double share[6], int gbs, int num_gpu_batches) {
    Policy p = {.gbs = gbs, .num_gpu_batches = num_gpu_batches, .overlap = true, .page_tokens = 16};
    memcpy(p.share, share, sizeof p.share);
    return p;
}

Policy on_tiers(double wg, double wc, double cg, double cc, double hg, double hc, int gbs, int num_gpu_batches) {
    return placed((double[]){wg, wc, cg, cc, hg, hc}, gbs, num_gpu_batches);
}

Policy all_gpu(int gbs, int num_gpu_batches) { return on_tiers(1, 0, 1, 0, 1, 0, gbs, num_gpu_batches); }

void draw_shares(double *gpu, double *cpu, uint64_t *state) {
    static const double round[][2] = {{1, 0}, {0, 1}, {0, 0}, {.5, .5}, {.2, .8}, {0, .5}, {.3333, .6666}, {.25, 0}};
    const int i = test_below(state, 11);
    const double g = (test_random(state) + 1) / 2, c = (test_random(state) + 1) / 2;
    *gpu = i < 8 ? round[i][0] : i < 10 ? floor(100 * g) / 100 : g;
    *cpu = i < 8 ? round[i][1] : i < 10 ? floor(100 * (1 - *gpu) * c) / 100 : (1 - *gpu) * c;
}

Search open_question(const Hardware *hardware, const Checkpoint *model, const Task *task) {
    Search s = {.hardware = hardware, .checkpoint = model, .task = task, .act_type = F16};
    s.given.overlap = true, s.given.page_tokens = 16;
    for (int t = 0; t < NTIERS; t++) s.capacity[t] = (Bytes)hardware->mem[t];
    return s;
}

void say_policy(const Policy *p) {
    fprintf(
        stderr,
        "\n    w %g/%g c %g/%g h %g/%g, %d x %d x %d, %s%s%s%s, table %d, page %d, packed %d %d %d, sparsity %g, pieces "
        "of %d, "
        "%d workspaces ",
        p->wg, p->wc, p->cg, p->cc, p->hg, p->hc, p->gbs, p->num_gpu_batches, p->flights, schedule_name[p->schedule],
        p->delegated ? ", CPU attention" : "", p->overlap ? "" : ", no overlap", p->synchronize ? ", synchronize" : "",
        p->table_home, p->page_tokens, p->weight_packed, p->head_packed, p->cache_packed, p->sparsity, p->piece_rows,
        p->workspaces);
}

// ---- The engine -----------------------------------------------------------------------------------------------------

int rig_open(Rig *r) {
    const char *dir = r->dir ? r->dir : r->sim ? NULL : temp_dir();
    Gpu *gpu = r->gpu ? r->gpu : test_gpu;
    if (!r->plan) r->plan = plan_make(r->model, &r->policy, r->task, r->sim ? F16 : test_act_type(), &r->err);
    if (!r->plan) return -1;
    r->device = r->sim ? sim_open(r->plan, r->sim) : device_open(gpu, r->plan, r->model, dir, &r->err);
    if (!r->device) return -1;
    r->device->net = r->net;
    return r->sim ? 0 : weights_load(r->plan, r->model, r->device, &r->err);
}

static int note_done(void *ctx, int prompt, const int32_t *tokens, int n, FinishReason reason, Error *err) {
    Rig *r = ctx;
    Answer *a = &r->answer[prompt];
    memcpy(a->tokens, tokens, n * sizeof *tokens);
    a->n = n, a->done++, a->reason = reason;
    return r->hears.done ? r->hears.done(r->hears.ctx, prompt, tokens, n, reason, err) : 0;
}

static void note_logits(void *ctx, int prompt, int n, const float *logits) {
    Rig *r = ctx;
    Answer *a = &r->answer[prompt];
    const size_t vocab = r->model->config.vocab;
    a->logits = memcpy(a->steps + (n - 1) * vocab, logits, vocab * sizeof *logits);
    if (r->hears.logits) r->hears.logits(r->hears.ctx, prompt, n, logits);
}

static void note_scored(void *ctx, int prompt, int at, float logp, int32_t best) {
    Rig *r = ctx;
    Answer *a = &r->answer[prompt];
    a->logp[at] = logp, a->best[at] = best;
    a->scored = a->scored >= 0 && at == r->task->prompts[prompt].from + a->scored ? a->scored + 1 : -1;
    if (r->hears.scored) r->hears.scored(r->hears.ctx, prompt, at, logp, best);
}

static bool pass_token(void *ctx, int prompt, const int32_t *tokens, int n) {
    const Listener *hears = &((Rig *)ctx)->hears;
    return hears->token(hears->ctx, prompt, tokens, n);
}

static int pass_sweep(void *ctx, const RunStats *stats, Error *err) {
    const Listener *hears = &((Rig *)ctx)->hears;
    return hears->sweep(hears->ctx, stats, err);
}

int rig_run(Rig *r) {
    const Listener listener = {.ctx = r,
                               .token = r->hears.token ? pass_token : NULL,
                               .done = note_done,
                               .logits = note_logits,
                               .scored = note_scored,
                               .sweep = r->hears.sweep ? pass_sweep : NULL};
    r->prompts = r->task->count;
    r->answer = xcalloc(r->prompts, sizeof *r->answer);
    for (int i = 0; i < r->prompts; i++) {
        const int n = r->task->prompts[i].n, all = r->task->scored ? r->task->prompts[i].s + n : 0;
        r->answer[i] = (Answer){.tokens = xcalloc(n, sizeof(int32_t)),
                                .steps = r->task->keep_logits ? xcalloc(n * r->model->config.vocab, sizeof(float)) : NULL,
                                .logp = xcalloc(all, sizeof(float)),
                                .best = xcalloc(all, sizeof(int32_t))};
    }
    if (!r->device && rig_open(r)) return -1;
    const int status = schedule_run(r->plan, r->task, r->device, &listener, &r->stats, &r->err);
    memcpy(r->planned, r->plan->total, sizeof r->planned);
    memcpy(r->peak, r->device->peak, sizeof r->peak);
    memcpy(r->read, r->device->count[ATTEND].read, sizeof r->read);
    r->pages = r->plan->npages[TIER_CPU], r->seconds = r->device->now(r->device);
    for (int lane = 0; lane < NLANES; lane++)
        for (int kind = 0; kind < NKINDS; kind++) r->moved[lane_channel[lane]][kind] += r->device->count[lane].moved[kind];
    return status;
}

void rig_stop(Rig *r) {
    if (r->device) r->device->close(r->device);
    plan_free(r->plan);
    r->device = NULL, r->plan = NULL;
}

void rig_close(Rig *r) {
    rig_stop(r);
    for (int i = 0; i < r->prompts; i++)
        free(r->answer[i].tokens), free(r->answer[i].steps), free(r->answer[i].logp), free(r->answer[i].best);
    free(r->answer);
    r->answer = NULL, r->prompts = 0;
}

Rig rig_ran(const Checkpoint *model, const Policy *policy, const Task *task, const Hardware *sim) {
    Rig r = {.model = model, .policy = *policy, .task = task, .sim = sim};
    const int status = rig_run(&r);
    if (status) say_policy(policy), fprintf(stderr, "%s\n", r.err.text);
    CU_ASSERT_EQUAL_FATAL(status, 0);
    rig_stop(&r);
    return r;
}

bool rig_same(const Rig *a, const Rig *b) {
    bool same = a->prompts == b->prompts;
    for (int i = 0; same && i < a->prompts; i++) {
        const Answer *x = &a->answer[i], *y = &b->answer[i];
        const size_t steps = x->steps && y->steps ? x->n * a->model->config.vocab * sizeof(float) : 0;
        const size_t scored = a->task->scored ? (a->task->prompts[i].s + a->task->prompts[i].n) * sizeof(float) : 0;
        same = x->done == 1 && x->n == y->n && x->reason == y->reason && x->scored == y->scored &&
               !memcmp(x->tokens, y->tokens, x->n * sizeof(int32_t)) && (!steps || !memcmp(x->steps, y->steps, steps)) &&
               !memcmp(x->logp, y->logp, scored) && !memcmp(x->best, y->best, scored);
    }
    return same;
}

Event post_row(Device *device, Call call, const Tensor on[NTIERS], int first, int n, Event after) {
    static const Tier from[NCHANNELS] = {TIER_CPU, TIER_GPU, TIER_DISK, TIER_CPU, TIER_GPU, TIER_CPU},
                      to[NCHANNELS] = {TIER_GPU, TIER_CPU, TIER_CPU, TIER_DISK, TIER_GPU, TIER_CPU};
    const Channel c = lane_channel[call.lane];
    const Move move = {tensor_cols(on[to[c]], first, n), tensor_cols(on[from[c]], first, n)};
    Op op = op_copy(call, &move, 1);
    if (after.seq) op.after[op.nafter++] = after;
    return device->post(device, &op);
}

Bytes streamed_bytes(const OptConfig *config) {
    const Bytes h1 = config->h1, h2 = config->h2; /* four matrices of attention, two of the MLP; biases, layernorms */
    return 2 * (config->l * (4 * h1 * h1 + 2 * h1 * h2 + 9 * h1 + h2) + config->vocab * h1);
}
