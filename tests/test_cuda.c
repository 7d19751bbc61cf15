/* test_cuda.c: the GPU, or its emulation on the CPU (tests/cuda_cpu.h). The cases of op_cases.h, as kernels; and what is
 * about kernels and streams alone: sums that several blocks share, batches that are done in pieces, shared memory, both
 * lanes at once, copies, marks, times, and memory. test_lanes.c and test_schedule.c have the device that is made of it. */
#include "device/parts.h"

#define ACT F16
static const double EPSILON[NCODES] = {
    [OP_LAYERNORM] = 2.5e-7,         /* a few roundings of 6e-8 */
    [OP_LINEAR] = 2.5e-6,            /* the same on each partial sum */
    [OP_ATTEND_PREFILL] = 2. / 2048, /* weights may be halves when they meet values of up to 2 */
    [OP_ATTEND] = 5e-5,              /* scores of 10 carry 5e-6 into weights of values up to 2 */
    [OP_SELECT] = 1e-5,              /* scores of up to 30 carry 2e-6 into it */
    [OP_WEIGH] = 5e-6,               /* sums of 700 products of up to 2 */
    [OP_SCORE] = 4e-6,               /* of up to 30 */
};
#include "op_cases.h"

enum { MIB = 1 << 20 };

static Gpu *gpu;
static Error err;
static struct {
    uint8_t *at;
    size_t bytes;
} arena; /* the GPU's memory */
static int mark;

static void gpu_open(void) {
    if (!gpu) gpu = cuda_open_gpu(&err);
    if (gpu) return;
    fprintf(stderr, "\n    %s\n", err.text);
    CU_FAIL_FATAL("cuda_open_gpu");
}

static void arena_close(void) {
    if (arena.at) gpu->call->release(gpu, arena.at);
    arena.at = NULL, arena.bytes = 0;
}

static void gpu_close(void) {
    arena_close();
    gpu->close(gpu);
    gpu = NULL;
}

static uint8_t *device_memory(size_t bytes) {
    gpu_open();
    if (bytes <= arena.bytes) return arena.at;
    arena_close();
    arena.bytes = bytes > 4 * MIB ? bytes : 4 * MIB;
    arena.at = (uint8_t *)gpu->call->alloc(gpu, arena.bytes, &err);
    CU_ASSERT_FATAL(arena.at != NULL);
    return arena.at;
}

#define POST(lane, f, ...) ASSERT_OK(gpu->call->f(gpu, lane, __VA_ARGS__, &err))

static void transfer(void *to, const void *from, size_t bytes) {
    ASSERT_OK(gpu->call->transfer(gpu, to, from, bytes, &err));
}

/* Waits for all that has been posted on the lane. */
static void drain(Lane lane) {
    mark = (mark + 1) % MARKS;
    POST(lane, end, mark, false);
    POST(lane, sync, mark);
}

static void on_device(const Op *ops, int n) {
    transfer(arena.at, memory.before, memory.used);
    for (int i = 0; i < n; i++) ASSERT_OK(gpu->call->run(gpu, &ops[i], &err));
    for (int l = 0; l < COUNT(lanes); l++) drain(lanes[l]);
    transfer(memory.after, arena.at, memory.used);
}

static void copy_on(Lane lane, void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t row_bytes, int rows) {
    POST(lane, copy, (StridedCopy){to, to_pitch, from, from_pitch, row_bytes, rows});
    drain(lane);
}

/* Of the emulation (tests/cuda_cpu.h), or NULL: while it is not 0, no copy on a stream begins; the bytes of the largest
 * copy on a stream; the most dynamic shared memory that a kernel was allowed. */
extern int cuda_cpu_hold __attribute__((weak));
extern long cuda_cpu_largest __attribute__((weak)), cuda_cpu_shared __attribute__((weak));

// ---- products with packed weights -----------------------------------------------------------------------------------

/* The last m of 64 rows, alone. The second half of the columns all but takes back what the first half adds, so that another
 * order of sums would show. */
