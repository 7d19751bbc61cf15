/* profile.c measures this machine (section 4.3: "the hardware parameters are profiled").
 *
 * Every number is measured through the table of device functions that a run uses: a device is
 * opened on a small plan, the same operations are posted on the same lanes, and the clock is read
 * when the last of them has finished. So a rate is what the engine gets, lanes and launches
 * included, on the host device and on a GPU alike.
 *   links         copies between the CPU and the GPU tier, out of memory that no cache holds
 *   disk          the offload file is written until it is on the disk, and read back past the page
 *                 cache
 *   curves        linear by its rows, with weights that come from memory as a layer's do; attention
 *                 by tokens, over cold pages
 *   op_s          a chain of operations that have nothing to do, from lane to lane; the time of
 *                 every other operation is reduced by this much
 *   shared cores  how much longer a product takes on the host device beside copies and beside reads
 *                 of the disk
 * Products and attention have the shapes of the model that will run. A rate is the median of
 * several samples. A curve ends early if its next point would take too long. The result is kept in
 * the user's cache under a name that stands for all that it depends on.
 * Read next: runtime.c. */
#include <limits.h>
#include <math.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "base/simd.h"
#include "cost/cost.h"

enum {
    /* counts the changes of measurements, kernels or lanes that make older files wrong */
    PROFILE_VERSION = 5,
    PAGE_TOKENS = 16, /* of a KV page, as in a run */
    CHUNK = 8 << 20,  /* bytes of a copy, about a matrix of a layer */
    AT_ONCE = 4,      /* chunks that are in flight to or from the disk */
    LEAST_DISK = 2 * AT_ONCE * CHUNK,
    TINY = 100,        /* operations of the chain that measures op_s */
    BESIDE = 4,        /* the point of 16 rows is measured beside copies, as in decoding */
    SAMPLES = 64,      /* of a value, at most */
    LEAST_SAMPLES = 3, /* at least, if three times the usual time is enough for them */
    PAIRS = 5,         /* samples of a product alone and beside copies */
    BRIEF = 20,        /* a sample shorter than 1 / BRIEF of a value's time has several rounds */
    MOST_ROUNDS = 100, /* of these, at most */
    POINT_TIMES = 10,  /* a point of a curve may take so many times a value's time */
    DISK_TIMES = 25,   /* and so may a pass over the file: less would show little but a cache */
};

/* The sizes of a curve's points; INT_MAX ends them. */
enum { NTOKEN_SIZES = 5 };
static const int row_sizes[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, INT_MAX},
                 token_sizes[NTOKEN_SIZES + 1] = {16, 64, 256, 1024, 2048, INT_MAX};

/* A device with memory to work on, and the measurement that is under way on it. */
typedef struct {
    ProfileSize size;
    Device *device;
    Plan plan;
    Checkpoint none; /* the device's checkpoint, which has no files */
    bool packed;     /* the numbers in the cold memory are packed; else they are F16 */
    size_t span;     /* bytes of the cold memory that weights are read from */
    size_t at;       /* where in it the next op reads */
    Event product;   /* the newest product, which the next one waits for */
    Event copied;    /* a copy that the next product waits for too */
    double op_s;     /* seconds of an op besides its work, once it is measured */
    double work;     /* flops or bytes of the ops posted since the last sample */
    int ops;         /* the number of these ops */
    double round_s;  /* seconds of a round in the last sample */
    FILE *progress;
    Error *err;
} Profile;

/* A kind of operation to measure. post posts one round of it, at point i of a curve, and adds to
 * work and ops. A copy has a lane and two tiers; attention has a lane and a tier, which is `to`. */
typedef struct Work {
    const char *name; /* of a curve */
    Event (*post)(Profile *, const struct Work *, int i);
    Lane lane;
    Tier to, from;
} Work;

// -------------------------------------------------------------------------------------------------
// The memory of a measurement
// -------------------------------------------------------------------------------------------------

/* Returns the columns of the widest result of a layer's products, which is q, k and v or the MLP's
 * inner result. */
static int widest(const ProfileSize *s) { return imax(3 * s->h1, s->h2); }

/* The index tables of each point of a curve: where its prompts start, the lengths of its sequences,
 * and their pages. */
enum { STARTS, LENGTHS, PAGES, NTABLES };

/* Returns how many integers the longest table has. */
static int table_length(const ProfileSize *s) {
    return s->nseq * pages_for(s->tokens, PAGE_TOKENS) + 1;
}

/* Plans both upper tiers, which are alike: cold memory, then the inputs and the results of a
 * product, then index tables. */
