/* test_plan.c: placements achieved, sequences dealt, plans that fit and plans that do not, what the sweeps of a plan do,
 * page pools. That a plan is used to the byte is test_schedule.c's; who is admitted when, test_admission.c's. */
#include "tests.h"
#include "written.h"
#include "batch.h"
#include "branches/fit.h"

/* The model and the task of the current test, and the newest plan for them. */
static Checkpoint *model;
static Task task;
static Plan *plan;
static Error err;

/* Opens a dummy and a task of equal prompts, and closes those of the test before. */
static void open_task(OptConfig config, int count, int s, int n) {
    plan_free(plan);
    plan = NULL;
    free_task(&task);
    checkpoint_close(model);
    model = checkpoint_dummy(&config, 0);
    task = equal_task(count, s, n);
}

static bool makes(const Policy *p, Type act) {
    plan_free(plan);
    plan = plan_make(model, p, &task, act, &err);
    return plan;
}

static void make(const Policy *p) { CU_ASSERT_FATAL(makes(p, F16)); }

static const OptConfig small = SMALL_CONFIG(-1);

TEST(weight_fractions_are_met_to_the_share_of_one_tensor) {
    static const char *const names[] = {"opt-125m", "opt-350m", "opt-1.3b", "opt-30b", "opt-175b"};
    for (int m = 0; m < 5; m++) {
        const OptConfig config = opt_named(names[m]);
        Tier(*home)[NROLES] = xcalloc(config.l, sizeof *home);
        double size[NROLES], total = 0, largest = 0;
        for (int r = 0; r < NROLES; r++) {
            int rows, cols;
            opt_role_shape(&config, r, &rows, &cols);
            size[r] = (double)rows * cols, total += config.l * size[r], largest = fmax(largest, size[r]);
        }
        for (int g = 0; g <= 100; g++)
            for (int c = 0; c <= 100 - g; c++) {
                const double share[NTIERS] = {g / 100., c / 100., (100 - g - c) / 100.};
                double numbers[NTIERS] = {0};
                place_weights(home, &config, share[0], share[1]);
                for (int w = 0; w < config.l * NROLES; w++) numbers[home[w / NROLES][w % NROLES]] += size[w % NROLES];
                for (int t = 0; t < NTIERS; t++)
                    CU_ASSERT(fabs(numbers[t] - share[t] * total) <= (share[t] > 0 ? largest : 0));
            }
        free(home);
    }
}

/* Within a batch the tiers do not decrease. */
TEST(sequences_are_dealt_to_within_one) {
    enum { GBS = 4 };
    static const int counts[] = {1, 2, 7, 12, 30};
    Seat seats[30];
    for (int g = 0; g <= 100; g++)
        for (int c = 0; c <= 100 - g; c += 7) {
            const int count = counts[(g + c) % 5];
            const double share[NTIERS] = {g / 100., c / 100., (100 - g - c) / 100.},
                         swapped[NTIERS] = {share[1], share[0], share[2]};
            const Policy p = on_tiers(0, 0, share[0], share[1], share[1], share[0], GBS, 8);
            int kv[NTIERS] = {0}, act[NTIERS] = {0};
            deal_block(seats, &p, count);
            for (int i = 0; i < count; i++) {
                const Seat *seat = &seats[i];
                kv[seat->kv]++, act[seat->act]++;
                CU_ASSERT(seat->k == i / GBS && seat->prompt == -1);
                CU_ASSERT(i % GBS == 0 || (seat->kv >= seat[-1].kv && seat->act >= seat[-1].act));
            }
            for (int t = 0; t < NTIERS; t++)
                CU_ASSERT(fabs(kv[t] - share[t] * count) < 1 && fabs(act[t] - swapped[t] * count) < 1);
        }
}

TEST(every_gpu_batch_has_its_part_of_each_tier) {
    Seat seats[40];
    const Policy p = on_tiers(0, 0, .5, .25, 1, 0, 8, 5);
    int per[5][NTIERS] = {{0}};
    deal_block(seats, &p, 40);
    for (int i = 0; i < 40; i++) per[seats[i].k][seats[i].kv]++;
    for (int k = 0; k < 5; k++) CU_ASSERT(per[k][0] == 4 && per[k][1] == 2 && per[k][2] == 2);
}

