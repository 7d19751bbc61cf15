/* profile.c: this machine, measured (section 4.3: "the hardware parameters are profiled").
 *
 * Every number is taken through the table of device functions that a run goes through: a device is opened on a small plan
 * made by hand, the same ops are posted on the same lanes, and the clock is read when the last of them has happened. So a
 * rate is what the engine gets, lanes and launches included, on the host device and on a GPU alike.
 *   links         pieces between CPU and GPU tier, out of memory that no cache holds
 *   disk          the offload file, written until it is on the disk, read back past the page cache
 *   curves        linear by its rows, with weights that come from memory as a layer's do; attention by tokens, over cold
 *                 pages
 *   op_s          a chain of ops that have nothing to do, from lane to lane; every other op's time is less by so much
 *   shared cores  how much longer a product takes on the host device beside copies and beside reads of the disk
 * Products and attention have the shapes of the model that will run. A rate is the median of several
 * samples. A curve ends early where its next point would take too long. What was measured is kept in the
 * user's cache under a name that stands for all that it depends on. Read next: search.c, which chooses a policy with
 * these numbers. */
#include <cjson/cJSON.h>
#include <errno.h>
#include <math.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include "cost/cost.h"

enum {
    PROFILE_VERSION = 2, /* counts the changes of what is measured, or of kernels and lanes, that make older files wrong */
    PAGE_TOKENS = 16,    /* of a KV page, as in a run */
    PIECE = 8 << 20,     /* bytes of a copy, about a matrix of a layer */
    GROUP = 4,           /* pieces that are on their way to or from the disk at once */
    LEAST_DISK = 2 * GROUP * PIECE,
    TINY = 100,           /* ops of a chain that measures what an op takes besides its work */
    CONTENTION_ROWS = 16, /* rows of a product beside copies: one that decodes, and is busy with reading weights */
    SAMPLES = 64,         /* of a value, at most */
    LEAST_SAMPLES = 3,    /* and at least, if three times the usual time is enough for them */
    PAIRS = 5,            /* samples of a product alone and beside copies */
    BRIEF = 20,           /* samples shorter than this part of the time for a value are of several rounds ... */
    MOST_ROUNDS = 100,    /* ... of so many at most */
    POINT_TIMES = 10,     /* a point of a curve may take so many times the time for a value */
    DISK_TIMES = 25,      /* and a pass over the file; with less, a slow disk would show little but its cache */
};

/* How packed numbers are measured. */
static const Quant usual = {4, 64};

static const int row_sizes[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024}, token_sizes[] = {16, 64, 256, 1024, 2048};
enum { NROW_SIZES = sizeof row_sizes / sizeof *row_sizes, NTOKEN_SIZES = sizeof token_sizes / sizeof *token_sizes };

/* A device with memory to work on. Offsets are the same on the GPU's and the CPU's tier: cold memory, the inputs and the
 * outputs of a product, index tables. */
typedef struct {
    ProfileSize size;
    Device *device;
    Plan plan;
    Checkpoint none; /* the device's, without files */
    size_t x, y, tables, starts;
    Quant quant;           /* how the numbers in the cold memory are taken to be packed; bits 0: they are F16 */
    size_t span;           /* of the cold memory that is in use */
    size_t at;             /* in it: where the next op begins */
    Event product, copied; /* the newest, which the next one waits for; a copy that it waits for besides */
    double op_s;
    double work; /* what the ops posted since the last sample do: flops, or bytes */
    int ops;     /* their number */
    double round_s;
    FILE *progress;
    Error *err;
} Profile;

/* Posts one round of ops at point i of a curve, and adds to work and ops. */
typedef Event Post(Profile *, int i);

// ---------------------------------------------------------------------------------------------------------------
// Views and ops
// ---------------------------------------------------------------------------------------------------------------

static Tensor matrix(Tier tier, Type type, size_t offset, int rows, int cols) {
    return (Tensor){.tier = tier, .type = type, .offset = offset, .rows = rows, .cols = cols, .ld = (size_t)cols};
}

/* The same of packed groups. */
static Tensor bytes(const Profile *p, Tier tier, size_t offset, int rows, size_t cols) {
    Tensor t = matrix(tier, U8, offset, rows, (int)cols);
    t.quant = p->quant;
    return t;
}

/* The next bytes of cold memory that lie together. */
static size_t next_cold(Profile *p, size_t bytes) {
    CHECK(bytes <= p->span);
    if (p->at + bytes > p->span) p->at = 0;
    p->at += bytes;
    return p->at - bytes;
}