TEST(how_many_rows_there_are_changes_no_bit_of_one) {
    enum { N = 128, K = 1088 };
    if (for_races()) return;
    const Tensor x = numbers(F16, PACKED_ROWS, K, 100), w = numbers(F16, N, K, 2 / sqrt(K));
    for (int c = 0; c < K / 2; c++) {
        for (int r = 0; r < PACKED_ROWS; r++) set_number(x, r, K - 1 - c, test_random(&state) / 10 - number(x, r, c));
        for (int o = 0; o < N; o++) set_number(w, o, K - 1 - c, number(w, o, c));
    }
    Op op = op_linear(on_lane(PROJECT), blank(F16, PACKED_ROWS, N), x, packed_weights(w), numbers(F16, 1, N, 1), absent);
    carry_out(op);
    for (int m = PACKED_ROWS; m > 0; m -= every_fifth()) {
        Op last = op;
        last.lane = lanes[m % 2], last.linear.x = tensor_rows(x, PACKED_ROWS - m, m);
        expect_same(last, tensor_rows(op.linear.y, PACKED_ROWS - m, m));
    }
    forget();
}

/* So many outputs that more blocks would fill the GPU for longer, but their sums would not have room. Of zeros, since the
 * emulation sees when it frees memory whether something was written behind it, and compute-sanitizer does on a GPU. */
TEST(partial_sums_stay_in_their_place) {
    enum { M = PACKED_ROWS, N = 14848, K = 2304 };
    if (every_third() > 1) return;
    const Tensor w = blank(U8, N / GROUP, K * GROUP_BYTES), x = tensor_at(w.at, F16, M, K, K),
                 zeros = tensor_at(w.at, F16, M, N, N);
    memset(w.at, 0, tensor_bytes(w));
    expect_same(op_linear(on_lane(PROJECT), zeros, x, w, absent, absent), zeros);
    gpu_close();
    forget();
}

/* Few outputs and many columns, so that blocks share outputs and leave partial sums: those of PROJECT and of FINISH, which
 * run side by side, lie apart. Each of the two has another product to do, so that one's sums in the other's place show. */
TEST(products_of_both_lanes_at_once_are_those_of_each_alone) {
    enum { TIMES = 3 };
    Op op[2 * TIMES];
    Tensor alone[2];
    for (int l = 0; l < 2; l++) {
        op[l] = linear_new(&epilogues[0], true, 8, 64, 512, lanes[l]);
        carry_out(op[l]);
        alone[l] = copy_of(op[l].linear.y);
    }
    for (int i = 2; i < COUNT(op); i++) op[i] = op[i % 2];
    carry_out_all(op, COUNT(op));
    for (int l = 0; l < 2; l++) CU_ASSERT(same(op[l].linear.y, alone[l]));
    forget();
}

/* A row of x that is 1 in one column and 0 elsewhere gets that column of w. It is what quant_unpack_rows gives, or, where
 * 2^13 lies between the min and scale * code, whose sum has then more bits than a float and is rounded twice there, may be
 * its neighbour. */
TEST(each_packed_number_is_multiplied_as_what_it_unpacks_to) {
    int others = 0, all = 0, wrong = 0;
    if (for_races()) return;
    for (int i = 0; i < COUNT(packed_shapes); i++) {
        const int n = packed_shapes[i][0], k = packed_shapes[i][1];
        const Tensor packed = random_groups(n, k);
        const Tensor w = unpacked_weights(packed, F16);
        for (int first = 0; first < k; first += PACKED_ROWS * every_third()) {
            const int m = imin(k - first, PACKED_ROWS);
            const Tensor x = numbers(F16, m, k, 0), y = blank(F16, m, n);
            for (int r = 0; r < m; r++) set_number(x, r, first + r, 1);
            carry_out(op_linear(on_lane(PROJECT), y, x, packed, absent, absent));
            for (int e = 0; e < m * n; e++) {
                const int o = e % n, c = first + e / n;
                const f16 *header = element(packed, o / GROUP, c * GROUP_BYTES);
                const double is = number(w, o, c), min = fabsf(f16_to_f32(header[0])), scale = fabsf(f16_to_f32(header[1]));
                if (number(y, e / n, o) == is) continue; /* 0 may be -0 */
                others++;
                wrong += abs(((f16 *)y.at)[e] - f32_to_f16((float)is)) != 1 || !(min >= 4096 * scale || scale >= 512 * min);
            }
            all += m * n;
        }
        forget();
    }
    CU_ASSERT_EQUAL(wrong, 0);
    CU_ASSERT(others < all / 1000);
}