static double bytes_of(RegionId id, Tier tier) { return (double)plan->region[id][tier].bytes; }

/* The paper's section 3: l (8 h1^2 + 4 h1 h2) bytes of weights, 4 b l h1 (s + n) bytes of KV cache at the peak. s + n - 1
 * tokens are stored, since the last one made is never read: they fill 34 pages of 16. */
TEST(the_plan_of_opt_30b_has_the_papers_sizes) {
    Policy p = on_tiers(.2, .8, 0, 1, 0, 1, 48, 3);
    p.delegated = true;
    open_task(opt_named("opt-30b"), 144, 512, 32);
    make(&p);
    const double weights = 48 * (8. * 7168 * 7168 + 4. * 7168 * 28672);
    CU_ASSERT_DOUBLE_EQUAL(bytes_of(RESTING_WEIGHTS, TIER_CPU) / weights, .8, .01);
    CU_ASSERT_DOUBLE_EQUAL(bytes_of(RESTING_WEIGHTS, TIER_GPU) / weights, .2, .01);
    CU_ASSERT_EQUAL(bytes_of(KV_CACHE, TIER_CPU), 144. * 48 * 34 * 16 * 4 * 7168);
    CU_ASSERT_EQUAL(bytes_of(KV_CACHE, TIER_GPU), 0);
    CU_ASSERT_EQUAL(bytes_of(ACTIVATIONS, TIER_CPU), 144. * 512 * 7168 * 2);
    CU_ASSERT_EQUAL(plan->total[TIER_DISK], 0);
    for (int t = 0; t < NTIERS; t++) { /* regions tile their tier */
        Bytes at = 0;
        for (int id = 0; id < NREGIONS; id++) {
            if (!plan->region[id][t].bytes) continue;
            CU_ASSERT_EQUAL(plan->region[id][t].offset, at);
            at += plan->region[id][t].bytes;
        }
        CU_ASSERT_EQUAL(at, plan->total[t]);
    }
}

/* A.2.1: at the end of a block every sequence has the KV of s + n tokens. In the diagonal schedule with K = n a
 * batch of bls / n sequences ends in every sweep, and those in flight have made 1 to n - 1 tokens. */
TEST(the_papers_estimate_of_the_cache_is_of_its_schedule) {
    enum { BATCHES = 5, GBS = 4, S = 7, N = BATCHES };
    const double token = 4. * small.h1 * small.l;
    double diagonal = 0;
    for (int made = 1; made < N; made++) diagonal += GBS * token * (S + made);
    open_task(small, GBS * BATCHES, S + 2, N);
    for (int i = 0; i < task.count; i += 2) task.prompts[i].s -= 4; /* S in the mean */
    for (int schedule = 0; schedule < 3; schedule++) {
        Policy p = all_gpu(GBS, BATCHES);
        p.schedule = schedule;
        make(&p);
        const double expected = schedule == SCHEDULE_DIAGONAL ? diagonal : block_size(&p) * token * (S + N);
        CU_ASSERT_DOUBLE_EQUAL(plan->a21_kv, expected, 1e-9 * expected);
    }
}

/* With smaller batches, or fewer; where one batch of one prompt is all, with neither. */
TEST(the_advice_is_about_what_can_be_smaller) {
    static const struct {
        int gbs, batches;
        const char *advice;
    } cases[] = {{4, 2, "lower --gpu-batch-size"},
                 {2, 4, "lower --gpu-batch-size"},
                 {1, 8, "lower --num-gpu-batches"},
                 {1, 1, "shorten prompts"}};
    open_task(opt_named("opt-125m"), 8, 64, 8);
    for (size_t i = 0; i < 2 * COUNT(cases); i++) {
        const int given = i % 2; /* --percent */
        const Bytes capacity[NTIERS] = {SIZE_MAX, (size_t)given << 12, SIZE_MAX};
        const Policy p = on_tiers(given, !given, !given, given, 1, 0, cases[i / 2].gbs, cases[i / 2].batches);
        make(&p);
        CU_ASSERT_EQUAL(check_fits(plan, capacity, given, &err), -1);
        CU_ASSERT(strstr(err.text, cases[i / 2].advice) && strstr(err.text, ", or raise --cpu-mem"));
        CU_ASSERT_EQUAL(strstr(err.text, "--percent") != NULL, given);
        CU_ASSERT_EQUAL(plan_missing(plan, capacity), plan->total[TIER_CPU] - capacity[TIER_CPU]);
    }
}

