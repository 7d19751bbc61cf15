/* test_depend.c: what an op must come after, by hand. No device: ops are numbered as they would be posted. That this is
 * enough for all that the schedule posts is test_events.c's. */
#include "tests.h"

static Depend *depend;
static uint64_t posted[NLANES];

static Tensor cells(int first, int n) { return (Tensor){.rows = 1, .cols = 1, .cell = first, .ncells = n}; }

/* An op that writes some cells and reads others; what it waits for is left in `op`. */
static Op op;
static Event use(Lane lane, Tensor writes, Tensor reads) {
    op = (Op){.code = OP_UNPACK, .lane = lane};
    op.unpack.w = writes, op.unpack.packed = reads;
    depend_before(depend, &op);
    Event e = {(int)lane, ++posted[lane]};
    depend_posted(depend, &op, e);
    return e;
}
static Event writes(Lane lane, int cell) { return use(lane, cells(cell, 1), cells(0, 0)); }
static Event reads(Lane lane, int cell) { return use(lane, cells(0, 0), cells(cell, 1)); }

/* Begins a test: nobody has used a cell. */
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
    Event both = use(W_LOAD, cells(2, 1), cells(1, 1));
    use(PROJECT, cells(3, 1), cells(1, 2));
    CU_ASSERT(op.nafter == 1 && waits_for(both));
}

TEST(the_posting_thread_is_a_user_like_any_other) {
    Event wait[NLANES];
    open_cells();
    Tensor table = cells(1, 1);
    Event w = writes(C_LOAD, 1);
    reads(PROJECT, 1);
    CU_ASSERT(depend_poster(depend, wait, &table, READS) == 1 && wait[0].lane == C_LOAD && wait[0].seq == w.seq);
    CU_ASSERT(depend_poster(depend, wait, &table, WRITES) == 1 && wait[0].lane == PROJECT);
    depend_waited(depend, wait[0]);
    CU_ASSERT_EQUAL(depend_poster(depend, wait, &table, WRITES), 0);
}

TEST(joined_cells_and_folded_ones_keep_the_users_of_all) {
    open_cells();
    Event a = writes(W_READ, 1), b = reads(STORE, 2);
    depend_join(depend, 3, 1);
    depend_join(depend, 3, 2);
    writes(PROJECT, 3);
    CU_ASSERT(op.nafter == 2 && waits_for(a) && waits_for(b));
    Event parts[] = {writes(W_READ, 4), writes(C_READ, 5)};
    Tensor slot = cells(4, 2);
    depend_fold(depend, &slot);
    reads(FINISH, 5); /* had been written by one, now stands for both */
    CU_ASSERT(op.nafter == 2 && waits_for(parts[0]) && waits_for(parts[1]));
}

/* Of very old ops it is forgotten what they had waited for, never that they were there. */
TEST(nothing_old_is_lost) {
    open_cells();
    Event first = writes(W_READ, 1), old = use(W_LOAD, cells(2, 1), cells(1, 1));
    for (int i = 0; i < 1000; i++) writes(W_LOAD, 3);
    use(STORE, cells(4, 1), cells(1, 2));
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