static Event post_linear_of(Profile *p, Lane lane, int m, int n, int k) {
    Type act = p->device->act_type;
    Op op = {.lane = lane, .kind = OTHER, .nafter = 2, .after = {p->product, p->copied}};
    Tensor w;
    if (p->quant.bits) {
        size_t size = quant_matrix_bytes(p->quant, n, k), groups = (n + p->quant.group - 1) / p->quant.group;
        w = bytes(p, TIER_GPU, next_cold(p, size), (int)groups, size / groups);
    } else {
        w = matrix(TIER_GPU, F16, next_cold(p, (size_t)n * k * sizeof(f16)), n, k);
    }
    p->work += 2.0 * m * n * k, p->ops++;
    op_linear(&op, matrix(TIER_GPU, act, p->y, m, n), matrix(TIER_GPU, act, p->x, m, k), w, (Tensor){0}, (Tensor){0},
              false);
    return p->product = p->device->post(p->device, &op);
}

/* The three shapes of a layer's products, from lane to lane as in a layer. */
static Event post_linear(Profile *p, int i) {
    post_linear_of(p, PROJECT, row_sizes[i], p->size.h1, p->size.h1);
    post_linear_of(p, FINISH, row_sizes[i], p->size.h2, p->size.h1);
    return post_linear_of(p, FINISH, row_sizes[i], p->size.h1, p->size.h2);
}

/* As many prompts as make up the longest. */
static Event post_attend_prefill(Profile *p, int i) {
    int s = token_sizes[i], nseq = p->size.tokens / s, rows = nseq * s, h1 = p->size.h1;
    Type act = p->device->act_type;
    Op op = {.lane = FINISH, .kind = OTHER, .prefill = true};
    Tensor kv = matrix(TIER_GPU, F16, next_cold(p, (size_t)rows * 2 * h1 * sizeof(f16)), rows, 2 * h1);
    Tensor start = matrix(TIER_GPU, I32, p->starts + (size_t)i * (p->size.tokens + 1) * 4, 1, nseq + 1);
    p->work += 4.0 * h1 * nseq * s * (s + 1) / 2, p->ops++;
    op_attend_prefill(&op, matrix(TIER_GPU, act, p->y, rows, h1), matrix(TIER_GPU, act, p->x, rows, h1), kv, start,
                      p->size.nh);
    return p->device->post(p->device, &op);
}

/* Bytes of a token's K, or V. */
static size_t row_bytes(const ProfileSize *s, Quant quant) {
    return quant.bits ? s->nh * quant_bytes(quant, s->h1 / s->nh) : s->h1 * sizeof(f16);
}

/* Page tables are all one list of pages in order, from another page on each time. */
static Event post_attend_on(Profile *p, int i, Tier tier, Lane lane) {
    int len = token_sizes[i], h1 = p->size.h1, pages_each = pages_for(len, PAGE_TOKENS);
    size_t row = row_bytes(&p->size, p->quant), half = p->span / 2, page = PAGE_TOKENS * row;
    int npages = (int)(half / page), nseq = imin(p->size.nseq, npages / pages_each);
    Type act = p->device->act_type;
    Op op = {.lane = lane, .kind = OTHER};
    p->span = half;
    size_t first = next_cold(p, nseq * pages_each * page) / page;
    p->span = 2 * half;
    CHECK((first + (size_t)nseq * pages_each) * 4 <= p->starts - p->tables);
    PageTable t = {
        .k = p->quant.bits ? bytes(p, tier, 0, npages * PAGE_TOKENS, row) : matrix(tier, F16, 0, npages * PAGE_TOKENS, h1),
        .pages = matrix(tier, I32, p->tables + first * 4, nseq, pages_each),
        .len = matrix(tier, I32, p->starts + (size_t)(NTOKEN_SIZES * (p->size.tokens + 1) + i * p->size.nseq) * 4, 1, nseq),
        .page_tokens = PAGE_TOKENS,
        .nh = p->size.nh};
    t.v = t.k, t.v.offset = half;
    p->work += 4.0 * h1 * nseq * len, p->ops++;
    op_attend(&op, matrix(tier, act, p->y, nseq, h1), matrix(tier, act, p->x, nseq, h1), &t);
    return p->device->post(p->device, &op);
}
static Event post_attend_gpu(Profile *p, int i) { return post_attend_on(p, i, TIER_GPU, FINISH); }
static Event post_attend_cpu(Profile *p, int i) { return post_attend_on(p, i, TIER_CPU, ATTEND); }

/* Up in one half of the cold memory, down in the other, so that both may run beside a product that reads the first. */
static Event post_copy(Profile *p, Lane lane, Tier to, Tier from, size_t dst, size_t src, size_t bytes) {
    Op op = {.lane = lane, .kind = OTHER, .nafter = 1, .after = {p->product}};
    Move move = {matrix(to, F16, dst, 1, (int)(bytes / sizeof(f16))),
                 matrix(from, F16, src, 1, (int)(bytes / sizeof(f16)))};
    p->work += (double)bytes, p->ops++;
    op_copy(&op, &move, 1);
    return p->device->post(p->device, &op);
}
static size_t piece(const Profile *p) { return p->size.cold / 2 < PIECE ? p->size.cold / 2 : PIECE; }
static size_t place(const Profile *p, int i) { return (size_t)i * piece(p) % (p->size.cold / 2 / piece(p) * piece(p)); }
static Event post_up(Profile *p, int i) {
    size_t at = p->size.cold / 2 + place(p, i);
    return post_copy(p, W_LOAD, TIER_GPU, TIER_CPU, at, at, piece(p));
}
static Event post_down(Profile *p, int i) {
    return post_copy(p, STORE, TIER_CPU, TIER_GPU, place(p, i), place(p, i), piece(p));
}
/* All of one half. */
static Event post_all(Profile *p, Post *post) {
    Event last = {0, 0};
    for (size_t i = 0; i < p->size.cold / 2 / piece(p); i++) last = post(p, (int)i);
    return last;
}
static Event post_all_up(Profile *p, int i) { return (void)i, post_all(p, post_up); }
static Event post_all_down(Profile *p, int i) { return (void)i, post_all(p, post_down); }