/* The largest term, 16 GiB of it, is the cache. */
TEST(a_plan_that_does_not_fit_names_term_and_flag) {
    static const char *const flag[NTIERS] = {"--gpu-mem", "--cpu-mem", "--disk-mem"};
    const Policy p = all_gpu(16, 4);
    open_task(opt_named("opt-6.7b"), 64, 512, 32);
    make(&p);
    Bytes room[NTIERS] = {plan->total[0], plan->total[1], plan->total[2]};
    CU_ASSERT_EQUAL(check_fits(plan, room, true, &err), 0);
    for (int tier = 0; tier < NTIERS; tier++) {
        if (!room[tier]) continue;
        room[tier]--;
        CU_ASSERT_EQUAL(check_fits(plan, room, true, &err), -1);
        CU_ASSERT_EQUAL(err.code, EXIT_USAGE);
        CU_ASSERT(strstr(err.text, flag[tier]) && strstr(err.text, tier_name[tier]));
        room[tier]++;
    }
    room[TIER_GPU] = (Bytes)1 << 30;
    CU_ASSERT_EQUAL(check_fits(plan, room, true, &err), -1);
    CU_ASSERT(strstr(err.text, "KV cache") && strstr(err.text, "--percent"));
}

/* The entrance of the diagonal schedule may hold any number of topups up to the batch size: their plan takes no time that
 * grows with its square. */
TEST(a_diagonal_of_very_large_batches_is_planned) {
    enum { GBS = 20000 };
    Policy p = on_tiers(1, 0, 1, 0, .5, .25, GBS, 2);
    p.schedule = SCHEDULE_DIAGONAL;
    open_task(opt_named("opt-125m"), 2 * GBS, 4, 2);
    make(&p);
    CU_ASSERT_EQUAL(plan->batches, 3);
    CU_ASSERT_EQUAL(plan->act_rows[TIER_CPU][2], GBS / 4 * 4); /* a quarter of the topups, four rows each */
}

/* Of each batch a quarter is on the GPU. Two have six sequences off it between them, four of which may end in one sweep, so
 * that those which enter for them have no row on the GPU. */
TEST(an_entrance_has_room_for_the_rows_off_the_gpu_of_all_batches) {
    enum { GBS = 4, S = 10 };
    open_task(small, 20, S, 4);
    for (int batches = 1; batches <= 2; batches++) {
        Policy p = on_tiers(1, 0, .25, .5, 1, 0, GBS, batches);
        p.schedule = SCHEDULE_DIAGONAL;
        make(&p);
        CU_ASSERT_EQUAL(plan->off_rows, (batches == 1 ? 3 : GBS) * S);
    }
}

/* For the next token of the 2 sequences of each batch under way. Not on the host, nor for greedy or given tokens. */
TEST(only_where_a_gpu_would_sample_do_logits_come_down) {
    const Policy p = all_gpu(2, 5);
    open_task(opt_named("opt-125m"), 10, 4, 2);
    for (int way = 0; way < 8; way++) {
        task.scored = way & 2, sample(&task, (Sampling){.temperature = way & 1});
        CU_ASSERT_FATAL(makes(&p, way & 4 ? F16 : F32));
        CU_ASSERT_EQUAL(plan->region[LOGITS][TIER_CPU].bytes, way == 5 ? WORKSPACES * 2 * 50272 * 4 : 0);
    }
}

/* Of the 8 sequences of a batch half are off the GPU. Their last tokens attend to 71, of which each of 12 heads chooses a
 * tenth of the past ones and the token itself: 8 numbers, and as many weights. */