static void plan_memory(Plan *plan, const ProfileSize *s, Type act) {
    int cold = s->cold / sizeof(f16), most = imax(s->rows * widest(s), s->tokens * s->h1);
    *plan = (Plan){.act_type = act};
    for (int t = TIER_GPU; t <= TIER_CPU; t++) {
        add_region(plan, (Wanted){RESTING_WEIGHTS, t, "cold memory", F16, 1, cold, 1});
        add_region(plan, (Wanted){HIDDEN, t, "inputs", act, 1, most, 1});
        add_region(plan, (Wanted){MLP, t, "results", act, 1, most, 1});
        add_region(plan, (Wanted){INDEX_TABLES, t, "index tables", I32, 1, table_length(s),
                                  NTOKEN_SIZES * NTABLES});
    }
}

/* Returns the matrix of so many rows that begins with this one. */
static Tensor matrix(Tensor row, int rows) {
    row.rows = rows;
    return row;
}

/* Returns a matrix of the inputs (HIDDEN) or of the results (MLP). */
static Tensor states(const Profile *p, RegionId id, Tier tier, int rows, int cols) {
    return matrix(plan_bytes(&p->plan, id, tier, 0, p->plan.act_type, cols), rows);
}

/* Returns bytes of the cold memory from byte `at` on, as numbers of a type. */
static Tensor cold(const Profile *p, Tier tier, Bytes at, Type type, int rows, int cols) {
    return matrix(plan_bytes(&p->plan, RESTING_WEIGHTS, tier, at, type, cols), rows);
}

/* Returns cold numbers, packed or F16, in rows of so many bytes. */
static Tensor numbers(const Profile *p, Tier tier, Bytes at, int rows, size_t bytes) {
    Type type = p->packed ? U8 : F16;
    return cold(p, tier, at, type, rows, bytes / type_bytes(type));
}

/* Takes the next `bytes` of the first `span` bytes of cold memory, which are used in turn. Returns
 * where they begin. */
static size_t next_cold(Profile *p, size_t span, size_t bytes) {
    CHECK(bytes <= span);
    size_t at = p->at + bytes <= span ? p->at : 0;
    p->at = at + whole_lines(bytes);
    return at;
}

/* Returns the first n integers of one of point i's index tables. */
static Tensor table(const Profile *p, Tier tier, int i, int which, int n) {
    return plan_bytes(&p->plan, INDEX_TABLES, tier,
                      sizeof(int32_t) * (i * NTABLES + which) * table_length(&p->size), I32, n);
}

/* Returns the bytes of a copy. */
static size_t chunk(const Profile *p) { return size_min(p->size.cold / 2, CHUNK); }

// -------------------------------------------------------------------------------------------------
// Ops
// -------------------------------------------------------------------------------------------------

/* Returns what ops on a lane are for. */
static Call measure_on(Lane lane) { return (Call){.lane = lane, .kind = OTHER}; }

/* Posts an op that has so much work, in flops or bytes. */
static Event post_op(Profile *p, const Op *op, double work) {
    p->work += work;
    p->ops++;
    return p->device->post(p->device, op);
}

static Event post_product(Profile *p, Lane lane, int m, int n, int k) {
    size_t size = p->packed ? quant_matrix_bytes(n, k) : (size_t)n * k * sizeof(f16);
    int rows = p->packed ? n / GROUP : n;
    Tensor w = numbers(p, TIER_GPU, next_cold(p, p->span, size), rows, size / rows),
           x = states(p, HIDDEN, TIER_GPU, m, k), none = {0};
    Op op = op_linear(measure_on(lane), states(p, MLP, TIER_GPU, m, n), x, w, none, none);
    op.nafter = 2;
    op.after[0] = p->product;
    op.after[1] = p->copied;
    return p->product = post_op(p, &op, 2.0 * m * n * k);
}

/* Posts a layer's products, on the lanes that a layer has them on. */
static Event post_linear(Profile *p, const Work *w, int i) {
    int m = row_sizes[i], h1 = p->size.h1, h2 = p->size.h2;
    (void)w;
    post_product(p, PROJECT, m, 3 * h1, h1);
    post_product(p, FINISH, m, h1, h1);
    post_product(p, FINISH, m, h2, h1);
    return post_product(p, FINISH, m, h1, h2);
}

/* Posts attention of prompts of one length. Together they have as many tokens as the longest
 * prompt. */