static Event post_write(Profile *p, int i) {
    return post_copy(p, D_WRITE, TIER_DISK, TIER_CPU, (size_t)i * piece(p) % p->plan.offload_bytes, place(p, i), piece(p));
}
static Event post_read(Profile *p, int i) {
    size_t src = (size_t)i * piece(p) % p->plan.offload_bytes;
    return post_copy(p, W_READ, TIER_CPU, TIER_DISK, p->size.cold / 2 + place(p, i), src, piece(p));
}

/* Half of the cold memory through layernorm into the other; what it wrote is no weights any more. */
static Event post_layernorm(Profile *p, int i) {
    Type act = p->device->act_type;
    int h1 = p->size.h1, rows = (int)(p->size.cold / 2 / (h1 * type_bytes(act))) - 1;
    Tensor w = matrix(TIER_GPU, F16, 0, 1, h1); /* a row at the beginning, and x behind it */
    Op op = {.lane = FINISH, .kind = OTHER};
    (void)i;
    p->work += 2.0 * rows * h1 * type_bytes(act), p->ops++;
    op_layernorm(&op, matrix(TIER_GPU, act, p->size.cold / 2, rows, h1),
                 matrix(TIER_GPU, act, h1 * type_bytes(act), rows, h1), w, w);
    return p->device->post(p->device, &op);
}

static Event post_tiny(Profile *p, int i) {
    Tensor row = matrix(TIER_GPU, p->device->act_type, p->y, 1, 16), w = matrix(TIER_GPU, F16, 0, 1, 16);
    Event last = {PROJECT, 0};
    (void)i;
    for (int n = 0; n < TINY; n++) {
        Op op = {.lane = n % 2 ? FINISH : PROJECT, .kind = OTHER, .nafter = n > 0, .after = {last}};
        op_layernorm(&op, row, row, w, w);
        last = p->device->post(p->device, &op);
    }
    p->work += TINY;
    return last;
}

// ---------------------------------------------------------------------------------------------------------------
// Sampling
// ---------------------------------------------------------------------------------------------------------------

static int compare(const void *a, const void *b) { return *(const double *)a < *(const double *)b ? -1 : 1; }

static double median(double *sample, int n) {
    qsort(sample, n, sizeof *sample, compare);
    return n % 2 ? sample[n / 2] : (sample[n / 2 - 1] + sample[n / 2]) / 2;
}

/* Posts rounds and waits for the last: their seconds. */
static int sample_seconds(double *seconds, Profile *p, Post *post, int i, int rounds) {
    Event last = {0, 0};
    p->work = 0, p->ops = 0;
    double begin = p->device->now(p->device);
    for (int r = 0; r < rounds; r++) last = post(p, i);
    if (p->device->wait(p->device, last, p->err) != 0) return -1;
    *seconds = p->device->now(p->device) - begin;
    return 0;
}

/* Rates that were sampled, work a second without what ops take besides. */
typedef struct {
    int n;
    double rate[SAMPLES];
} Samples;

static void add_sample(Samples *s, const Profile *p, double seconds) {
    if (s->n < SAMPLES) s->rate[s->n++] = p->work / fmax(seconds - p->ops * p->op_s, seconds / 2);
}

static double usual_rate(Samples *s) { return median(s->rate, s->n); }

/* Takes samples for some time. The first is not counted if it is short: caches, threads and a GPU's choice of kernels are
 * new. */
static int sample(Samples *s, Profile *p, Post *post, int i) {
    double seconds = p->size.seconds, t, total = 0;
    int taken = 0, rounds = 1;
    if (sample_seconds(&t, p, post, i, 1) != 0) return -1;
    if (t > seconds) add_sample(s, p, t), total = t;
    p->round_s = t;
    if (t < seconds / BRIEF) rounds = (int)fmin(seconds / BRIEF / fmax(t, 1e-6), MOST_ROUNDS);
    for (; total < (taken < LEAST_SAMPLES ? 3 * seconds : seconds); taken++) {
        if (sample_seconds(&t, p, post, i, rounds) != 0) return -1;
        total += t;
        p->round_s = t / rounds;
        add_sample(s, p, t);
    }
    return 0;
}

