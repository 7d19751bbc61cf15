/* test_measure.c: what is measured of a machine is that machine. The machine is the sim, whose clock is nobody's watch:
 * each of its numbers is known, and has to come back out of the profile. The program is part of this one, so that its
 * commands measure that machine, too. */
#define main flexgen_main
#include "flexgen.c"
#undef main

#include <sys/wait.h>

#include "tests.h"

static Hardware machine; /* that the sim plays */
static Error err;

/* h1, h2, nh; nseq, rows, tokens; bytes of cold memory and of the disk's file; seconds */
static const ProfileSize size = {256, 1024, 4, 3, 64, 256, 8 << 20, 32 << 20, .01};
static const Bytes tiers[NTIERS] = {64 << 20, 96 << 20, 128 << 20};
static Bytes filled, to_fill, cold;

/* Only index tables have memory, of which the GPU's are the same bytes. */
static void upload(Device *device, Tensor to, size_t first, const void *from, size_t count) {
    int32_t *table = to.type == I32 && to.tier == TIER_CPU ? device->cpu_address(device, to) : NULL;
    if (table) memcpy(table + first, from, count * sizeof *table);
    filled += count * type_bytes(to.type);
}

static Event (*sim_post)(Device *, const Op *);

/* The pages of all sequences lie side by side, V's half of the cold memory behind K's, and where none were read before. */
static Event watched_post(Device *device, const Op *op) {
    static Bytes last;
    if (op->code == OP_ATTEND) {
        Tensor pages = tensor_flat(op->attend.pages);
        pages.tier = TIER_CPU;
        const int32_t *page = device->cpu_address(device, pages);
        for (int i = 0; i < pages.cols; i++) CU_ASSERT_EQUAL(page[i], i);
        CU_ASSERT(op->attend.k.offset != last && op->attend.v.offset == op->attend.k.offset + cold / 2);
        last = op->attend.k.offset;
    }
    return sim_post(device, op);
}

/* In this program instead of the host device and of the cuda device. */
Device *device_open(Gpu *gpu, const Plan *plan, const Checkpoint *checkpoint, const char *offload_dir, Error *error) {
    (void)gpu, (void)checkpoint, (void)offload_dir, (void)error;
    Device *device = sim_open(plan, &machine);
    filled = 0;
    to_fill = plan->total[TIER_GPU] + plan->total[TIER_CPU];
    cold = plan->region[RESTING_WEIGHTS][TIER_GPU].cols * sizeof(f16);
    sim_post = device->post;
    device->upload = upload;
    device->post = watched_post;
    return device;
}

/* Every rate is another round number, so that a wrong one shows. */
static void set_machine(void) {
    machine = machine_with(
        "ctog_bdw=12e9 gtoc_bdw=9e9 dtoc_bdw=3e9 ctod_bdw=1e9 gpu_bdw=40e9 op_s=2e-6 copy_core_s=3e-11 "
        "disk_core_s=7e-11 mm_flops=5e11 bmm_flops_g=8e9 bmm_flops_p=2e11 cpu_flops=6e9");
    machine.shared_cores = true;
}

static Hardware measured(void) {
    Hardware h;
    const ThisMachine here = {.offload_dir = temp_dir(), .threads = 1, .capacity = tiers};
    ASSERT_OK(profile_measure(&h, &size, &here, &err));
    return h;
}

static void assert_is(double found, double expected, const char *what) {
    const bool same = fabs(found - expected) <= .02 * expected; /* ops take their op_s beside what they do */
    if (!same) fprintf(stderr, "\n    %s: %g, expected %g\n", what, found, expected);
    CU_ASSERT(same);
}
#define IS_OF(h, field) assert_is((h)->field, machine.field, #field)
#define IS(field) IS_OF(&h, field)

TEST(a_measured_machine_has_the_rates_that_it_has) {
    set_machine();
    const Hardware h = measured();
    for (int p = 0; p < 2; p++) {
        for (int c = CTOG; c <= CTOD; c++) IS(bdw[c][p]);
        IS(mm_flops[p]), IS(bmm_flops[p]), IS(cpu_flops[p]);
    }
    IS(gpu_bdw), IS(op_s), IS(copy_core_s), IS(disk_core_s);
    assert_is(h.cpu_bdw, machine.cpu_flops[0], "cpu_bdw"); /* a flop a byte */
    /* A page that nobody has written costs nothing to read. Regions end at whole lines. */
    CU_ASSERT(filled <= to_fill && to_fill - filled < NREGIONS * 64);
}