static Event post_attend_prefill(Profile *p, const Work *w, int i) {
    int s = token_sizes[i], nseq = p->size.tokens / s, rows = nseq * s, h1 = p->size.h1;
    size_t at = next_cold(p, p->span, (size_t)rows * 3 * h1 * sizeof(f16));
    Tensor qkv = cold(p, w->to, at, F16, rows, 3 * h1),
           start = table(p, w->to, i, STARTS, nseq + 1);
    Call call = measure_on(w->lane);
    call.prefill = true;
    Op op = op_attend_prefill(call, states(p, MLP, w->to, rows, h1), tensor_cols(qkv, 0, h1),
                              tensor_cols(qkv, h1, 2 * h1), start, p->size.nh);
    return post_op(p, &op, 4.0 * h1 * nseq * s * (s + 1) / 2);
}

/* Posts attention of new tokens. K is in the first half of the cold memory and V in the second;
 * each round uses the next part of them. */
static Event post_attend(Profile *p, const Work *w, int i) {
    int len = token_sizes[i], h1 = p->size.h1, nh = p->size.nh, each = len / PAGE_TOKENS;
    size_t half = p->span / 2,
           row = p->packed ? nh * quant_bytes(h1 / nh) : h1 * sizeof(f16); /* of K, or V */
    int nseq = imin(p->size.nseq, half / row / len), tokens = nseq * len;
    size_t at = next_cold(p, half, tokens * row);
    PageTable t = {.k = numbers(p, w->to, at, tokens, row),
                   .v = numbers(p, w->to, half + at, tokens, row),
                   .pages = matrix(table(p, w->to, i, PAGES, each), nseq),
                   .len = table(p, w->to, i, LENGTHS, nseq),
                   .page_tokens = PAGE_TOKENS,
                   .nh = nh};
    Op op = op_attend(measure_on(w->lane), states(p, MLP, w->to, nseq, h1),
                      cold(p, w->to, 0, F16, nseq, h1), &t);
    return post_op(p, &op, 4.0 * h1 * nseq * len);
}

/* Returns chunk i of a tier: of the disk's file, or of the second half of the cold memory, so that
 * a product that reads the first may run beside the copy. */
static Tensor chunk_of(const Profile *p, Tier tier, int i) {
    size_t bytes = chunk(p), half = p->size.cold / 2;
    bool disk = tier == TIER_DISK;
    size_t all = disk ? p->plan.offload_bytes : half / bytes * bytes;
    return cold(p, tier, (disk ? 0 : half) + (size_t)i * bytes % all, F16, 1, bytes / sizeof(f16));
}

static Event post_copy(Profile *p, const Work *w, int i) {
    Move move = {chunk_of(p, w->to, i), chunk_of(p, w->from, i)};
    Op op = op_copy(measure_on(w->lane), &move, 1);
    op.after[op.nafter++] = p->product;
    return post_op(p, &op, chunk(p));
}

/* Posts copies of all of one half. */
static Event post_copies(Profile *p, const Work *w, int i) {
    Event last = {0};
    for (i = 0; i < (int)(p->size.cold / 2 / chunk(p)); i++)
        last = post_copy(p, w, i);
    return last;
}

/* Posts a layernorm of half of the cold memory into the other half, which overwrites its weights.
 * */
static Event post_layernorm(Profile *p, const Work *w, int i) {
    Type act = p->plan.act_type;
    size_t row = p->size.h1 * type_bytes(act), half = p->size.cold / 2;
    int h1 = p->size.h1, rows = half / row - 1;
    Tensor one = cold(p, TIER_GPU, 0, F16, 1, h1); /* the first row; x lies behind it */
    Tensor x = cold(p, TIER_GPU, row, act, rows, h1);
    Tensor y = cold(p, TIER_GPU, half, act, rows, h1);
    Op op = op_layernorm(measure_on(FINISH), y, x, one, one);
    (void)w;
    (void)i;
    return post_op(p, &op, 2.0 * rows * row);
}

/* Posts a chain of ops that have almost nothing to do, from lane to lane. */
static Event post_tiny(Profile *p, const Work *w, int i) {
    Tensor row = states(p, MLP, TIER_GPU, 1, 16), one = cold(p, TIER_GPU, 0, F16, 1, 16);
    Event last = {PROJECT, 0};
    (void)w;
    for (i = 0; i < TINY; i++) {
        Op op = op_layernorm(measure_on(i % 2 ? FINISH : PROJECT), row, row, one, one);
        op.after[op.nafter++] = last;
        last = post_op(p, &op, 1);
    }
    return last;
}