/* Where shared memory is too small for all rows of x, blocks that read the same weights share these rows. */
TEST(a_gpu_with_less_shared_memory_gives_the_same_bits) {
    if (!&cuda_cpu_hold || getenv("CUDA_CPU_ARCH")) return; /* there is one real GPU; it is such a GPU already */
    const Op op = linear_new(&epilogues[0], true, PACKED_ROWS, 128, 1088, PROJECT);
    carry_out(op);
    gpu_close();
    setenv("CUDA_CPU_ARCH", "75", 1);
    expect_same(op, op.linear.y);
    gpu_close();
    unsetenv("CUDA_CPU_ARCH");
    forget();
}

/* A block has shared memory for the variables of its kernel as well: where the card has exactly what the largest kernel
 * asks for beside them, a smaller one runs. */
TEST(a_gpu_that_lacks_a_few_bytes_of_shared_memory_gives_the_same_bits) {
    char bytes[24];
    if (!&cuda_cpu_hold || getenv("CUDA_CPU_ARCH")) return;
    const Op op = linear_new(&epilogues[0], true, PACKED_ROWS, 128, 1088, PROJECT);
    carry_out(op);
    gpu_close();
    snprintf(bytes, sizeof bytes, "%ld", cuda_cpu_shared);
    setenv("CUDA_CPU_SHARED", bytes, 1);
    expect_same(op, op.linear.y);
    gpu_close();
    unsetenv("CUDA_CPU_SHARED");
    forget();
}

/* cuBLAS has chosen an algorithm for a bias that is well aligned when another one comes that is not, and then for a third
 * one that is again. */
TEST(a_bias_may_be_aligned_otherwise_than_the_last_one) {
    static const int at[] = {0, 1, 4, 0};
    for (int i = 0; i < COUNT(at) && &cuda_cpu_hold; i++) { /* cuBLAS may refuse it; a plan's are all aligned */
        Op op = linear_new(&epilogues[1], false, 3, 64, 64, PROJECT);
        op.linear.b = tensor_cols(numbers(F16, 1, 80, 1), at[i], 64);
        expect_linear(op);
        forget();
    }
}

/* What cuBLAS makes of a NaN is its own affair; where it has no algorithm with a bias, for rows of 140 bytes, the kernel
 * that adds one keeps it. */
TEST(a_bias_and_relu_keep_what_is_not_a_number) {
    if (!&cuda_cpu_hold) return;
    const Op op = linear_new(&epilogues[3], false, 3, 70, 64, PROJECT);
    set_number(op.linear.x, 1, 0, NAN);
    expect_linear(op);
    forget();
}

// ---- batches in pieces ----------------------------------------------------------------------------------------------

/* Partial results have a place of fixed size. Where sequences may become so long that all of them together have none there,
 * the batch is done in pieces: here of eight and of one, whose results would lie across the end of the place. */
TEST(a_batch_in_pieces_gives_the_same_bits) {
    static const int head[] = {128, 4};
    if (for_races()) return; /* its thousands of blocks share nothing, but take ThreadSanitizer a minute */
    const Sequences s = sequences_new(contexts, head, 3, 2);
    const Tensor q = last_queries(&s);
    const Op op = attend_of(q, pages_of(&s, 16, false, 1));
    carry_out(op);
    expect_same(attend_of(q, pages_of(&s, 64, false, 4032)), op.attend.o);
    forget();
}

// ---- what is reported -----------------------------------------------------------------------------------------------

/* Whether it is chosen or not. */
TEST(a_logit_that_is_no_number_is_reported) {
    const Tensor odd = logits_that_are_no_numbers(), usual = stepped_logits(1, odd.cols, 1);
    const int32_t target = 7;
    for (int i = 0; i < 2 * (odd.rows + 1); i++) {
        const int row = i / 2 - 1;
        const Tensor logits = row < 0 ? usual : tensor_rows(odd, row, 1);
        arena_close(); /* the next time that there is memory, nothing has been reported */
        device_memory(MIB);
        CU_ASSERT_EQUAL(*gpu->bad, 0);
        carry_out(i % 2 ? pick_of(logits, (Sampling){0}) : score_of(logits, indices(&target, 1)));
        CU_ASSERT((*gpu->bad != 0) == (row >= 0));
    }
    forget();
}

// ---- copies, marks, memory ------------------------------------------------------------------------------------------

/* Copies from the first half of the host's or the GPU's image to the second half of one: up (way 0), within the GPU, down.
 */