static int measure(double *rate, Profile *p, Post *post, int i) {
    Samples s = {.n = 0};
    if (sample(&s, p, post, i) != 0) return -1;
    *rate = usual_rate(&s);
    return 0;
}

/* A smaller op never takes longer than a larger one; where it seems to, something else was at work. */
static void smooth(Curve *c) {
    for (int i = c->n - 2; i >= 0; i--) c->rate[i] = fmax(c->rate[i], c->rate[i + 1] * c->size[i] / c->size[i + 1]);
}

/* Points up to `most`, as long as one is expected to be quick enough; twice, since trouble comes in bursts. */
static int measure_curve(Curve *curve, Profile *p, Post *post, const int *sizes, int n, int most) {
    Samples *all = xcalloc(n, sizeof *all);
    int status = 0;
    for (int i = 0; i < n && sizes[i] <= most && !status; i++) {
        if (i && p->round_s * sizes[i] / sizes[i - 1] > POINT_TIMES * p->size.seconds) break;
        status = sample(&all[i], p, post, i);
        curve->size[i] = sizes[i];
        curve->n = i + 1;
    }
    for (int i = 0; i < curve->n && !status; i++) status = sample(&all[i], p, post, i);
    for (int i = 0; i < curve->n && !status; i++) curve->rate[i] = usual_rate(&all[i]);
    free(all);
    return status;
}

__attribute__((format(printf, 2, 3))) static void say(Profile *p, const char *format, ...) {
    va_list args;
    if (!p->progress) return;
    va_start(args, format);
    vfprintf(p->progress, format, args);
    va_end(args);
    fputc('\n', p->progress);
    fflush(p->progress);
}

// ---------------------------------------------------------------------------------------------------------------
// What is measured
// ---------------------------------------------------------------------------------------------------------------

static void set_both(double stage[2], double value) { stage[0] = stage[1] = value; }

static int measure_links(Hardware *h, Profile *p) {
    double up, down;
    say(p, "measuring this machine: copies");
    if (measure(&up, p, post_all_up, 0) || measure(&down, p, post_all_down, 0)) return -1;
    set_both(h->ctog_bdw, up), set_both(h->gtoc_bdw, down);
    say(p, "  CPU to GPU %.2f GB/s, GPU to CPU %.2f GB/s", up / 1e9, down / 1e9);
    return 0;
}

/* Bytes/s of the whole file, or of as much as there is time for: *pieces of it. */
static int measure_pass(double *rate, Profile *p, Post *post, int *pieces) {
    double begin = p->device->now(p->device), took = 0;
    int n = 0;
    while (n < *pieces && took < DISK_TIMES * p->size.seconds) {
        Event last = {0, 0};
        for (int g = 0; g < GROUP && n < *pieces; g++) last = post(p, n++);
        if (p->device->wait(p->device, last, p->err) != 0) return -1;
        took = p->device->now(p->device) - begin;
    }
    *rate = (double)n * piece(p) / fmax(took, 1e-9);
    *pieces = n;
    return 0;
}

static int measure_disk(Hardware *h, Profile *p) {
    double read, write;
    int pieces = (int)(p->plan.offload_bytes / piece(p));
    say(p, "measuring this machine: disk");
    if (measure_pass(&write, p, post_write, &pieces) || measure_pass(&read, p, post_read, &pieces)) return -1;
    set_both(h->ctod_bdw, write), set_both(h->dtoc_bdw, read);
    say(p, "  write %.2f GB/s, read %.2f GB/s", write / 1e9, read / 1e9);
    return 0;
}

/* The curves, by what is posted for a point and where it goes. By rows and by tokens to attend to a smaller op never takes
 * longer (smooth); a prompt of twice the tokens has twice the pairs for each. */
typedef struct {
    const char *name;
    Post *post;
    size_t curve;
    bool by_rows, smooth;
} CurveOf;
#define AT(field) offsetof(Hardware, field)
static const CurveOf dense[] = {{"linear", post_linear, AT(mm_rows), true, true},
                                {"prompts", post_attend_prefill, AT(bmm_tokens[1]), false, false},
                                {"new tokens on the GPU", post_attend_gpu, AT(bmm_tokens[0]), false, true},
                                {"new tokens on the CPU", post_attend_cpu, AT(cpu_tokens), false, true}};
static const CurveOf packed[] = {{"linear", post_linear, AT(mm_packed), true, true},
                                 {"new tokens on the GPU", post_attend_gpu, AT(bmm_packed), false, true},
                                 {"new tokens on the CPU", post_attend_cpu, AT(cpu_packed), false, true}};