TEST(each_head_of_a_sparse_query_has_room_for_what_it_chooses) {
    Policy p = on_tiers(1, 0, .5, .25, 1, 0, 8, 2);
    p.delegated = true, p.sparsity = .1;
    open_task(opt_named("opt-125m"), 16, 64, 8);
    make(&p);
    for (RegionId id = CHOSEN; id <= CHOSEN_PROBS; id++) {
        CU_ASSERT_EQUAL(bytes_of(id, TIER_GPU), 8 * 12 * 8 * 4);
        CU_ASSERT_EQUAL(bytes_of(id, TIER_CPU), 4 * 12 * 8 * 4);
    }
}

TEST(prompts_beyond_the_positions_are_refused) {
    static const int lengths[][2] = {{2048, 1}, {2049, 1}, {2048, 2}, {0, 1}, {1, 0}, {1, 2049}, {1, 0x7fffffff}};
    const Policy p = all_gpu(1, 1);
    open_task(opt_named("opt-125m"), 1, 1, 1);
    for (int i = 0; i < 7; i++) {
        task.prompts->s = lengths[i][0], task.prompts->n = lengths[i][1];
        CU_ASSERT_EQUAL(makes(&p, F32), i == 0);
    }
}

// ---- What the sweeps have to do -------------------------------------------------------------------------------------

/* What ran on a sim, in sweeps that only decode and in others, counted in layer 0 and where tokens are picked. */
static struct {
    Device was; /* the sim's own functions */
    const Plan *plan;
    int sweep; /* the newest one; -1: none */
    Workload work[2];
} seen;

/* Counts an op. An index table of the GPU is filled on the CPU, and is read there. */
static Event count_op(Device *d, const Op *op) {
    Workload *w = &seen.work[op->prefill_sweep];
    const bool prefill = op->code == OP_ATTEND_PREFILL;
    if ((prefill || op->code == OP_ATTEND) && !op->j) {
        const Region *table = seen.plan->region[INDEX_TABLES];
        Tensor t = prefill ? op->prefilled.start : op->attend.len;
        if (t.tier == TIER_GPU) t.offset += table[TIER_CPU].offset - table[TIER_GPU].offset;
        t.tier = TIER_CPU;
        const int32_t *row = d->cpu_address(d, t);
        for (int r = 0; !prefill && r < t.cols; r++) w->past += row[r];
        for (int r = 0; prefill && r + 1 < t.cols; r++) {
            const double s = row[r + 1] - row[r];
            w->prompt_rows += s;
            w->pairs += s * (s + 1) / 2;
        }
    }
    if (op->code == OP_PICK) {
        w->sweeps += op->i > seen.sweep, seen.sweep = op->i, w->head_rows += op->pick.ids.cols;
        *(op->prefill ? &w->prefills : &w->decodes) += 1;
        *(op->prefill ? &w->prompts : &w->decoded) += op->pick.ids.cols;
    }
    return seen.was.post(d, op);
}

/* Policies of all schedules, with everything on one tier or a bit everywhere, and prompts of one length or of many, of
 * which topups come. Nobody stops early. */
TEST(the_planned_work_is_what_runs) {
    static const double share[][2] = {{1, 0}, {0, 1}, {0, 0}, {.4, .3}};
    uint64_t seed = 5;
    Hardware h;
    ASSERT_OK(hardware_read(&h, "hardware/laptop.json", &err));
    for (int trial = 0; trial < 120; trial++) {
        const double *c = share[trial / 3 % 4], *a = share[trial / 12 % 4];
        const int count = 1 + trial * 7 % 30, mixed = trial / 2 % 2;
        Policy p = on_tiers(.5, .5, c[0], c[1], a[0], a[1], 1 + trial % 5, 1 + trial % 4);
        p.page_tokens = 4, p.flights = trial / 2 % 4, p.schedule = trial % 3, p.delegated = trial & 1;
        open_task(small, count, 40, 12);
        for (int i = 0; i < count; i++) {
            task.prompts[i].s = mixed ? 1 + test_below(&seed, 40) : 17;
            task.prompts[i].n = mixed ? 1 + test_below(&seed, 12) : 8;
        }
        Rig r = {.model = model, .policy = p, .task = &task, .sim = &h};
        CU_ASSERT_EQUAL_FATAL(rig_open(&r), 0);
        memset(&seen, 0, sizeof seen);
        seen.was = *r.device, seen.plan = r.plan, seen.sweep = -1;
        r.device->post = count_op;
        CU_ASSERT_EQUAL(rig_run(&r), 0);
        const Workload *work = r.plan->work;
        CU_ASSERT(!memcmp(seen.work, work, sizeof seen.work)); /* whole numbers, so that they are exact */
        CU_ASSERT(r.stats.prefill_sweeps == work[1].sweeps && r.stats.sweeps == r.plan->sweeps);
        CU_ASSERT(work[0].sweeps + work[1].sweeps == r.plan->sweeps && work[0].prompts == 0);
        CU_ASSERT(work[0].decoded + work[1].decoded + count == r.stats.generated && work[1].prompts == count);
        rig_close(&r);
    }
}