static const Work ctog = {"", post_copies, W_LOAD, TIER_GPU, TIER_CPU},
                  gtoc = {"", post_copies, STORE, TIER_CPU, TIER_GPU},
                  dtoc = {"", post_copy, W_READ, TIER_CPU, TIER_DISK},
                  ctod = {"", post_copy, D_WRITE, TIER_DISK, TIER_CPU}, chain = {.post = post_tiny},
                  layernorm = {.post = post_layernorm},
                  linear = {.name = "linear", .post = post_linear},
                  prompts = {"prompts", post_attend_prefill, FINISH, TIER_GPU, TIER_GPU},
                  on_gpu = {"new tokens on the GPU", post_attend, FINISH, TIER_GPU, TIER_GPU},
                  on_cpu = {"new tokens on the CPU", post_attend, ATTEND, TIER_CPU, TIER_CPU};

// -------------------------------------------------------------------------------------------------
// Sampling
// -------------------------------------------------------------------------------------------------

static int compare(const void *a, const void *b) {
    return *(const double *)a < *(const double *)b ? -1 : 1;
}

static double median(double *sample, int n) {
    qsort(sample, n, sizeof *sample, compare);
    return (sample[(n - 1) / 2] + sample[n / 2]) / 2;
}

static double now(const Profile *p) { return p->device->now(p->device); }

/* Waits for an event. When an op has failed this returns at once, as all later ops do nothing;
 * measure_all reports it. */
static int wait_for(const Profile *p, Event event) {
    return p->device->wait(p->device, event, p->err);
}

/* Posts rounds and waits for the last. Returns the seconds of all of them. */
static double sample_seconds(Profile *p, const Work *w, int i, int rounds) {
    Event last = {0};
    p->work = 0;
    p->ops = 0;
    double begin = now(p);
    for (int r = 0; r < rounds; r++)
        last = w->post(p, w, i);
    wait_for(p, last);
    double seconds = now(p) - begin;
    p->round_s = seconds / rounds;
    return seconds;
}

/* Rates that were sampled, in work a second. The time that ops take besides their work is not
 * counted. */
typedef struct {
    int n;
    double rate[SAMPLES];
} Samples;

static void add_sample(Samples *s, const Profile *p, double seconds) {
    if (s->n < SAMPLES)
        s->rate[s->n++] = p->work / fmax(seconds - p->ops * p->op_s, seconds / 2);
}

/* Takes samples for some time. The first is not counted if it is short: caches, threads and a GPU's
 * choice of kernels are new. */
static void sample(Samples *s, Profile *p, const Work *w, int i) {
    double seconds = p->size.seconds, first = sample_seconds(p, w, i, 1);
    double total = 0;
    int taken = 0;
    int rounds = fmax(fmin(seconds / BRIEF / fmax(first, 1e-6), MOST_ROUNDS), 1);
    if (first > seconds) {
        add_sample(s, p, first);
        total = first;
    }
    for (; total < (taken < LEAST_SAMPLES ? 3 * seconds : seconds); taken++) {
        double t = sample_seconds(p, w, i, rounds);
        add_sample(s, p, t);
        total += t;
    }
}

static double measure_rate(Profile *p, const Work *w) {
    Samples s = {0};
    sample(&s, p, w, 0);
    return median(s.rate, s.n);
}

/* Writes a line to progress. */
__attribute__((format(printf, 2, 3))) static void tell(Profile *p, const char *format, ...) {
    va_list args;
    if (!p->progress)
        return;
    va_start(args, format);
    vfprintf(p->progress, format, args);
    va_end(args);
    fputc('\n', p->progress);
    fflush(p->progress);
}

// -------------------------------------------------------------------------------------------------
// The measurements
// -------------------------------------------------------------------------------------------------

static void set_both(double phase[2], double value) {
    phase[0] = value;
    phase[1] = value;
}

static void measure_links(Hardware *h, Profile *p) {
    double up = measure_rate(p, &ctog), down = measure_rate(p, &gtoc);
    set_both(h->ctog_bdw, up);
    set_both(h->gtoc_bdw, down);
    tell(p, "  CPU to GPU %.2f GB/s, GPU to CPU %.2f GB/s", up / 1e9, down / 1e9);
}

/* Returns the bytes/s of the whole file, or of as many of its *chunks as there is time for. */
static double measure_pass(Profile *p, const Work *w, int *chunks) {
    double begin = now(p);
    double took = 0;
    int n = 0;
    while (n < *chunks && took < DISK_TIMES * p->size.seconds) {
        Event last = {0};
        for (int g = 0; g < AT_ONCE && n < *chunks; g++)
            last = post_copy(p, w, n++);
        wait_for(p, last);
        took = now(p) - begin;
    }
    *chunks = n;
    return n * chunk(p) / fmax(took, 1e-9);
}