static int measure_curves(Hardware *h, Profile *p, const CurveOf *of, int n) {
    for (; n-- > 0; of++) {
        Curve *c = (Curve *)((char *)h + of->curve);
        int status = of->by_rows ? measure_curve(c, p, of->post, row_sizes, NROW_SIZES, p->size.rows)
                                 : measure_curve(c, p, of->post, token_sizes, NTOKEN_SIZES, p->size.tokens);
        if (status) return -1;
        if (of->smooth) smooth(c);
        say(p, "  %s: %.1f GFLOP/s at %.0f %s, %.1f at %.0f", of->name, c->rate[0] / 1e9, c->size[0],
            of->by_rows ? "rows" : "tokens", c->rate[c->n - 1] / 1e9, c->size[c->n - 1]);
    }
    return 0;
}

/* The single rates of Table 7 are those of the curves at the sizes of its experiments. */
static int measure_linear(Hardware *h, Profile *p) {
    enum { DECODE_ROWS = 16, PREFILL_ROWS = 1024 };
    double op_rate, act = type_bytes(p->device->act_type);
    say(p, "measuring this machine: linear");
    if (measure(&op_rate, p, post_tiny, 0)) return -1;
    h->op_s = p->op_s = 1 / op_rate;
    if (measure_curves(h, p, dense, 1)) return -1;
    h->mm_flops[0] = 2 * DECODE_ROWS / linear_seconds(h, false, DECODE_ROWS, 1, 1, act, false);
    h->mm_flops[1] = 2 * PREFILL_ROWS / linear_seconds(h, true, PREFILL_ROWS, 1, 1, act, false);
    return 0;
}

static int measure_attention(Hardware *h, Profile *p) {
    const double s = 512;
    say(p, "measuring this machine: attention");
    if (measure_curves(h, p, dense + 1, 3)) return -1;
    h->bmm_flops[1] = 2 * s * (s + 1) / attend_prefill_seconds(h, 1, s, 1, 4);
    h->bmm_flops[0] = 4 * s / attend_seconds(h, false, false, 1, s, 1, false);
    set_both(h->cpu_flops, 4 * s / attend_seconds(h, true, false, 1, s, 1, false));
    for (int i = 0; i < h->cpu_tokens.n; i++) h->cpu_bdw = fmax(h->cpu_bdw, h->cpu_tokens.rate[i]); /* a flop a byte */
    return 0;
}

/* The same with packed numbers. A GPU multiplies F16 alone, and unpacks first. */
static int measure_packed(Hardware *h, Profile *p) {
    const int skip = p->device->act_type != F32;
    say(p, "measuring this machine: packed weights and cache");
    p->quant = usual;
    int status = measure_curves(h, p, packed + skip, 3 - skip);
    p->quant.bits = 0;
    return status;
}

/* Seconds by which products take longer while the weights of the next ones are copied beside them, for each byte. As in a
 * layer: `each` rounds of products wait for the copy that was made beside those before. */
static int sample_lost(double *lost, Profile *p, Post *beside, int i, int copies, int each) {
    double alone, begin, bytes = 0;
    Event last = {0, 0}, next = {0, 0};
    if (sample_seconds(&alone, p, post_linear, i, copies * each) != 0) return -1;
    begin = p->device->now(p->device);
    for (int c = 0; c < copies; c++) {
        p->copied = next, p->work = 0;
        next = beside(p, c);
        bytes += p->work;
        for (int r = 0; r < each; r++) last = post_linear(p, i);
    }
    p->copied = (Event){0, 0};
    if (p->device->wait(p->device, last, p->err) != 0) return -1;
    *lost = (p->device->now(p->device) - begin - alone) / bytes;
    return p->device->wait(p->device, next, p->err);
}

/* So many products beside each copy that it alone would take half as long. */
static int measure_lost(double *core_s, Profile *p, const Curve *rows, Post *beside, double rate) {
    double lost[PAIRS], t, most = 2 * p->size.seconds, copy = piece(p) / rate, begin = p->device->now(p->device);
    int i = 0, n = 0;
    while (i + 1 < rows->n && row_sizes[i] < CONTENTION_ROWS) i++;
    if (sample_seconds(&t, p, post_linear, i, 1) != 0) return -1;
    int each = imax(1, (int)ceil(2 * copy / t)), copies = imax(2, (int)(most / (each * t)));
    do {
        if (sample_lost(&lost[n++], p, beside, i, copies, each) != 0) return -1;
    } while (n < PAIRS && p->device->now(p->device) - begin < 4 * PAIRS * most);
    *core_s = fmax(median(lost, n), 0);
    return 0;
}