// ---- What is chosen for a plan to fit -------------------------------------------------------------------------------

/* All layers stream from the disk, through slots that are larger than the table: so off the GPU it takes nothing there, and
 * off the CPU nothing on it. */
TEST(the_table_rests_on_the_highest_tier_that_has_room) {
    Policy p = on_tiers(0, 0, 1, 0, 1, 0, 2, 2);
    Bytes need[NTIERS][NTIERS];
    open_task(opt_named("opt-13b"), 4, 64, 8);
    const Bytes table = (Bytes)model->config.vocab * model->config.h1 * 2;
    for (int home = 0; home < NTIERS; home++) {
        p.table_home = home;
        make(&p);
        memcpy(need[home], plan->total, sizeof need[home]);
        if (home) CU_ASSERT(need[home - 1][home - 1] > need[home][home - 1] + table / 2);
    }
    for (int home = 0; home < NTIERS; home++) { /* as much as it takes there, and nothing more */
        p.table_home = (home + 1) % NTIERS;
        ASSERT_OK(fit_policy(&p, model, &task, F16, need[home], &err));
        CU_ASSERT_EQUAL((int)p.table_home, home);
    }
    need[TIER_DISK][TIER_DISK]--;
    CU_ASSERT_EQUAL(fit_policy(&p, model, &task, F16, need[TIER_DISK], &err), -1);
    CU_ASSERT(err.code == EXIT_USAGE && strstr(err.text, "the disk tier needs") && strstr(err.text, "--disk-mem"));
    double needs = 0, has = 0; /* by a byte, which shows */
    CU_ASSERT_EQUAL(sscanf(strstr(err.text, "needs"), "needs %lf MiB and has %lf MiB", &needs, &has), 2);
    CU_ASSERT(needs > has && needs < has + 1e-4);
}

/* 50272 tokens are 786 groups of 768 columns. Off the GPU the head passes through both slots there, and from the disk
 * through both slots of the CPU as well. */
TEST(a_packed_head_takes_its_groups_on_every_tier) {
    static const Bytes halfs = 50272 * 768 * 2, packed = 786 * 768 * 36;
    static const int times[NTIERS][NTIERS] = {{1, 0, 0}, {2, 1, 0}, {2, 2, 1}};
    Policy p = all_gpu(2, 2);
    open_task(opt_named("opt-125m"), 4, 16, 4);
    p.weight_packed = true;
    for (int home = 0; home < NTIERS; home++) {
        Bytes before[NTIERS];
        p.table_home = home, p.head_packed = false;
        make(&p);
        memcpy(before, plan->total, sizeof before);
        p.head_packed = true;
        make(&p);
        CU_ASSERT_EQUAL(plan->layer_bytes[home][plan->config.l], packed);
        for (int t = 0; t < NTIERS; t++) CU_ASSERT_EQUAL(before[t] - plan->total[t], times[home][t] * (halfs - packed));
    }
}

/* A GPU that holds exactly the plan with three workspaces gives a policy three, and with a byte less two. One that holds
 * exactly the plan with two gives it two, and with a byte less the policy is refused. */
TEST(a_policy_has_three_workspaces_or_two) {
    open_task(opt_named("opt-125m"), 32, 64, 8);
    for (int n = LEAST_WORKSPACES; n <= WORKSPACES; n++)
        for (int less = 0; less < 2; less++) {
            Policy p = on_tiers(0, 1, 1, 0, 1, 0, 8, 4);
            p.workspaces = n;
            make(&p);
            plan->total[TIER_GPU] -= less;
            p.workspaces = 0;
            const bool fits = !fit_policy(&p, model, &task, F16, plan->total, &err);
            CU_ASSERT_EQUAL(fits, n - less >= LEAST_WORKSPACES);
            CU_ASSERT_EQUAL(p.workspaces, fits ? n - less : WORKSPACES);
        }
}