static void measure_disk(Hardware *h, Profile *p) {
    int chunks = p->plan.offload_bytes / chunk(p);
    set_both(h->ctod_bdw, chunks ? measure_pass(p, &ctod, &chunks) : NO_DISK);
    set_both(h->dtoc_bdw, chunks ? measure_pass(p, &dtoc, &chunks) : NO_DISK);
    if (chunks)
        tell(p, "  write %.2f GB/s, read %.2f GB/s", h->ctod_bdw[0] / 1e9, h->dtoc_bdw[0] / 1e9);
}

/* Measures the points of a curve up to the profile's size, as long as the next point is expected to
 * be quick enough. Each is measured twice, because disturbances come in bursts. A smaller op never
 * takes longer than one with more rows, or more tokens to attend to; if it seems to, something else
 * has disturbed it. (This is not true of prompts: one of twice the tokens has twice the pairs for
 * each.) */
static void measure_curve(Curve *c, Profile *p, const Work *w) {
    bool by_rows = w == &linear;
    const int *sizes = by_rows ? row_sizes : token_sizes;
    int largest = by_rows ? p->size.rows : p->size.tokens;
    Samples all[MAX_POINTS] = {{0}};
    if (by_rows && p->packed && p->plan.act_type == F16)
        largest = imin(largest, PACKED_ROWS); /* with more, a GPU unpacks the weights */
    for (int i = 0; sizes[i] <= largest; i++) {
        if (i && p->round_s * sizes[i] / sizes[i - 1] > POINT_TIMES * p->size.seconds)
            break;
        sample(&all[i], p, w, i);
        c->size[c->n++] = sizes[i];
    }
    for (int i = 0; i < c->n; i++) {
        sample(&all[i], p, w, i);
        c->rate[i] = median(all[i].rate, all[i].n);
    }
    for (int i = c->n - 2; i >= 0 && w != &prompts; i--)
        c->rate[i] = fmax(c->rate[i], c->rate[i + 1] * c->size[i] / c->size[i + 1]);
    tell(p, "  %s: %.1f GFLOP/s at %.0f %s, %.1f at %.0f", w->name, c->rate[0] / 1e9, c->size[0],
         by_rows ? "rows" : "tokens", c->rate[c->n - 1] / 1e9, c->size[c->n - 1]);
}

/* Returns the FLOP/s of a curve at a size. */
static double rate_at(const Curve *c, double size) { return 1 / curve_seconds(c, size, 1); }

/* Measures op_s and products. The single rates of Table 8 are read from the curves at the sizes of
 * its experiments. */
static void measure_linear(Hardware *h, Profile *p) {
    h->op_s = p->op_s = 1 / measure_rate(p, &chain);
    measure_curve(&h->mm_rows, p, &linear);
    h->mm_flops[0] = rate_at(&h->mm_rows, 16);
    h->mm_flops[1] = rate_at(&h->mm_rows, 1024);
}

/* Measures attention, and the rates of Table 8 as above. */
static void measure_attention(Hardware *h, Profile *p) {
    enum { PROMPT = 512 }; /* tokens in these experiments */
    measure_curve(&h->bmm_tokens[1], p, &prompts);
    measure_curve(&h->bmm_tokens[0], p, &on_gpu);
    measure_curve(&h->cpu_tokens, p, &on_cpu);
    for (int phase = 0; phase < 2; phase++)
        h->bmm_flops[phase] = rate_at(&h->bmm_tokens[phase], PROMPT);
    set_both(h->cpu_flops, rate_at(&h->cpu_tokens, PROMPT));
    for (int i = 0; i < h->cpu_tokens.n; i++)
        h->cpu_bdw = fmax(h->cpu_bdw, h->cpu_tokens.rate[i]); /* a flop a byte */
}

/* Measures products and attention again with packed numbers. */
static void measure_packed(Hardware *h, Profile *p) {
    if (p->size.h1 % GROUP || p->size.h2 % GROUP || p->size.h1 / p->size.nh % 16)
        return; /* such a model is never packed */
    p->packed = true;
    measure_curve(&h->mm_packed, p, &linear);
    measure_curve(&h->bmm_packed, p, &on_gpu);
    measure_curve(&h->cpu_packed, p, &on_cpu);
    p->packed = false;
}

/* Measures how many seconds longer products take for each byte that is copied beside them. As in a
 * layer, the copies are of the weights for the next products: `each` rounds of products wait for
 * the copy that was made beside the rounds before. */
static double sample_lost(Profile *p, const Work *beside, int i, int copies, int each) {
    Event last = {0}, next = {0};
    double alone = sample_seconds(p, &linear, i, copies * each), begin = now(p);
    for (int c = 0; c < copies; c++) {
        p->copied = next;
        next = post_copy(p, beside, c);
        for (int r = 0; r < each; r++)
            last = post_linear(p, &linear, i);
    }
    p->copied = (Event){0};
    wait_for(p, last);
    double lost = now(p) - begin - alone;
    wait_for(p, next);
    return lost / copies / chunk(p);
}