/* Each with rates of its own, which rise more slowly than sizes, except those of prompts. Eight rows seem to take twice as
 * long as sixteen: something else was at work, since a smaller product never takes longer than a larger one. */
TEST(every_curve_is_measured_where_it_is) {
    static const Curve of_rows = {7, {1, 2, 4, 8, 16, 32, 64}, {0}}, of_tokens = {3, {16, 64, 256}, {0}};
    Hardware h;
    Curve *const is = &machine.mm_rows, *const found = &h.mm_rows; /* a machine's curves lie side by side */
    const int curves = (int)(&h.cpu_packed - found) + 1;
    set_machine();
    for (int c = 0; c < curves; c++) {
        const bool by_rows = is + c == &machine.mm_rows || is + c == &machine.mm_packed;
        is[c] = by_rows ? of_rows : of_tokens;
        for (int i = 0; i < is[c].n; i++) is[c].rate[i] = (by_rows ? 2e10 : 4e9) * (1 + c / 10.) * (i + 2);
    }
    machine.bmm_tokens[1].rate[2] *= 9;
    machine.mm_rows.rate[3] = machine.mm_rows.rate[4] / 4;
    h = measured();
    machine.mm_rows.rate[3] *= 2; /* the seconds of sixteen rows */
    for (int c = 0; c < curves; c++) {
        CU_ASSERT(found[c].n == is[c].n && !memcmp(found[c].size, is[c].size, sizeof is->size));
        for (int i = 0; i < is[c].n; i++) assert_is(found[c].rate[i], is[c].rate[i], "a rate of a curve");
    }
    assert_is(h.mm_flops[0], machine.mm_rows.rate[4], "mm_flops at 16 rows");
    assert_is(h.mm_flops[1], machine.mm_rows.rate[6], "mm_flops at 1024 rows");
    assert_is(h.cpu_bdw, machine.cpu_tokens.rate[2], "the best of cpu_tokens");
}

/* The machine was measured with so many threads, and with these tiers. */
static void assert_measured_with(const Hardware *h, int threads) {
    char name[40];
    snprintf(name, sizeof name, ", %d thread%s, host device", threads, plural(threads));
    CU_ASSERT_PTR_NOT_NULL(strstr(h->name, name));
    for (int t = 0; t < NTIERS; t++) CU_ASSERT_EQUAL(h->mem[t], (double)tiers[t]);
    IS_OF(h, ctog_bdw[0]);
}

TEST(a_search_measures_with_the_threads_and_tiers_of_its_run) {
    OptConfig config = opt_named("opt-125m");
    Checkpoint *model = checkpoint_dummy(&config, 0);
    set_machine();
    setenv("XDG_CACHE_HOME", temp_dir(), 1);
    for (int threads = 1; threads <= 2; threads++) {
        Options o = options_default();
        Hardware h = {.name = ""};
        TaskRun run = {.options = &o, .checkpoint = model, .hardware = &h, .threads = threads, .memory = (size_t)1 << 30};
        o.offload_dir = temp_dir();
        memcpy(run.capacity, tiers, sizeof tiers);
        for (int again = 0; again < 2; again++) { /* measured, and then read */
            ASSERT_OK(know_machine(&run, &err));
            assert_measured_with(&h, threads);
        }
    }
    host_set_threads(1);
    checkpoint_close(model);
}

TEST(the_command_profile_measures_with_the_threads_and_tiers_of_its_flags) {
    const char *dir = temp_dir(), *path = in_dir(dir, "machine.json");
    char threads[] = "1";
    set_machine();
    setenv("XDG_CACHE_HOME", dir, 1);
    for (; *threads <= '2'; ++*threads) {
        const char *args[] = {"flexgen",   "profile", "--device",   "host", "--threads",     threads, "--gpu-mem", "64M",
                              "--cpu-mem", "96M",     "--disk-mem", "128M", "--offload-dir", dir,     "--output",  path};
        int status;
        Hardware h;
        const pid_t pid = fork();
        CHECK(pid >= 0);
        if (!pid) {
            redirect(STDERR_FILENO, "/dev/null", O_WRONLY); /* the progress */
            _exit(flexgen_main(sizeof args / sizeof *args, (char **)args));
        }
        CU_ASSERT(waitpid(pid, &status, 0) == pid && status == 0);
        ASSERT_OK(hardware_read(&h, path, &err));
        assert_measured_with(&h, *threads - '0');
    }
}