TEST(copies_go_up_down_and_across_whole_and_by_rows) {
    enum { IMAGE = 65536 };
    static const Lane lane[] = {W_LOAD, FINISH, STORE};
    static const struct {
        int to_pitch, from_pitch, bytes, rows;
    } copies[] = {{30000, 30000, 30000, 1},
                  {100, 100, 100, 65} /* dense */,
                  {128, 90, 62, 33},
                  {62, 256, 62, 33},
                  {2, 14, 2, 31},
                  {62, 127, 62, 33},
                  {127, 62, 62, 33} /* a border within the last row alone, of one side, of the other */,
                  {64, 64, 32, 0}};
    gpu_open();
    const size_t usual = gpu->pin_part;
    uint8_t *host = aligned_alloc(4096, IMAGE);
    for (int pinned = getenv("CUDA_CPU_STRICT") != NULL; pinned < 3; pinned++) { /* strict: no others */
        if (pinned == 2) gpu->pin_part = 4096; /* borders within copies, and within their rows */
        if (pinned) ASSERT_OK(gpu->call->pin(gpu, host, IMAGE, &err));
        for (int n = 0; n < 3 * COUNT(copies); n++) {
            const int way = n / COUNT(copies), c = n % COUNT(copies), to = copies[c].to_pitch, from = copies[c].from_pitch;
            uint8_t *on_gpu = device_memory(IMAGE), *image = temp(IMAGE), *want[2]; /* of the host, of the GPU */
            for (int i = 0; i < IMAGE; i++) {
                host[i] = (uint8_t)test_below(&state, 256);
                image[i] = (uint8_t)~host[i];
            }
            for (int i = 0; i < 2; i++) want[i] = memcpy(temp(IMAGE), i ? image : host, IMAGE);
            for (int r = 0; r < copies[c].rows; r++)
                memcpy(want[way < 2] + IMAGE / 2 + r * to, want[way > 0] + r * from, copies[c].bytes);
            transfer(on_gpu, image, IMAGE);
            copy_on(lane[way], (way < 2 ? on_gpu : host) + IMAGE / 2, to, way ? on_gpu : host, from, copies[c].bytes,
                    copies[c].rows);
            transfer(image, on_gpu, IMAGE);
            CU_ASSERT(memcmp(host, want[0], IMAGE) == 0 && memcmp(image, want[1], IMAGE) == 0);
            forget();
        }
        if (pinned) gpu->call->unpin(gpu, host);
    }
    gpu->pin_part = usual;
    free(host);
}

/* They go in pieces of 16 MiB, the last one smaller: up, and down again. */
TEST(large_copies_bring_every_byte_to_its_place) {
    const size_t bytes = (size_t)(every_third() > 1 ? 16 : 32) * MIB + 64, words = bytes / sizeof(uint32_t);
    uint32_t *from = aligned_alloc(64, 2 * bytes), *back = from + words;
    uint8_t *there = device_memory(bytes);
    ASSERT_OK(gpu->call->pin(gpu, from, 2 * bytes, &err));
    for (size_t i = 0; i < words; i++) from[i] = (uint32_t)i, back[i] = 0;
    POST(W_LOAD, copy, (StridedCopy){there, bytes, from, bytes, bytes, 1});
    POST(W_LOAD, end, 7, true);
    POST(STORE, after, W_LOAD, 7);
    copy_on(STORE, back, bytes, there, bytes, bytes, 1);
    CU_ASSERT(memcmp(back, from, bytes) == 0);
    CU_ASSERT(!&cuda_cpu_largest || cuda_cpu_largest <= 16 * MIB);
    gpu->call->unpin(gpu, from);
    arena_close();
    free(from);
}

/* From memory that is not pinned: such a copy may arrive when CUDA's call has long returned, and no stream waits for it. */
TEST(what_is_uploaded_is_there_for_every_stream) {
    enum { BYTES = 1 << 17 };
    uint8_t *there = device_memory(2 * BYTES), *back = temp(BYTES);
    for (int l = 0; l < COUNT(lanes); l++) {
        const Tensor from = numbers(F16, 1, BYTES / 2, 1);
        transfer(there, from.at, BYTES);
        copy_on(lanes[l], there + BYTES, BYTES, there, BYTES, BYTES, 1);
        transfer(back, there + BYTES, BYTES);
        CU_ASSERT(memcmp(back, from.at, BYTES) == 0);
    }
    forget();
}

