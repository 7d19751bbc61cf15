/* test_depend.c: what an op must come after, by hand. No device: ops are numbered as they would be posted. That this is
 * enough for all that the schedule posts is test_events.c's. */
#include "tests.h"

static Depend *depend;
static uint64_t posted[NLANES];

enum { CELL = 5, OTHER_CELL };
static Tensor bytes(int first, int n) {
    return (Tensor){.tier = TIER_CPU, .type = U8, .offset = first, .rows = n > 0, .cols = n, .ld = n, .cell = CELL};
}
static const Tensor none;

/* An op that writes some bytes and reads others; what it waits for is left in `op`. */
static Op op;
static Event use(Lane lane, Tensor writes, Tensor reads) {
    op = (Op){.code = OP_UNPACK, .lane = lane};
    op.unpack.w = writes, op.unpack.packed = reads;
    depend_before(depend, &op);
    Event e = {(int)lane, ++posted[lane]};
    depend_posted(depend, &op, e);
    return e;
}
static Event writes(Lane lane, int byte) { return use(lane, bytes(byte, 1), none); }
static Event reads(Lane lane, int byte) { return use(lane, none, bytes(byte, 1)); }

/* Begins a test: nobody has used a byte. */
static void open_cells(void) {
    if (depend) depend_close(depend);
    memset(posted, 0, sizeof posted);
    depend = depend_open(8);
}

static bool waits_for(Event e) {
    for (int i = 0; i < op.nafter; i++)
        if (op.after[i].lane == e.lane && op.after[i].seq == e.seq) return true;
    return false;
}

TEST(a_reader_comes_after_the_writer_and_a_writer_after_both) {
    open_cells();
    Event w = writes(W_READ, 1);
    CU_ASSERT_EQUAL(op.nafter, 0);
    Event r = reads(W_LOAD, 1);
    CU_ASSERT(op.nafter == 1 && waits_for(w));
    Event other = reads(STORE, 1); /* readers do not wait for readers */
    CU_ASSERT(op.nafter == 1 && waits_for(w));
    writes(D_WRITE, 1);
    CU_ASSERT(op.nafter == 2 && waits_for(r) && waits_for(other)); /* which imply the writer */
    writes(D_WRITE, 2);
    CU_ASSERT_EQUAL(op.nafter, 0);
}

TEST(what_is_known_is_not_waited_for_again) {
    open_cells();
    Event w = writes(W_READ, 1);
    reads(W_LOAD, 1);
    reads(W_LOAD, 1); /* behind one that has waited */
    CU_ASSERT_EQUAL(op.nafter, 0);
    reads(W_READ, 1); /* lanes are in order */
    CU_ASSERT_EQUAL(op.nafter, 0);
    writes(W_LOAD, 2);
    reads(STORE, 2);
    reads(STORE, 1); /* who has waited for what has waited */
    CU_ASSERT_EQUAL(op.nafter, 0);
    depend_waited(depend, w);
    reads(D_WRITE, 1); /* the posting thread has waited for it */
    CU_ASSERT_EQUAL(op.nafter, 0);
}

TEST(of_two_events_one_that_implies_the_other_is_enough) {
    open_cells();
    writes(W_READ, 1);
    Event both = use(W_LOAD, bytes(2, 1), bytes(1, 1));
    use(PROJECT, bytes(3, 1), bytes(1, 2));
    CU_ASSERT(op.nafter == 1 && waits_for(both));
}

TEST(the_posting_thread_is_a_user_like_any_other) {
    Event wait[NLANES];
    open_cells();
    Tensor table = bytes(1, 1);
    Event w = writes(C_LOAD, 1);
    reads(PROJECT, 1);
    CU_ASSERT(depend_poster(depend, wait, &table, READS) == 1 && wait[0].lane == C_LOAD && wait[0].seq == w.seq);
    CU_ASSERT(depend_poster(depend, wait, &table, WRITES) == 1 && wait[0].lane == PROJECT);
    depend_waited(depend, wait[0]);
    CU_ASSERT_EQUAL(depend_poster(depend, wait, &table, WRITES), 0);
}