static int measure_shared_cores(Hardware *h, Profile *p) {
    say(p, "measuring this machine: products beside copies");
    h->shared_cores = true;
    p->span = p->size.cold / 2, p->at = 0;
    if (measure_lost(&h->copy_core_s, p, &h->mm_rows, post_up, h->ctog_bdw[0]) ||
        measure_lost(&h->disk_core_s, p, &h->mm_rows, post_read, h->dtoc_bdw[0]))
        return -1;
    p->span = p->size.cold;
    say(p, "  lost for a GB copied %.3f s, read from disk %.3f s", 1e9 * h->copy_core_s, 1e9 * h->disk_core_s);
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------
// The device to measure on
// ---------------------------------------------------------------------------------------------------------------

static size_t round_up(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

/* The largest layer that is measured within a minute, or the model's own where that is smaller. Each half of the cold
 * memory is more than the last cache holds, so that going round in it finds nothing there. */
ProfileSize profile_size(const Gpu *gpu, const OptConfig *config) {
    ProfileSize size = {.h1 = 2048, .h2 = 8192, .nh = 32, .nseq = 16, .rows = 1024, .tokens = 2048, .seconds = .1};
    size.cold = size.disk = (size_t)256 << 20;
    if (gpu) size.h1 *= 2, size.h2 *= 2, size.nseq *= 2, size.cold *= 4;
    if (config && config->h1 <= size.h1 && config->h2 <= size.h2)
        size.h1 = config->h1, size.h2 = config->h2, size.nh = config->nh;
    size_t most = (size_t)1 << 30;
    long cache = 0;
#ifdef _SC_LEVEL3_CACHE_SIZE
    cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
    if (cache > 0 && 4 * (size_t)cache > size.cold)
        size.cold = 4 * (size_t)cache < most ? round_up(4 * (size_t)cache) : most;
    return size;
}

/* The file: all that is asked for, or half of what the disk has room for. */
static size_t disk_bytes(size_t asked, size_t capacity) {
    size_t bytes = capacity / 2 < asked ? capacity / 2 : asked, least = asked < LEAST_DISK ? asked : LEAST_DISK;
    return bytes < least ? least : bytes;
}

/* All of a tier is one region. */
static void add_region(Plan *plan, Tier tier, size_t bytes) {
    plan->region[RESTING_WEIGHTS][tier] = (Region){.name = "profile", .remedy = "", .type = U8, .slots = 1, .bytes = bytes};
    plan->total[tier] = bytes;
}

/* The same on both upper tiers. */
static void plan_profile(Profile *p, const size_t capacity[NTIERS], Type act) {
    const ProfileSize *s = &p->size;
    size_t each = (size_t)imax(s->rows * s->h2, s->tokens * s->h1) * type_bytes(act);
    size_t row = row_bytes(s, usual) < row_bytes(s, (Quant){0}) ? row_bytes(s, usual) : row_bytes(s, (Quant){0});
    size_t npages = s->cold / 2 / (PAGE_TOKENS * row) + 1, starts = (size_t)NTOKEN_SIZES * (s->tokens + 1 + s->nseq);
    p->x = s->cold;
    p->y = p->x + round_up(each);
    p->tables = p->y + round_up(each);
    p->starts = p->tables + round_up(npages * 4);
    for (int t = TIER_GPU; t <= TIER_CPU; t++) {
        add_region(&p->plan, t, p->starts + round_up(starts * 4));
        p->plan.region[INDEX_TABLES][t].offset = p->tables;
    }
    p->plan.act_type = act;
    p->plan.offload_bytes = disk_bytes(s->disk, capacity[TIER_DISK]) / piece(p) * piece(p);
    add_region(&p->plan, TIER_DISK, p->plan.offload_bytes);
    p->span = s->cold;
}

/* The smaller where the GPU has less room. */
static void fit_gpu(ProfileSize *s, Gpu *gpu) {
    size_t used = gpu->in_use(gpu) + gpu->spare, room = used < gpu->total ? gpu->total - used : 0;
    while (s->h1 > 512 && s->cold + (size_t)4 * s->rows * s->h2 + ((size_t)32 << 20) > room)
        s->h1 /= 2, s->h2 /= 2, s->nh /= 2, s->cold /= 2;
}

/* Small numbers without an order, of which no sum overflows. */
static void fill(Profile *p, Tensor all, const void *pattern, size_t n) {
    size_t count = (size_t)all.rows * all.cols;
    for (size_t first = 0; first < count; first += n)
        p->device->upload(p->device, all, first, pattern, count - first < n ? count - first : n);
}

static void fill_tables(Profile *p, Tier tier) {
    int npages = (int)((p->starts - p->tables) / 4), stride = p->size.tokens + 1, nseq = p->size.nseq;
    int n = NTOKEN_SIZES * (stride + nseq);
    int32_t *index = xcalloc(imax(npages, n), sizeof *index);
    for (int i = 0; i < npages; i++) index[i] = i;
    fill(p, matrix(tier, I32, p->tables, 1, npages), index, npages);
    for (int i = 0; i < NTOKEN_SIZES; i++) {
        for (int r = 0; r * token_sizes[i] <= p->size.tokens; r++) index[i * stride + r] = r * token_sizes[i];
        for (int r = 0; r < nseq; r++) index[NTOKEN_SIZES * stride + i * nseq + r] = token_sizes[i];
    }
    fill(p, matrix(tier, I32, p->starts, 1, n), index, n);
    free(index);
}

static void fill_memory(Profile *p) {
    enum { N = 1 << 20 };
    float *f = xcalloc(N, sizeof *f);
    f16 *h = xcalloc(N, sizeof *h);
    Type act = p->device->act_type;
    size_t elements = (p->tables - p->x) / type_bytes(act);
    for (uint32_t i = 0; i < N; i++) {
        f[i] = (float)((i * 2654435761u >> 8 & 0xffff) / 65536.0 - 0.5) / 8;
        h[i] = f32_to_f16(f[i]);
    }
    for (int t = TIER_GPU; t <= TIER_CPU; t++) {
        fill(p, matrix(t, F16, 0, (int)(p->size.cold / 4096), 2048), h, N);
        fill(p, matrix(t, act, p->x, (int)(elements / 1024), 1024), act == F32 ? (void *)f : h, N);
        fill_tables(p, t);
    }
    free(f), free(h);
}

// ---------------------------------------------------------------------------------------------------------------
// The machine
// ---------------------------------------------------------------------------------------------------------------

/* "model name" of /proc/cpuinfo, or the kind of machine. */
static void processor(char *name, size_t size) {
    FILE *f = fopen("/proc/cpuinfo", "r");
    char line[300], *colon;
    struct utsname machine;
    name[0] = 0;
    while (f && !name[0] && fgets(line, sizeof line, f))
        if (!strncmp(line, "model name", 10) && (colon = strchr(line, ':')))
            snprintf(name, size, "%s", colon + 1 + strspn(colon + 1, " \t"));
    if (f) fclose(f);
    if (!name[0]) snprintf(name, size, "%s", uname(&machine) ? "unknown processor" : machine.machine);
    name[strcspn(name, "\n")] = 0;
    for (char *c = name; *c; c++)
        if (*c < ' ' || *c > '~') *c = '?';
}

static void name_machine(char *name, size_t size, const Gpu *gpu, int threads) {
    char cpu[60];
    processor(cpu, sizeof cpu);
    if (gpu)
        snprintf(name, size, "%.40s; %.38s, %d threads", gpu->name, cpu, threads);
    else
        snprintf(name, size, "%s, %d thread%s, host device", cpu, threads, threads > 1 ? "s" : "");
}

static void set_capacities(Hardware *h, const size_t capacity[NTIERS]) {
    double *const to[] = {&h->gmem, &h->cmem, &h->nmem};
    for (int t = 0; t < NTIERS; t++) *to[t] = fmin(fmax((double)capacity[t], 1), 1e18);
}

static int measure_all(Hardware *h, Profile *p) {
    double bdw;
    bool host = p->device->act_type == F32;
    if (measure_links(h, p) || measure_disk(h, p) || measure_linear(h, p) || measure_attention(h, p) ||
        measure_packed(h, p))
        return -1;
    if (host && measure_shared_cores(h, p)) return -1;
    p->op_s = h->op_s;
    if (measure(&bdw, p, post_layernorm, 0)) return -1; /* the last: it overwrites weights */
    h->gpu_bdw = bdw;
    return 0;
}

int profile_measure(Hardware *hardware, const ProfileSize *size, Gpu *gpu, const char *offload_dir, int threads,
                    const size_t capacity[NTIERS], FILE *progress, Error *err) {
    Profile *p = xcalloc(1, sizeof *p);
    Hardware measured = {.name = ""};
    threads = host_set_threads(threads);
    *p = (Profile){.size = *size, .progress = progress, .err = err};
    if (gpu) fit_gpu(&p->size, gpu);
    plan_profile(p, capacity, gpu ? F16 : F32);
    name_machine(measured.name, sizeof measured.name, gpu, threads);
    set_capacities(&measured, capacity);
    p->device =
        gpu ? cuda_open(gpu, &p->plan, &p->none, offload_dir, err) : host_open(&p->plan, &p->none, offload_dir, err);
    if (p->device) fill_memory(p);
    int status = p->device ? measure_all(&measured, p) : -1;
    if (p->device) p->device->close(p->device);
    if (status == 0) *hardware = measured;
    free(p);
    return status;
}

// ---------------------------------------------------------------------------------------------------------------
// As a file
// ---------------------------------------------------------------------------------------------------------------

void profile_write(const Hardware *hardware, FILE *out) {
    static const char *const how[][2] = {
        {"gmem", "capacity of the GPU tier at that time"},
        {"cmem", "capacity of the CPU tier at that time"},
        {"nmem", "capacity of the disk tier at that time"},
        {"ctog_bdw", "copies of 8 MiB from the CPU tier to the GPU tier, out of cold memory"},
        {"gtoc_bdw", "copies of 8 MiB from the GPU tier to the CPU tier, out of cold memory"},
        {"dtoc_bdw", "the offload file read back in pieces of 8 MiB, past the page cache"},
        {"ctod_bdw", "the offload file written in pieces of 8 MiB, each until it is on the disk"},
        {"mm_flops", "the curve mm_rows at 1024 rows (prefill) and at 16 (generation)"},
        {"bmm_flops", "the curves bmm_tokens_p and bmm_tokens_g at 512 tokens"},
        {"cpu_flops", "the curve cpu_tokens at 512 tokens"},
        {"gpu_bdw", "layernorm: bytes read and written"},
        {"cpu_bdw", "the best of cpu_tokens, which does a flop for each byte of K and V that it reads"},
        {"op_s", "a chain of layernorms of 16 numbers, from lane to lane"},
        {"copy_core_s", "linear of 16 rows beside copies to the GPU tier: seconds lost over bytes copied"},
        {"disk_core_s", "linear of 16 rows beside reads of the offload file: seconds lost over bytes read"},
        {"shared_cores", "the host device computes and copies on the same cores"},
        {"mm_rows", "linear of a layer's three shapes with cold weights"},
        {"bmm_tokens_p", "attend_prefill of prompts of so many tokens"},
        {"bmm_tokens_g", "attend over cold pages on the GPU tier"},
        {"cpu_tokens", "attend over cold pages on the CPU tier"},
        {"mm_packed", "as mm_rows, weights in 4-bit groups of 64"},
        {"bmm_packed", "as bmm_tokens_g, pages in 4-bit groups of 64"},
        {"cpu_packed", "as cpu_tokens, pages in 4-bit groups of 64"},
    };
    char date[80];
    time_t now = time(NULL);
    struct tm day;
    cJSON *sources = cJSON_CreateObject();
    strftime(date, sizeof date, "measured by flexgen profile on %Y-%m-%d", localtime_r(&now, &day));
    cJSON_AddStringToObject(sources, "name", date);
    for (size_t i = 0; i < sizeof how / sizeof *how; i++) cJSON_AddStringToObject(sources, how[i][0], how[i][1]);
    hardware_write(hardware, sources, out);
    cJSON_Delete(sources);
}

/* FNV-1a. */
static uint64_t hash_text(const char *s) {
    uint64_t h = 14695981039346656037u;
    for (; *s; s++) h = (h ^ (unsigned char)*s) * 1099511628211u;
    return h;
}

/* The directory of the cache; 0: there is none. */
static int cache_dir(char *dir, size_t size) {
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    int n = cache && cache[0] == '/' ? snprintf(dir, size, "%s", cache)
            : home && home[0] == '/' ? snprintf(dir, size, "%s/.cache", home)
                                     : 0;
    return n < (int)size ? n : 0;
}

void profile_path(char *path, size_t size, const ProfileSize *shapes, const Gpu *gpu, const char *offload_dir,
                  int threads) {
    char dir[4000], cpu[200], key[800];
    struct stat disk = {.st_dev = 0};
    struct statfs fs = {.f_type = 0};
    path[0] = 0;
    if (!cache_dir(dir, sizeof dir) || stat(offload_dir, &disk) || statfs(offload_dir, &fs)) return;
    processor(cpu, sizeof cpu);
    snprintf(key, sizeof key, "%d|%d|%d|%d|%s|%d|%s|%s|%llx|%llx", PROFILE_VERSION, shapes->h1, shapes->h2, shapes->nh, cpu,
             host_set_threads(threads), host_isa(), gpu ? gpu->name : "", (unsigned long long)disk.st_dev,
             (unsigned long long)fs.f_type);
    if (snprintf(path, size, "%s/flexgen/hardware-%016llx.json", dir, (unsigned long long)hash_text(key)) >= (int)size)
        path[0] = 0;
}

/* All of it under another name, then renamed: nobody sees a half. */
static void write_file(const char *path, const Hardware *hardware) {
    char part[4200];
    snprintf(part, sizeof part, "%s.XXXXXX", path);
    int fd = mkstemp(part);
    FILE *f = fd < 0 ? NULL : fdopen(fd, "w");
    if (!f) return;
    profile_write(hardware, f);
    bool bad = fflush(f) || ferror(f);
    if (fclose(f) || bad || rename(part, path)) unlink(part);
}

void profile_keep(const Hardware *hardware, const ProfileSize *size, const Gpu *gpu, const char *offload_dir, int threads) {
    char path[4100], dir[4100];
    profile_path(path, sizeof path, size, gpu, offload_dir, threads);
    if (!path[0]) return;
    cache_dir(dir, sizeof dir - 10);
    mkdir(dir, 0700); /* there already, mostly */
    strcat(dir, "/flexgen");
    mkdir(dir, 0700);
    write_file(path, hardware);
}

int profile_machine(Hardware *hardware, const ProfileSize *size, Gpu *gpu, const char *offload_dir, int threads,
                    const size_t capacity[NTIERS], FILE *progress, Error *err) {
    char path[4100];
    Error damaged;
    profile_path(path, sizeof path, size, gpu, offload_dir, threads);
    if (path[0] && access(path, R_OK) == 0 && hardware_read(hardware, path, &damaged) == 0) {
        set_capacities(hardware, capacity);
        return 0;
    }
    if (profile_measure(hardware, size, gpu, offload_dir, threads, capacity, progress, err) != 0) return -1;
    profile_keep(hardware, size, gpu, offload_dir, threads);
    return 0;
}