/* A copy that waited for its stream would come back with its bytes moved, once the emulation tires of holding it. */
TEST(a_copy_is_only_posted) {
    enum { BYTES = 4096, ROWS = 16, ROW = BYTES / ROWS };
    if (!&cuda_cpu_hold) return; /* a real GPU's copies cannot be held */
    uint8_t *there = device_memory(2 * BYTES), *host = aligned_alloc(BYTES, BYTES);
    const uint8_t *bytes = (uint8_t *)numbers(F16, 1, BYTES / 2, 1).at;
    ASSERT_OK(gpu->call->pin(gpu, host, BYTES, &err));
    transfer(there, bytes, BYTES);
    for (size_t pitch = ROW; pitch >= ROW / 2; pitch -= ROW / 2) { /* every row is half as long, or they are one */
        memset(host, 0, BYTES);
        __atomic_store_n(&cuda_cpu_hold, 1, __ATOMIC_RELEASE);
        POST(STORE, copy, (StridedCopy){host, pitch, there, ROW, pitch, ROWS});
        transfer(there + BYTES, bytes, BYTES); /* which waits for no stream either */
        const bool moved = memcmp(host, bytes, pitch) == 0;
        __atomic_store_n(&cuda_cpu_hold, 0, __ATOMIC_RELEASE);
        CU_ASSERT(!moved);
        drain(STORE);
        CU_ASSERT(memcmp(host, bytes, pitch) == 0);
    }
    gpu->call->unpin(gpu, host);
    free(host);
    forget();
}

TEST(a_lane_waits_for_the_mark_of_another_and_times_are_taken) {
    enum { N = 64, ROW = N * sizeof(f16), TIMES = 16 };
    const size_t BULK = (size_t)(20 / every_eleventh()) * MIB;
    const Tensor row = numbers(F16, 1, N, 1), back = blank(F16, 1, N);
    uint8_t *there = device_memory(BULK * 2 + MIB), *bulk = there + MIB; /* row number 0, the row, two copies of it */
    transfer(there, temp(ROW), ROW), transfer(there + ROW, row.at, ROW);
    const double from = seconds_now();
    POST(PROJECT, begin, 7);
    for (int i = 0; i < TIMES; i++) POST(PROJECT, copy, (StridedCopy){bulk + BULK, BULK, bulk, BULK, BULK, 1});
    POST(PROJECT, end, 7, true);
    POST(PROJECT, begin, 8);
    Op op = embedding(there + 2 * ROW, F16, there + ROW, F16, N, (int32_t *)there, 1, N, false);
    ASSERT_OK(gpu->call->run(gpu, &op, &err));
    POST(PROJECT, end, 8, true);
    POST(FINISH, after, PROJECT, 8);
    POST(FINISH, begin, 7);
    op = embedding(there + 3 * ROW, F16, there + 2 * ROW, F16, N, (int32_t *)there, 1, N, false), op.lane = FINISH;
    ASSERT_OK(gpu->call->run(gpu, &op, &err));
    POST(FINISH, end, 7, true);
    gpu->poll_s = 60; /* asks again and again, and launches what comes next as if it had not */
    POST(FINISH, sync, 7);
    gpu->poll_s = 0;
    ASSERT_OK(gpu->call->run(gpu, &op, &err));
    POST(FINISH, end, 8, true);
    POST(FINISH, sync, 8);
    const double all = seconds_now() - from + 1e-4; /* two clocks */
    transfer(back.at, there + 3 * ROW, ROW);
    CU_ASSERT(same(back, row));
    double one = gpu->call->took(gpu, PROJECT, 7, 7), both = gpu->call->took(gpu, PROJECT, 7, 8),
           other = gpu->call->took(gpu, FINISH, 7, 7);
    CU_ASSERT(one > 0 && both >= one && both <= all && other > 0 && other <= all);
    const double begun = gpu->call->began(gpu, PROJECT, 7), later = gpu->call->began(gpu, PROJECT, 8) - begun;
    CU_ASSERT(later >= one - 1e-4 && later <= all);
    forget();
}