TEST(only_those_wait_who_share_bytes) {
    open_cells();
    Event left = use(W_READ, bytes(0, 4), none), right = use(C_READ, bytes(4, 4), none);
    CU_ASSERT_EQUAL(op.nafter, 0);
    use(STORE, none, bytes(2, 4));
    CU_ASSERT(op.nafter == 2 && waits_for(left) && waits_for(right));
    Event middle = use(W_LOAD, bytes(3, 2), none); /* of both it covers a part */
    use(PROJECT, none, bytes(0, 3));
    CU_ASSERT(op.nafter == 1 && waits_for(left));
    use(FINISH, none, bytes(3, 1));
    CU_ASSERT(op.nafter == 1 && waits_for(middle));
    Tensor elsewhere = bytes(0, 8);
    elsewhere.cell = OTHER_CELL; /* of the same offsets on another tier */
    use(D_WRITE, elsewhere, none);
    CU_ASSERT_EQUAL(op.nafter, 0);
}

/* A batch's pages lie scattered. On the GPU a layer is used when all of it has come. */
TEST(pages_and_a_weight_slot_of_the_GPU_are_used_as_a_whole) {
    static const struct {
        RegionId region;
        Tier tier;
        bool whole;
    } cases[] = {{KV_CACHE, TIER_GPU, true},      {KV_CACHE, TIER_DISK, true},    {WEIGHT_SLOT, TIER_GPU, true},
                 {WEIGHT_SLOT_1, TIER_GPU, true}, {WEIGHT_SLOT, TIER_CPU, false}, {WEIGHT_SLOT_1, TIER_CPU, false},
                 {HIDDEN, TIER_GPU, false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        open_cells();
        Tensor a = bytes(0, 1), b = bytes(1, 1);
        a.region = b.region = cases[i].region, a.tier = b.tier = cases[i].tier;
        Event w = use(W_READ, a, none);
        use(W_LOAD, none, b);
        CU_ASSERT(cases[i].whole ? op.nafter == 1 && waits_for(w) : !op.nafter);
    }
}

TEST(who_gets_memory_comes_after_all_who_had_it) {
    enum { FREE = 1, A, B };
    open_cells();
    Tensor pages = bytes(0, 1);
    pages.region = KV_CACHE;
    pages.cell = A;
    Event a = use(W_READ, pages, none), reader = use(ATTEND, none, pages);
    pages.cell = B;
    Event b = use(STORE, none, pages);
    depend_join(depend, FREE, A);
    depend_join(depend, FREE, B);
    depend_join(depend, B, FREE);
    use(PROJECT, pages, none);
    CU_ASSERT(op.nafter == 2 && waits_for(reader) && waits_for(b)); /* the reader has waited for a */
    pages.cell = A;                                                 /* its own users are the same as before */
    use(FINISH, none, pages);
    CU_ASSERT(op.nafter == 1 && waits_for(a));
}

TEST(older_users_do_not_replace_the_newer_ones) {
    enum { OLD = 1, NEW };
    open_cells();
    Tensor pages = bytes(0, 1);
    pages.cell = OLD;
    use(STORE, none, pages);
    pages.cell = NEW;
    Event newer = use(STORE, none, pages);
    depend_join(depend, NEW, OLD);
    use(PROJECT, pages, none);
    CU_ASSERT(op.nafter == 1 && waits_for(newer));
}

/* Of very old ops it is forgotten what they had waited for, never that they were there. */
TEST(nothing_old_is_lost) {
    open_cells();
    Event first = writes(W_READ, 1), old = use(W_LOAD, bytes(2, 1), bytes(1, 1));
    for (int i = 0; i < 1000; i++) writes(W_LOAD, 3);
    use(STORE, bytes(4, 1), bytes(1, 2));
    CU_ASSERT(waits_for(old) && waits_for(first));
}

/* A view of more numbers than an int counts becomes several moves, without a gap. */
TEST(a_move_of_more_than_an_int_counts_becomes_several) {
    const Tensor view = {.tier = TIER_CPU, .type = F16, .rows = 6, .cols = 1 << 29, .ld = 1 << 29};
    Move moves[8];
    Bytes end = 0;
    const int n = add_move(moves, 0, view, view);
    for (int i = 0; i < n; i++) {
        CU_ASSERT(moves[i].dst.cols > 0 && moves[i].dst.offset == end && moves[i].src.offset == end);
        end += tensor_bytes(moves[i].dst);
    }
    CU_ASSERT(n > 1 && end == tensor_bytes(view));
}