/* Returns the seconds lost for each byte. Beside each copy there are so many products that the copy
 * alone would take half as long as they do. */
static double measure_lost(Profile *p, const Curve *rows, const Work *beside, double rate) {
    double most = 2 * p->size.seconds, copy = chunk(p) / rate, begin = now(p);
    double lost[PAIRS];
    int i = imin(rows->n - 1, BESIDE);
    int n = 0;
    double t = sample_seconds(p, &linear, i, 1);
    int each = imax(1, ceil(2 * copy / t)), copies = imax(2, most / (each * t));
    do
        lost[n++] = sample_lost(p, beside, i, copies, each);
    while (n < PAIRS && now(p) - begin < 4 * PAIRS * most);
    return fmax(median(lost, n), 0);
}

static void measure_shared_cores(Hardware *h, Profile *p) {
    h->shared_cores = true;
    p->span = p->size.cold / 2;
    h->copy_core_s = measure_lost(p, &h->mm_rows, &ctog, h->ctog_bdw[0]);
    if (p->plan.offload_bytes)
        h->disk_core_s = measure_lost(p, &h->mm_rows, &dtoc, h->dtoc_bdw[0]);
    p->span = p->size.cold;
    tell(p, "  lost for a GB copied %.3f s, read from disk %.3f s", 1e9 * h->copy_core_s,
         1e9 * h->disk_core_s);
}

static int measure_all(Hardware *h, Profile *p) {
    static const struct {
        const char *what;
        void (*measure)(Hardware *, Profile *);
    } parts[] = {{"copies", measure_links},
                 {"disk", measure_disk},
                 {"linear", measure_linear},
                 {"attention", measure_attention},
                 {"packed weights and cache", measure_packed},
                 {"products beside copies", measure_shared_cores}}; /* on the host device only */
    int n = sizeof parts / sizeof *parts - (p->plan.act_type != F32);
    Event none = {0};
    for (int i = 0; i < n; i++) {
        tell(p, "measuring this machine: %s", parts[i].what);
        parts[i].measure(h, p);
        if (wait_for(p, none))
            return -1;
    }
    h->gpu_bdw = measure_rate(p, &layernorm); /* the last: it overwrites weights */
    return wait_for(p, none);
}

// -------------------------------------------------------------------------------------------------
// The size of the measurements
// -------------------------------------------------------------------------------------------------

/* Makes the measurements smaller until the plan of their memory fits. Halves the cold memory, and
 * with it the products, whose weights need half of it, and their rows, whose inputs and results
 * need no more than all of it. */
static int fit_memory(ProfileSize *s, int tiers, size_t room, Error *err) {
    enum { LEAST = 1 << 20 };
    for (;;) {
        Plan plan;
        plan_memory(&plan, s, F32);
        size_t needs = tiers * plan.total[TIER_CPU];
        if (needs <= room)
            return 0;
        s->cold = s->cold / 2 / 4096 * 4096;
        while (2 * sizeof(f16) * s->h1 * widest(s) > s->cold && s->nh % 2 == 0) {
            s->h1 /= 2; /* each head keeps its size */
            s->h2 /= 2;
            s->nh /= 2;
        }
        while (2 * sizeof(float) * s->rows * widest(s) > s->cold && s->tokens > *token_sizes) {
            s->rows /= 2;
            s->tokens /= 2;
        }
        if (s->cold < LEAST || 2 * sizeof(f16) * s->h1 * widest(s) > s->cold)
            return fail(err, EXIT_USAGE,
                        "measuring this machine needs %.1f MiB of memory, and this process may "
                        "have %.1f MiB; give it more, "
                        "or name a machine with --hardware",
                        needs / 1048576.0, room / 1048576.0);
    }
}

/* Chooses the largest layer that can be measured within a minute, or the model's own if that is
 * smaller. On the host device both upper tiers are memory of this process. */
int profile_size(ProfileSize *size, const Gpu *gpu, const OptConfig *config, size_t memory,
                 Error *err) {
    enum { MOST_COLD = 1 << 30 };
    int larger = gpu ? 2 : 1;
    ProfileSize s = {.h1 = 2048 * larger,
                     .h2 = 8192 * larger,
                     .nh = 32,
                     .nseq = 16 * larger,
                     .rows = 1024,
                     .tokens = 2048,
                     .disk = (size_t)256 << 20,
                     .seconds = .1};
    if (config && config->h1 <= s.h1 && config->h2 <= s.h2) {
        s.h1 = config->h1;
        s.h2 = config->h2;
        s.nh = config->nh;
    }
    /* half of it does not fit into the last cache, so that a round through it finds nothing there
     */
    s.cold = size_max(size_min(4 * processor_cache() / 4096 * 4096, MOST_COLD),
                      gpu ? 4 * s.disk : s.disk);
    *size = s;
    return fit_memory(size, gpu ? 1 : 2, memory, err);
}