TEST(nothing_to_do_is_nothing_done) {
    static const int none[] = {0}, head[] = {64, 1};
    const Tensor i = indices(none, 0), m = numbers(F16, 64, 64, 1), row = tensor_rows(m, 0, 1), x = blank(F16, 0, 64);
    carry_out(op_embed(on_lane(PROJECT), x, m, i, false));
    carry_out(op_layernorm(on_lane(PROJECT), x, x, row, row));
    for (int packs = 0; packs < 2; packs++) {
        const Sequences s = sequences_new(none, head, 1, 1);
        const PageTable t = pages_of(&s, 16, packs, 1);
        const Sparse sparse = sparse_of(x, t, .1);
        carry_out(linear_new(&epilogues[3], packs, 0, 64, 64, lanes[packs]));
        carry_out(prefill_of(&s, 0, 0, 0)), carry_out(attend_of(x, t));
        carry_out(sparse.select), carry_out(sparse.weigh);
        carry_out(op_append(on_lane(FINISH), &t, s.kv, i, i));
        carry_out(op_pack(on_lane(PROJECT), blank(U8, 0, 2 * GROUP_BYTES), s.kv, 1));
    }
    carry_out(op_unpack(on_lane(PROJECT), x, blank(U8, 0, 64 * GROUP_BYTES)));
    carry_out(pick_of(blank(F32, 0, 64), (Sampling){0})), carry_out(score_of(blank(F32, 0, 64), i));
    forget();
}

TEST(memory_that_is_not_there_is_refused_with_its_remedy) {
    gpu_open(), arena_close();
    err.text[0] = 0;
    CU_ASSERT_PTR_NULL_FATAL(gpu->call->alloc(gpu, 2 * gpu->total, &err));
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "--gpu-mem"));
    expect_greedy(stepped_logits(1, 64, 1)); /* and what is there is still given */
    forget();
}

TEST(what_is_pinned_of_a_range_that_fails_stays_pinned) {
    enum { PIECE = 1 << 20, PIECES = 3 };
    if (!&cuda_cpu_hold) return; /* a real driver has its own limit */
    gpu_open();
    uint8_t *host = aligned_alloc(PIECE, PIECE * PIECES);
    const size_t usual = gpu->pin_part;
    gpu->pin_part = PIECE;
    setenv("CUDA_CPU_PIN_FAILS", "3", 1);
    CU_ASSERT_EQUAL(gpu->call->pin(gpu, host, PIECE * PIECES, &err), -1);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "cannot pin more than 2.0 of the CPU tier's 3.0 MiB"));
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "ulimit -l"));
    /* a copy that begins in the pinned part is cut where that ends */
    uint8_t *device = device_memory(PIECE * PIECES), back[2 * PIECE];
    for (int i = 0; i < PIECE * PIECES; i++) host[i] = (uint8_t)(i % 251);
    copy_on(W_LOAD, device, 2 * PIECE, host + PIECE, 2 * PIECE, 2 * PIECE, 1);
    transfer(back, device, sizeof back);
    CU_ASSERT(!memcmp(back, host + PIECE, sizeof back));
    gpu->call->unpin(gpu, host);
    unsetenv("CUDA_CPU_PIN_FAILS");
    ASSERT_OK(gpu->call->pin(gpu, host, PIECE * PIECES, &err));
    gpu->call->unpin(gpu, host);
    gpu->pin_part = usual;
    free(host);
}

TEST(what_is_released_and_closed_is_free_again) {
    gpu_open(), arena_close();
    CU_ASSERT(gpu->name[0] && gpu->total > gpu->overhead);
    const size_t bytes = size_min(gpu->total / 32, 256 * MIB), slack = bytes / 8; /* others may be there */
    const size_t before = gpu->in_use(gpu);
    device_memory(bytes);
    CU_ASSERT(gpu->in_use(gpu) + slack >= before + bytes);
    arena_close();
    CU_ASSERT(gpu->in_use(gpu) <= before + slack);
    for (int i = 0; i < 3; i++) { /* what an open GPU takes is as much the third time */
        gpu_close();
        gpu_open();
    }
    CU_ASSERT(gpu->in_use(gpu) <= before + slack);
    gpu_close();
}

TEST(a_large_card_sets_more_aside) {
    static const char *const mib[] = {"7344", "7376"};
    if (!&cuda_cpu_hold) return; /* a real GPU has the memory that it has */
    for (int i = 0; i < COUNT(mib); i++) {
        setenv("CUDA_CPU_MEM_MB", mib[i], 1);
        gpu_open();
        CU_ASSERT_EQUAL(gpu->spare,
                        (size_t)(i ? 64 + 3 * 132 : 459) * MIB); /* of its 132 multiprocessors, or a sixteenth */
        gpu_close();
    }
    unsetenv("CUDA_CPU_MEM_MB");
}
