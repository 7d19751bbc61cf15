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
 * user's cache under a name that stands for all that it depends on. Read next: runtime.c, the cost
 * model that these numbers are for. */
#include <errno.h>
#include <math.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include "cost/cost.h"

enum {
    PROFILE_VERSION = 5, /* counts the changes of what is measured, or of kernels and lanes, that make older files wrong */
    PAGE_TOKENS = 16,    /* of a KV page, as in a run */
    PIECE = 8 << 20,     /* bytes of a copy, about a matrix of a layer */
    AT_ONCE = 4,         /* pieces that are on their way to or from the disk at once */
    LEAST_DISK = 2 * AT_ONCE * PIECE,
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

static const int row_sizes[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024}, token_sizes[] = {16, 64, 256, 1024, 2048};
enum { NROW_SIZES = sizeof row_sizes / sizeof *row_sizes, NTOKEN_SIZES = sizeof token_sizes / sizeof *token_sizes };

/* A device with memory to work on. Offsets are the same on the GPU's and the CPU's tier: cold memory, the inputs and the
 * outputs of a product, index tables. */
typedef struct {
    ProfileSize size;
    Device *device;
    Type act; /* the device's */
    Plan plan;
    Checkpoint none; /* the device's, without files */
    size_t x, y, tables, starts;
    bool packed;           /* the numbers in the cold memory are; else F16 */
    size_t span;           /* of the cold memory that weights are read from */
    size_t at;             /* in it: where the next op begins */
    Event product, copied; /* the newest, which the next one waits for; a copy that it waits for besides */
    double op_s;
    double work; /* what the ops posted since the last sample do: flops, or bytes */
    int ops;     /* their number */
    double round_s;
    FILE *progress;
    Error *err;
} Profile;

/* What is measured. post posts one round of it, at point i of a curve, and adds to work and ops; a copy has a lane and goes
 * from tier to tier, attention has a lane and a tier. */
typedef struct Work {
    const char *name; /* of a curve */
    Event (*post)(Profile *, const struct Work *, int i);
    Lane lane;
    Tier to, from;
} Work;

// ---------------------------------------------------------------------------------------------------------------
// Views and ops
// ---------------------------------------------------------------------------------------------------------------

static Tensor matrix(Tier tier, Type type, size_t offset, int rows, int cols) {
    return (Tensor){.tier = tier, .type = type, .offset = offset, .rows = rows, .cols = cols, .ld = (size_t)cols};
}

/* Posts an op that does so much. */
static Event post_op(Profile *p, const Op *op, double work) {
    p->work += work, p->ops++;
    return p->device->post(p->device, op);
}

/* Outputs; inputs, which only products have, lie at p->x. */
static Tensor y_of(const Profile *p, Tier tier, int rows, int cols) { return matrix(tier, p->act, p->y, rows, cols); }

/* Cold memory: numbers (rows, cols), or where they are packed, rows of so many bytes. */
static Tensor numbers(const Profile *p, Tier tier, size_t offset, int rows, int cols, size_t packed) {
    return p->packed ? matrix(tier, U8, offset, rows, (int)packed) : matrix(tier, F16, offset, rows, cols);
}

/* The next bytes of the first `span` of cold memory that lie together. */
static size_t next_cold(Profile *p, size_t span, size_t bytes) {
    CHECK(bytes <= span);
    if (p->at + bytes > span) p->at = 0;
    p->at += bytes;
    return p->at - bytes;
}

static Event post_product(Profile *p, Lane lane, int m, int n, int k) {
    const size_t size = p->packed ? quant_matrix_bytes(n, k) : (size_t)n * k * sizeof(f16);
    const int rows = p->packed ? n / GROUP : n;
    const Tensor w = numbers(p, TIER_GPU, next_cold(p, p->span, size), rows, k, size / rows);
    Op op = {.lane = lane, .kind = OTHER, .nafter = 2, .after = {p->product, p->copied}};
    op_linear(&op, y_of(p, TIER_GPU, m, n), matrix(TIER_GPU, p->act, p->x, m, k), w, (Tensor){0}, (Tensor){0}, false);
    return p->product = post_op(p, &op, 2.0 * m * n * k);
}

/* A layer's products, from lane to lane as in a layer. */
static Event post_linear(Profile *p, const Work *w, int i) {
    (void)w;
    post_product(p, PROJECT, row_sizes[i], 3 * p->size.h1, p->size.h1);
    post_product(p, FINISH, row_sizes[i], p->size.h1, p->size.h1);
    post_product(p, FINISH, row_sizes[i], p->size.h2, p->size.h1);
    return post_product(p, FINISH, row_sizes[i], p->size.h1, p->size.h2);
}

/* Each point has a row of indices: where prompts start, and the lengths of sequences. */
static int index_row(const Profile *p) { return p->size.tokens + 1 + p->size.nseq; }

/* As many prompts as make up the longest. */
static Event post_attend_prefill(Profile *p, const Work *w, int i) {
    const int s = token_sizes[i], nseq = p->size.tokens / s, rows = nseq * s, h1 = p->size.h1;
    const size_t at = next_cold(p, p->span, (size_t)rows * 3 * h1 * sizeof(f16));
    const Tensor qkv = matrix(w->to, F16, at, rows, 3 * h1);
    const Tensor start = matrix(w->to, I32, p->starts + (size_t)i * index_row(p) * 4, 1, nseq + 1);
    Op op = {.lane = w->lane, .kind = OTHER, .prefill = true};
    op_attend_prefill(&op, y_of(p, w->to, rows, h1), tensor_cols(qkv, 0, h1), tensor_cols(qkv, h1, 2 * h1), start,
                      p->size.nh);
    return post_op(p, &op, 4.0 * h1 * nseq * s * (s + 1) / 2);
}

/* Bytes of a token's K, or V. */
static size_t kv_bytes(const ProfileSize *s, bool packed) {
    return packed ? s->nh * quant_bytes(s->h1 / s->nh) : s->h1 * sizeof(f16);
}

/* K in the first half of the cold memory, V in the second. Page tables are all one list of pages in order, from another
 * page on each time. */
static Event post_attend(Profile *p, const Work *w, int i) {
    const int len = token_sizes[i], h1 = p->size.h1, pages_each = pages_for(len, PAGE_TOKENS);
    const size_t row = kv_bytes(&p->size, p->packed), half = p->span / 2, page = PAGE_TOKENS * row;
    const int npages = (int)(half / page), nseq = imin(p->size.nseq, npages / pages_each);
    const size_t first = next_cold(p, half, nseq * pages_each * page) / page;
    const size_t lengths = (size_t)i * index_row(p) + p->size.tokens + 1;
    Op op = {.lane = w->lane, .kind = OTHER};
    CHECK((first + (size_t)nseq * pages_each) * 4 <= p->starts - p->tables);
    const PageTable t = {.k = numbers(p, w->to, 0, npages * PAGE_TOKENS, h1, row),
                         .v = numbers(p, w->to, half, npages * PAGE_TOKENS, h1, row),
                         .pages = matrix(w->to, I32, p->tables + first * 4, nseq, pages_each),
                         .len = matrix(w->to, I32, p->starts + lengths * 4, 1, nseq),
                         .page_tokens = PAGE_TOKENS,
                         .nh = p->size.nh};
    op_attend(&op, y_of(p, w->to, nseq, h1), matrix(w->to, F16, 0, nseq, h1), &t);
    return post_op(p, &op, 4.0 * h1 * nseq * len);
}

static size_t piece(const Profile *p) { return p->size.cold / 2 < PIECE ? p->size.cold / 2 : PIECE; }

/* Piece i of a tier; towards the GPU in one half of the cold memory, away from it in the other, so that both may run beside
 * a product that reads the first. */
static Tensor piece_of(const Profile *p, const Work *w, Tier tier, int i) {
    const size_t bytes = piece(p), half = p->size.cold / 2,
                 all = tier == TIER_DISK ? p->plan.offload_bytes : half / bytes * bytes;
    const size_t first = tier != TIER_DISK && w->to < w->from ? half : 0;
    return matrix(tier, F16, first + (size_t)i * bytes % all, 1, (int)(bytes / sizeof(f16)));
}

static Event post_copy(Profile *p, const Work *w, int i) {
    Op op = {.lane = w->lane, .kind = OTHER, .nafter = 1, .after = {p->product}};
    const Move move = {piece_of(p, w, w->to, i), piece_of(p, w, w->from, i)};
    return post_op(p, op_copy(&op, &move, 1), (double)piece(p));
}

/* All of one half. */
static Event post_copies(Profile *p, const Work *w, int i) {
    Event last = {0, 0};
    for (i = 0; i < (int)(p->size.cold / 2 / piece(p)); i++) last = post_copy(p, w, i);
    return last;
}

/* Half of the cold memory through layernorm into the other; what it wrote is no weights any more. */
static Event post_layernorm(Profile *p, const Work *w, int i) {
    const size_t row = p->size.h1 * type_bytes(p->act), half = p->size.cold / 2;
    const int h1 = p->size.h1, rows = (int)(half / row) - 1;
    const Tensor one = matrix(TIER_GPU, F16, 0, 1, h1); /* a row at the beginning, and x behind it */
    Op op = {.lane = FINISH, .kind = OTHER};
    (void)w, (void)i;
    op_layernorm(&op, matrix(TIER_GPU, p->act, half, rows, h1), matrix(TIER_GPU, p->act, row, rows, h1), one, one);
    return post_op(p, &op, 2.0 * rows * row);
}

static Event post_tiny(Profile *p, const Work *w, int i) {
    const Tensor row = y_of(p, TIER_GPU, 1, 16), one = matrix(TIER_GPU, F16, 0, 1, 16);
    Event last = {PROJECT, 0};
    (void)w, (void)i;
    for (int n = 0; n < TINY; n++) {
        Op op = {.lane = n % 2 ? FINISH : PROJECT, .kind = OTHER, .nafter = n > 0, .after = {last}};
        last = p->device->post(p->device, op_layernorm(&op, row, row, one, one));
    }
    p->work += TINY;
    return last;
}

static const Work ctog = {"", post_copies, W_LOAD, TIER_GPU, TIER_CPU}, gtoc = {"", post_copies, STORE, TIER_CPU, TIER_GPU};
static const Work dtoc = {"", post_copy, W_READ, TIER_CPU, TIER_DISK}, ctod = {"", post_copy, D_WRITE, TIER_DISK, TIER_CPU};
static const Work chain = {.post = post_tiny}, layernorm = {.post = post_layernorm};
static const Work linear = {.name = "linear", .post = post_linear};
static const Work prompts = {.name = "prompts", .post = post_attend_prefill, .lane = FINISH, .to = TIER_GPU};
static const Work on_gpu = {.name = "new tokens on the GPU", .post = post_attend, .lane = FINISH, .to = TIER_GPU};
static const Work on_cpu = {.name = "new tokens on the CPU", .post = post_attend, .lane = ATTEND, .to = TIER_CPU};

// ---------------------------------------------------------------------------------------------------------------
// Sampling
// ---------------------------------------------------------------------------------------------------------------

static int compare(const void *a, const void *b) { return *(const double *)a < *(const double *)b ? -1 : 1; }

static double median(double *sample, int n) {
    qsort(sample, n, sizeof *sample, compare);
    return n % 2 ? sample[n / 2] : (sample[n / 2 - 1] + sample[n / 2]) / 2;
}

/* Posts rounds and waits for the last: their seconds. */
static int sample_seconds(double *seconds, Profile *p, const Work *w, int i, int rounds) {
    Event last = {0, 0};
    p->work = 0, p->ops = 0;
    double begin = p->device->now(p->device);
    for (int r = 0; r < rounds; r++) last = w->post(p, w, i);
    if (p->device->wait(p->device, last, p->err) != 0) return -1;
    *seconds = p->device->now(p->device) - begin;
    p->round_s = *seconds / rounds;
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

/* Takes samples for some time. The first is not counted if it is short: caches, threads and a GPU's choice of kernels are
 * new. */
static int sample(Samples *s, Profile *p, const Work *w, int i) {
    double seconds = p->size.seconds, t, total = 0;
    int taken = 0, rounds = 1;
    if (sample_seconds(&t, p, w, i, 1) != 0) return -1;
    if (t > seconds) add_sample(s, p, t), total = t;
    if (t < seconds / BRIEF) rounds = (int)fmin(seconds / BRIEF / fmax(t, 1e-6), MOST_ROUNDS);
    for (; total < (taken < LEAST_SAMPLES ? 3 * seconds : seconds); taken++, total += t) {
        if (sample_seconds(&t, p, w, i, rounds) != 0) return -1;
        add_sample(s, p, t);
    }
    return 0;
}

static int measure_rate(double *rate, Profile *p, const Work *w) {
    Samples s = {.n = 0};
    if (sample(&s, p, w, 0) != 0) return -1;
    *rate = median(s.rate, s.n);
    return 0;
}

__attribute__((format(printf, 2, 3))) static void tell(Profile *p, const char *format, ...) {
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

static void set_both(double phase[2], double value) { phase[0] = phase[1] = value; }

static int measure_links(Hardware *h, Profile *p) {
    double up, down;
    if (measure_rate(&up, p, &ctog) || measure_rate(&down, p, &gtoc)) return -1;
    set_both(h->ctog_bdw, up), set_both(h->gtoc_bdw, down);
    tell(p, "  CPU to GPU %.2f GB/s, GPU to CPU %.2f GB/s", up / 1e9, down / 1e9);
    return 0;
}

/* Bytes/s of the whole file, or of as much as there is time for: *pieces of it. */
static int measure_pass(double *rate, Profile *p, const Work *w, int *pieces) {
    double begin = p->device->now(p->device), took = 0;
    int n = 0;
    while (n < *pieces && took < DISK_TIMES * p->size.seconds) {
        Event last = {0, 0};
        for (int g = 0; g < AT_ONCE && n < *pieces; g++) last = post_copy(p, w, n++);
        if (p->device->wait(p->device, last, p->err) != 0) return -1;
        took = p->device->now(p->device) - begin;
    }
    *rate = (double)n * piece(p) / fmax(took, 1e-9);
    *pieces = n;
    return 0;
}

static int measure_disk(Hardware *h, Profile *p) {
    double read, write;
    set_both(h->ctod_bdw, NO_DISK), set_both(h->dtoc_bdw, NO_DISK);
    if (!p->plan.offload_bytes) return 0;
    int pieces = (int)(p->plan.offload_bytes / piece(p));
    if (measure_pass(&write, p, &ctod, &pieces) || measure_pass(&read, p, &dtoc, &pieces)) return -1;
    set_both(h->ctod_bdw, write), set_both(h->dtoc_bdw, read);
    tell(p, "  write %.2f GB/s, read %.2f GB/s", write / 1e9, read / 1e9);
    return 0;
}

/* Points as far as the profile's size goes, as long as one is expected to be quick enough; twice, since trouble comes in
 * bursts. By rows and by tokens to attend to a smaller op never takes longer than a larger one: where it seems to,
 * something else was at work. (A prompt of twice the tokens has twice the pairs for each.) */
static int measure_curve(Curve *c, Profile *p, const Work *w) {
    const bool by_rows = w == &linear;
    const int *sizes = by_rows ? row_sizes : token_sizes, n = by_rows ? NROW_SIZES : NTOKEN_SIZES;
    Samples all[MAX_POINTS] = {{.n = 0}};
    for (int i = 0; i < n && sizes[i] <= (by_rows ? p->size.rows : p->size.tokens); i++) {
        if (i && p->round_s * sizes[i] / sizes[i - 1] > POINT_TIMES * p->size.seconds) break;
        if (sample(&all[i], p, w, i) != 0) return -1;
        c->size[i] = sizes[i], c->n = i + 1;
    }
    for (int i = 0; i < c->n; i++) {
        if (sample(&all[i], p, w, i) != 0) return -1;
        c->rate[i] = median(all[i].rate, all[i].n);
    }
    for (int i = c->n - 2; i >= 0 && w != &prompts; i--)
        c->rate[i] = fmax(c->rate[i], c->rate[i + 1] * c->size[i] / c->size[i + 1]);
    tell(p, "  %s: %.1f GFLOP/s at %.0f %s, %.1f at %.0f", w->name, c->rate[0] / 1e9, c->size[0],
         by_rows ? "rows" : "tokens", c->rate[c->n - 1] / 1e9, c->size[c->n - 1]);
    return 0;
}

/* The single rates of Table 7 are those of the curves at the sizes of its experiments. */
static int measure_linear(Hardware *h, Profile *p) {
    enum { DECODE_ROWS = 16, PREFILL_ROWS = 1024 };
    double op_rate, act = type_bytes(p->act);
    if (measure_rate(&op_rate, p, &chain)) return -1;
    h->op_s = p->op_s = 1 / op_rate;
    if (measure_curve(&h->mm_rows, p, &linear)) return -1;
    h->mm_flops[0] = 2 * DECODE_ROWS / linear_seconds(h, false, DECODE_ROWS, 1, 1, act, false);
    h->mm_flops[1] = 2 * PREFILL_ROWS / linear_seconds(h, true, PREFILL_ROWS, 1, 1, act, false);
    return 0;
}

static int measure_attention(Hardware *h, Profile *p) {
    const double s = 512;
    if (measure_curve(&h->bmm_tokens[1], p, &prompts) || measure_curve(&h->bmm_tokens[0], p, &on_gpu) ||
        measure_curve(&h->cpu_tokens, p, &on_cpu))
        return -1;
    h->bmm_flops[1] = 2 * s * (s + 1) / attend_prefill_seconds(h, 1, s, 1, 4);
    h->bmm_flops[0] = 4 * s / attend_seconds(h, false, false, 1, s, 1, false);
    set_both(h->cpu_flops, 4 * s / attend_seconds(h, true, false, 1, s, 1, false));
    for (int i = 0; i < h->cpu_tokens.n; i++) h->cpu_bdw = fmax(h->cpu_bdw, h->cpu_tokens.rate[i]); /* a flop a byte */
    return 0;
}

/* The same with packed numbers; of products on a GPU, as far as it takes packed weights as they lie. */
static int measure_packed(Hardware *h, Profile *p) {
    const int rows = p->size.rows;
    if (p->size.h1 % GROUP || p->size.h2 % GROUP || p->size.h1 / p->size.nh % 16) return 0; /* nor is it ever packed */
    p->packed = true;
    if (p->act == F16) p->size.rows = imin(rows, PACKED_ROWS);
    if (measure_curve(&h->mm_packed, p, &linear)) return -1;
    p->size.rows = rows;
    if (measure_curve(&h->bmm_packed, p, &on_gpu) || measure_curve(&h->cpu_packed, p, &on_cpu)) return -1;
    p->packed = false;
    return 0;
}

/* Seconds by which products take longer while the weights of the next ones are copied beside them, for each byte. As in a
 * layer: `each` rounds of products wait for the copy that was made beside those before. */
static int sample_lost(double *lost, Profile *p, const Work *beside, int i, int copies, int each) {
    double alone, begin, bytes = 0;
    Event last = {0, 0}, next = {0, 0};
    if (sample_seconds(&alone, p, &linear, i, copies * each) != 0) return -1;
    begin = p->device->now(p->device);
    for (int c = 0; c < copies; c++) {
        p->copied = next, p->work = 0;
        next = post_copy(p, beside, c);
        bytes += p->work;
        for (int r = 0; r < each; r++) last = post_linear(p, &linear, i);
    }
    p->copied = (Event){0, 0};
    if (p->device->wait(p->device, last, p->err) != 0) return -1;
    *lost = (p->device->now(p->device) - begin - alone) / bytes;
    return p->device->wait(p->device, next, p->err);
}

/* So many products beside each copy that it alone would take half as long. */
static int measure_lost(double *core_s, Profile *p, const Curve *rows, const Work *beside, double rate) {
    double lost[PAIRS], t, most = 2 * p->size.seconds, copy = piece(p) / rate, begin = p->device->now(p->device);
    int i = 0, n = 0;
    while (i + 1 < rows->n && row_sizes[i] < CONTENTION_ROWS) i++;
    if (sample_seconds(&t, p, &linear, i, 1) != 0) return -1;
    int each = imax(1, (int)ceil(2 * copy / t)), copies = imax(2, (int)(most / (each * t)));
    do {
        if (sample_lost(&lost[n++], p, beside, i, copies, each) != 0) return -1;
    } while (n < PAIRS && p->device->now(p->device) - begin < 4 * PAIRS * most);
    *core_s = fmax(median(lost, n), 0);
    return 0;
}

static int measure_shared_cores(Hardware *h, Profile *p) {
    h->shared_cores = true;
    p->span = p->size.cold / 2, p->at = 0;
    if (measure_lost(&h->copy_core_s, p, &h->mm_rows, &ctog, h->ctog_bdw[0])) return -1;
    if (p->plan.offload_bytes && measure_lost(&h->disk_core_s, p, &h->mm_rows, &dtoc, h->dtoc_bdw[0])) return -1;
    p->span = p->size.cold;
    tell(p, "  lost for a GB copied %.3f s, read from disk %.3f s", 1e9 * h->copy_core_s, 1e9 * h->disk_core_s);
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------
// The device to measure on
// ---------------------------------------------------------------------------------------------------------------

/* Of the products' results: that of q, k and v, or of the MLP. */
static int widest(const ProfileSize *s) { return imax(3 * s->h1, s->h2); }

/* Where everything lies in a tier; returns the tier's bytes. */
static size_t lay_out_tier(Profile *p) {
    const ProfileSize *s = &p->size;
    size_t each = (size_t)imax(s->rows * widest(s), s->tokens * s->h1) * type_bytes(p->act);
    size_t row = size_min(kv_bytes(s, true), kv_bytes(s, false));
    size_t npages = s->cold / 2 / (PAGE_TOKENS * row) + 1, starts = (size_t)NTOKEN_SIZES * index_row(p);
    p->x = s->cold;
    p->y = p->x + whole_lines(each);
    p->tables = p->y + whole_lines(each);
    p->starts = p->tables + whole_lines(npages * 4);
    return p->starts + whole_lines(starts * 4);
}

/* Where memory is short, what should be cold is less, and with it the products, whose weights need half of it, and their
 * rows, whose inputs and outputs need no more than all of it. */
static int fit_memory(ProfileSize *size, int tiers, size_t room, Error *err) {
    enum { LEAST = 1 << 20 };
    Profile p = {.size = *size, .act = F32};
    ProfileSize *s = &p.size;
    for (size_t bytes; (bytes = tiers * lay_out_tier(&p)) > room;) {
        s->cold = s->cold / 2 / 4096 * 4096;
        while (2 * sizeof(f16) * s->h1 * widest(s) > s->cold && s->nh % 2 == 0) s->h1 /= 2, s->h2 /= 2, s->nh /= 2;
        while (2 * sizeof(float) * s->rows * widest(s) > s->cold && s->tokens > *token_sizes) s->rows /= 2, s->tokens /= 2;
        if (s->cold < LEAST || 2 * sizeof(f16) * s->h1 * widest(s) > s->cold)
            return fail(
                err, EXIT_USAGE,
                "measuring this machine needs %.1f MiB of memory, and this process may have %.1f MiB; give it more, "
                "or name a machine with --hardware",
                bytes / 1048576.0, room / 1048576.0);
    }
    *size = *s;
    return 0;
}

/* The largest layer that is measured within a minute, or the model's own where that is smaller. Each half of the cold
 * memory is more than the last cache holds, so that going round in it finds nothing there. On the host device both upper
 * tiers are memory of this process. */
int profile_size(ProfileSize *to, const Gpu *gpu, const OptConfig *config, size_t memory, Error *err) {
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
        size.cold = 4 * (size_t)cache < most ? 4 * (size_t)cache / 4096 * 4096 : most;
    *to = size;
    return fit_memory(to, gpu ? 1 : 2, memory, err);
}

/* The file: all that is asked for, or half of what the disk has room for; at least something, unless it is memory. */
static size_t disk_bytes(size_t asked, size_t capacity, bool memory) {
    size_t bytes = capacity / 2 < asked ? capacity / 2 : asked, least = asked < LEAST_DISK ? asked : LEAST_DISK;
    return bytes < least && !memory ? least : bytes;
}

/* All of a tier is one region. */
static void whole_tier(Plan *plan, Tier tier, size_t bytes) {
    plan->region[RESTING_WEIGHTS][tier] = (Region){.name = "profile", .remedy = "", .type = U8, .slots = 1, .bytes = bytes};
    plan->total[tier] = bytes;
}

/* The same on both upper tiers. */
static void plan_profile(Profile *p, const char *offload_dir, const Bytes capacity[NTIERS]) {
    const size_t bytes = lay_out_tier(p);
    for (int t = TIER_GPU; t <= TIER_CPU; t++) {
        whole_tier(&p->plan, t, bytes);
        p->plan.region[INDEX_TABLES][t].offset = p->tables;
    }
    p->plan.act_type = p->act;
    p->plan.offload_bytes = disk_bytes(p->size.disk, capacity[TIER_DISK], memory_holds(offload_dir)) / piece(p) * piece(p);
    whole_tier(&p->plan, TIER_DISK, p->plan.offload_bytes);
    p->span = p->size.cold;
}

/* The smaller where the GPU has less room. */
static void fit_gpu(ProfileSize *s, Gpu *gpu) {
    const Bytes room = gpu_left(gpu);
    while (s->h1 > 512 && s->cold + (size_t)4 * s->rows * widest(s) + ((size_t)32 << 20) > room)
        s->h1 /= 2, s->h2 /= 2, s->nh /= 2, s->cold /= 2;
}

/* Small numbers without an order, of which no sum overflows. */
static void fill(Profile *p, Tensor all, const void *pattern, size_t n) {
    size_t count = (size_t)all.rows * all.cols;
    for (size_t first = 0; first < count; first += n)
        p->device->upload(p->device, all, first, pattern, count - first < n ? count - first : n);
}

static void fill_indices(Profile *p, Tier tier) {
    const int npages = (int)((p->starts - p->tables) / 4), row = index_row(p), n = NTOKEN_SIZES * row;
    int32_t *index = xcalloc(imax(npages, n), sizeof *index);
    for (int i = 0; i < npages; i++) index[i] = i;
    fill(p, matrix(tier, I32, p->tables, 1, npages), index, npages);
    for (int i = 0; i < n; i++) {
        const int r = i % row, size = token_sizes[i / row];
        index[i] = r <= p->size.tokens ? imin(r * size, p->size.tokens) : size;
    }
    fill(p, matrix(tier, I32, p->starts, 1, n), index, n);
    free(index);
}

static void fill_memory(Profile *p) {
    enum { N = 1 << 16 };
    float *f = xcalloc(N, sizeof *f);
    f16 *h = xcalloc(N, sizeof *h);
    size_t elements = (p->tables - p->x) / type_bytes(p->act);
    for (uint32_t i = 0; i < N; i++) {
        f[i] = (float)((i * 2654435761u >> 8 & 0xffff) / 65536.0 - 0.5) / 8;
        h[i] = f32_to_f16(f[i]);
    }
    for (int t = TIER_GPU; t <= TIER_CPU; t++) {
        fill(p, matrix(t, F16, 0, (int)(p->size.cold / 4096), 2048), h, N);
        fill(p, matrix(t, p->act, p->x, (int)(elements / 1024), 1024), p->act == F32 ? (void *)f : h, N);
        fill_indices(p, t);
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
        snprintf(name, size, "%.40s; %.38s, %d thread%s", gpu->name, cpu, threads, plural(threads));
    else
        snprintf(name, size, "%s, %d thread%s, host device", cpu, threads, plural(threads));
}

static void set_capacities(Hardware *h, const Bytes capacity[NTIERS]) {
    for (int t = 0; t < NTIERS; t++) h->mem[t] = fmin(fmax((double)capacity[t], 1), 1e18);
}

static int measure_all(Hardware *h, Profile *p) {
    static const struct {
        const char *what;
        int (*measure)(Hardware *, Profile *);
    } parts[] = {{"copies", measure_links},
                 {"disk", measure_disk},
                 {"linear", measure_linear},
                 {"attention", measure_attention},
                 {"packed weights and cache", measure_packed},
                 {"products beside copies", measure_shared_cores}}; /* only of the host device */
    const int n = sizeof parts / sizeof *parts - (p->act != F32);
    for (int i = 0; i < n; i++) {
        tell(p, "measuring this machine: %s", parts[i].what);
        if (parts[i].measure(h, p) != 0) return -1;
    }
    return measure_rate(&h->gpu_bdw, p, &layernorm); /* the last: it overwrites weights */
}

/* As profile_measure, at this size; size->disk 0: without a disk. */
static int measure_machine(Hardware *hardware, const ProfileSize *size, Gpu *gpu, const char *offload_dir, int threads,
                           const Bytes capacity[NTIERS], FILE *progress, Error *err) {
    Profile *p = xcalloc(1, sizeof *p);
    Hardware measured = {.name = ""};
    threads = host_set_threads(threads);
    *p = (Profile){.size = *size, .act = gpu ? F16 : F32, .progress = progress, .err = err};
    if (gpu) fit_gpu(&p->size, gpu);
    plan_profile(p, offload_dir, capacity);
    name_machine(measured.name, MOST_NAME + 1, gpu, threads);
    set_capacities(&measured, capacity);
    if (!p->plan.offload_bytes) measured.nmem = 1;
    p->device =
        gpu ? cuda_open(gpu, &p->plan, &p->none, offload_dir, err) : host_open(&p->plan, &p->none, offload_dir, err);
    if (p->device) fill_memory(p);
    int status = p->device ? measure_all(&measured, p) : -1;
    if (p->device) p->device->close(p->device);
    if (status == 0) *hardware = measured;
    free(p);
    return status;
}

int profile_measure(Hardware *hardware, const ProfileSize *size, Gpu *gpu, const char *offload_dir, int threads,
                    const Bytes capacity[NTIERS], FILE *progress, Error *err) {
    ProfileSize without = *size;
    Error fault;
    without.disk = 0;
    if (!measure_machine(hardware, size, gpu, offload_dir, threads, capacity, progress, &fault)) return 0;
    if (measure_machine(hardware, &without, gpu, offload_dir, threads, capacity, progress, err)) return -1;
    fprintf(progress ? progress : stderr, "measured without a disk: %s\n", fault.text);
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------
// As a file
// ---------------------------------------------------------------------------------------------------------------

/* Whether there was no disk to measure. */
static bool is_unmeasured(const Hardware *hardware) { return hardware->dtoc_bdw[0] == NO_DISK; }

void profile_write(const Hardware *hardware, FILE *out) {
    char date[80];
    time_t now = time(NULL);
    struct tm day;
    strftime(date, sizeof date, "measured by flexgen profile on %Y-%m-%d", localtime_r(&now, &day));
    hardware_write(hardware, date, out);
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
    snprintf(key, sizeof key, "%d|%d|%d|%d|%d|%d|%zu|%s|%d|%s|%s|%llx|%llx", PROFILE_VERSION, shapes->h1, shapes->h2,
             shapes->nh, shapes->rows, shapes->tokens, shapes->cold, cpu, host_set_threads(threads), host_isa(),
             gpu ? gpu->name : "", (unsigned long long)disk.st_dev, (unsigned long long)fs.f_type);
    const uint64_t hash = hash_bytes(14695981039346656037u, key, strlen(key));
    if (snprintf(path, size, "%s/flexgen/hardware-%016llx.json", dir, (unsigned long long)hash) >= (int)size) path[0] = 0;
}

/* Makes the cache's directories, which are there already, mostly. 0, or why one is not. */
static int make_cache_dir(void) {
    char dir[4200];
    if (!cache_dir(dir, sizeof dir - 10)) return ENOENT;
    if (mkdir(dir, 0700) && errno != EEXIST) return errno;
    return mkdir(strcat(dir, "/flexgen"), 0700) && errno != EEXIST ? errno : 0;
}

static int write_profile(const Hardware *hardware, const char *path, Error *err) {
    const int why = *path ? make_cache_dir() : ENOENT;
    if (why)
        return fail(err, EXIT_FAILED, "cannot write %s: %s; name a directory", *path ? path : "$HOME/.cache/flexgen",
                    strerror(why));
    FILE *f = output_open("cannot write", path, err);
    if (f) profile_write(hardware, f);
    return f ? output_close(f, "cannot write", path, err) : -1;
}

void profile_keep(const Hardware *hardware, const ProfileSize *size, const Gpu *gpu, const char *offload_dir, int threads,
                  FILE *progress) {
    char path[4100];
    Error err;
    if (is_unmeasured(hardware)) return;
    profile_path(path, sizeof path, size, gpu, offload_dir, threads);
    if (write_profile(hardware, path, &err))
        fprintf(progress ? progress : stderr, "the next run will measure again: %s (XDG_CACHE_HOME)\n", err.text);
}

int profile_machine(Hardware *hardware, const ProfileSize *size, Gpu *gpu, const char *offload_dir, int threads,
                    const Bytes capacity[NTIERS], FILE *progress, Error *err) {
    char path[4100];
    Error damaged;
    profile_path(path, sizeof path, size, gpu, offload_dir, threads);
    if (path[0] && access(path, R_OK) == 0 && hardware_read(hardware, path, &damaged) == 0) {
        set_capacities(hardware, capacity);
        return 0;
    }
    if (profile_measure(hardware, size, gpu, offload_dir, threads, capacity, progress, err) != 0) return -1;
    profile_keep(hardware, size, gpu, offload_dir, threads, progress);
    return 0;
}