/* Plans the memory of the upper tiers, and the file. This has the bytes that are asked for, or half
 * of the disk's room if that is less; but at least LEAST_DISK, unless the disk is memory. */
static void plan_profile(Profile *p, Type act, const ThisMachine *here) {
    size_t asked = p->size.disk,
           least = memory_holds(here->offload_dir) ? 0 : size_min(asked, LEAST_DISK);
    size_t bytes = size_max(size_min(here->capacity[TIER_DISK] / 2, asked), least);
    plan_memory(&p->plan, &p->size, act);
    add_region(&p->plan, (Wanted){RESTING_WEIGHTS, TIER_DISK, "file", F16, bytes / chunk(p),
                                  chunk(p) / sizeof(f16), 1});
    p->span = p->size.cold;
}

// -------------------------------------------------------------------------------------------------
// The device to measure on
// -------------------------------------------------------------------------------------------------

/* Fills a row with small numbers in no order, of which no sum overflows. */
static void fill(Profile *p, Tensor row) {
    enum { N = 1 << 16 };
    static float single[N];
    static f16 half[N];
    for (uint32_t i = 0; i < N; i++) {
        single[i] = ((i * 2654435761u >> 8 & 0xffff) / 65536.0 - 0.5) / 8;
        half[i] = f32_to_f16(single[i]);
    }
    const void *pattern = row.type == F32 ? (void *)single : half;
    for (int first = 0; first < row.cols; first += N)
        p->device->upload(p->device, row, first, pattern, imin(row.cols - first, N));
}

/* Fills the index tables of a point, whose prompts and sequences have `tokens` tokens each. */
static void fill_tables(Profile *p, Tier tier, int i, int tokens) {
    const int first[NTABLES] = {[LENGTHS] = tokens},
              step[NTABLES] = {[STARTS] = tokens, [PAGES] = 1};
    int n = table_length(&p->size);
    int32_t *value = xcalloc(n, sizeof *value);
    for (int which = 0; which < NTABLES; which++) {
        for (int r = 0; r < n; r++)
            value[r] = first[which] + r * step[which];
        p->device->upload(p->device, table(p, tier, i, which, n), 0, value, n);
    }
    free(value);
}

static void fill_memory(Profile *p) {
    static const RegionId numbers_in[] = {RESTING_WEIGHTS, HIDDEN, MLP};
    for (int t = TIER_GPU; t <= TIER_CPU; t++) {
        for (int i = 0; i < 3; i++)
            fill(p, plan_view(&p->plan, numbers_in[i], t, 0, 0, 1));
        for (int i = 0; i < NTOKEN_SIZES; i++)
            fill_tables(p, t, i, token_sizes[i]);
    }
}

/* Writes the processor's name, or uname's machine if there is none. */
static void processor(char name[MOST_PROCESSOR]) {
    struct utsname machine = {.machine = "unknown processor"};
    processor_name(name);
    uname(&machine);
    if (!name[0])
        snprintf(name, MOST_PROCESSOR, "%s", machine.machine);
    for (char *c = name; *c; c++)
        if (*c < ' ' || *c > '~')
            *c = '?';
}

static void name_machine(char name[MOST_NAME + 1], const Gpu *gpu, int threads) {
    char cpu[MOST_PROCESSOR];
    processor(cpu);
    if (gpu)
        snprintf(name, MOST_NAME + 1, "%.40s; %.38s, %d thread%s", gpu->name, cpu, threads,
                 plural(threads));
    else
        snprintf(name, MOST_NAME + 1, "%.59s, %d thread%s, host device", cpu, threads,
                 plural(threads));
}

static void set_capacities(Hardware *h, const Bytes capacity[NTIERS]) {
    for (int t = 0; t < NTIERS; t++)
        h->mem[t] = fmin(fmax(capacity[t], 1), 1e18);
}