/* As many of a prefill's 5,000 rows pass a layer, and its MLP, together as there is room for, and not one more. */
TEST(pieces_are_as_large_as_there_is_room_for) {
    static const int rows[] = {PIECE_ROWS, 2048, LARGE_PIECE_ROWS};
    Bytes before = 0;
    open_task(opt_named("opt-125m"), 50, 100, 8);
    for (int i = 0; i < 3; i++) {
        Policy p = all_gpu(50, 1);
        p.piece_rows = rows[i];
        make(&p);
        CU_ASSERT(plan->piece_rows == rows[i] && plan->region[MLP][TIER_GPU].rows == rows[i]);
        CU_ASSERT(plan->total[TIER_GPU] > before);
        before = plan->total[TIER_GPU];
        for (int less = 0; less < 2; less++) {
            plan->total[TIER_GPU] -= less;
            fit_pieces(&p, model, &task, F16, plan->total);
            CU_ASSERT_EQUAL(p.piece_rows, rows[imax(i - less, 0)]);
        }
    }
}

TEST(pools_hand_out_the_lowest_page_and_remember_their_peak) {
    PagePool pool;
    pool_open(&pool, 0, 130);
    for (int i = 0; i < 130; i++) CU_ASSERT_EQUAL(pool_take(&pool), i);
    pool_give(&pool, 100), pool_give(&pool, 3), pool_give(&pool, 64);
    CU_ASSERT_EQUAL(pool_take(&pool), 3);
    CU_ASSERT_EQUAL(pool_take(&pool), 64);
    CU_ASSERT_EQUAL(pool.used, 129);
    CU_ASSERT_EQUAL(pool.peak, 130);
    pool_close(&pool);
}

static void give_a_page_twice(void) {
    PagePool pool;
    pool_open(&pool, 0, 2);
    pool_give(&pool, pool_take(&pool));
    pool_give(&pool, 0);
}

/* A sequence that gave its pages back twice would share them with another one, and nothing else would tell. */
TEST(a_page_that_is_free_is_not_taken_back) { CU_ASSERT(aborts(give_a_page_twice)); }

/* As two slots of weights, which are two regions. */
TEST(a_printed_plan_has_a_line_for_each_name_and_adds_up) {
    enum { NAME = 34, NUMBER = 13 }; /* columns of a line */
    const Policy p = on_tiers(.3, .4, .5, .25, .5, .25, 2, 2);
    const Bytes capacity[NTIERS] = {1, 1, 1};
    char *text, name[NAME + 1], number[NUMBER + 1];
    size_t len;
    FILE *out = open_memstream(&text, &len);
    open_task(opt_named("opt-125m"), 4, 64, 8);
    make(&p);
    plan_print(out, plan, capacity);
    CHECK(!fclose(out));
    double sum[NTIERS] = {0};
    int n = 0;
    char *line = strchr(text, '\n') + 1; /* behind what the columns are */
    for (char *next; !strncmp(line, "  ", 2); line = next, n++) {
        next = strchr(line, '\n') + 1;
        CU_ASSERT_EQUAL_FATAL(next - line, NAME + NTIERS * NUMBER + 1);
        snprintf(name, sizeof name, "%s", line);
        CU_ASSERT_PTR_EQUAL(strstr(text, name), line);
        for (int t = 0; t < NTIERS; t++) {
            snprintf(number, sizeof number, "%s", line + NAME + t * NUMBER);
            sum[t] += atof(number); /* 0 of blanks */
        }
    }
    CU_ASSERT_FATAL(n > 5 && !strncmp(line, "planned ", 8));
    for (int t = 0; t < NTIERS; t++) {
        snprintf(number, sizeof number, "%s", line + NAME + t * NUMBER);
        CU_ASSERT_DOUBLE_EQUAL(sum[t], atof(number), .005 * (n + 1)); /* what rounding takes */
    }
    free(text);
}