/* Measures at this size; without a disk if size->disk is 0. Otherwise like profile_measure. */
static int measure_machine(Hardware *hardware, const ProfileSize *size, const ThisMachine *here,
                           Error *err) {
    Gpu *gpu = here->gpu;
    Profile p = {.size = *size, .progress = here->progress, .err = err};
    int status = -1;
    if (gpu && fit_memory(&p.size, 1, gpu_left(gpu), err))
        return -1;
    plan_profile(&p, gpu ? F16 : F32, here);
    *hardware = (Hardware){0};
    name_machine(hardware->name, gpu, host_set_threads(here->threads));
    set_capacities(hardware, here->capacity);
    if (!p.plan.offload_bytes)
        hardware->nmem = 1;
    p.device = device_open(gpu, &p.plan, &p.none, here->offload_dir, err);
    if (p.device) {
        p.device->no_graph = true; /* what is repeated here comes once in a sweep */
        fill_memory(&p);
        status = measure_all(hardware, &p);
        p.device->close(p.device);
    }
    return status;
}

int profile_measure(Hardware *hardware, const ProfileSize *size, const ThisMachine *here,
                    Error *err) {
    ProfileSize without = *size;
    Error fault;
    without.disk = 0;
    if (!measure_machine(hardware, size, here, &fault))
        return 0;
    if (measure_machine(hardware, &without, here, err))
        return -1;
    fprintf(here->progress ? here->progress : stderr, "measured without a disk: %s\n", fault.text);
    return 0;
}

// -------------------------------------------------------------------------------------------------
// A measured machine as a file
// -------------------------------------------------------------------------------------------------

void profile_write(const Hardware *hardware, FILE *out) {
    char date[80];
    time_t now = time(NULL);
    struct tm day;
    strftime(date, sizeof date, "measured by flexgen profile on %Y-%m-%d", localtime_r(&now, &day));
    hardware_write(hardware, date, out);
}

/* Writes the directory of the user's cache. Returns its length, or 0 if there is none. */
static int cache_dir(char *dir, size_t size) {
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    int n = cache && cache[0] == '/' ? snprintf(dir, size, "%s", cache)
            : home && home[0] == '/' ? snprintf(dir, size, "%s/.cache", home)
                                     : 0;
    return n < (int)size ? n : 0;
}

void profile_path(char *path, size_t size, const ProfileSize *shapes, const ThisMachine *here) {
    char dir[4000], cpu[MOST_PROCESSOR], key[800];
    struct stat disk;
    uint64_t file_system_kind;
    path[0] = 0;
    if (!cache_dir(dir, sizeof dir) || stat(here->offload_dir, &disk) ||
        file_system(here->offload_dir, &file_system_kind))
        return;
    processor(cpu);
    snprintf(key, sizeof key, "%d|%d|%d|%d|%d|%d|%zu|%s|%d|%s|%s|%jx|%jx", PROFILE_VERSION,
             shapes->h1, shapes->h2, shapes->nh, shapes->rows, shapes->tokens, shapes->cold, cpu,
             host_set_threads(here->threads), host_isa(), here->gpu ? here->gpu->name : "",
             (uintmax_t)disk.st_dev, (uintmax_t)file_system_kind);
    /* The number is the start of an FNV-1a hash. */
    uint64_t hash = hash_bytes(14695981039346656037u, key, strlen(key));
    if (snprintf(path, size, "%s/flexgen/hardware-%016jx.json", dir, (uintmax_t)hash) >= (int)size)
        path[0] = 0;
}

void profile_keep(const Hardware *hardware, const ProfileSize *size, const ThisMachine *here) {
    char path[4100];
    Error err;
    if (hardware->dtoc_bdw[0] == NO_DISK)
        return; /* the disk may be back the next time */
    if (cache_dir(path, sizeof path - strlen("/flexgen"))) {
        mkdir(path, 0700); /* mostly both exist; if not, output_open says why */
        mkdir(strcat(path, "/flexgen"), 0700);
    }
    profile_path(path, sizeof path, size, here);
    fail(&err, EXIT_FAILED, "HOME names no directory for it");
    FILE *f = *path ? output_open("cannot write", path, &err) : NULL;
    if (f)
        profile_write(hardware, f);
    if (!f || output_close(f, "cannot write", path, &err))
        fprintf(here->progress ? here->progress : stderr,
                "the next run will measure again: %s (XDG_CACHE_HOME)\n", err.text);
}

int profile_machine(Hardware *hardware, const ProfileSize *size, const ThisMachine *here,
                    Error *err) {
    char path[4100];
    Error damaged;
    profile_path(path, sizeof path, size, here);
    if (!access(path, R_OK) && !hardware_read(hardware, path, &damaged)) {
        set_capacities(hardware, here->capacity);
        return 0;
    }
    if (profile_measure(hardware, size, here, err))
        return -1;
    profile_keep(hardware, size, here);
    return 0;
}
