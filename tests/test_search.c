/* test_search.c: that what the search finds fits and keeps what was given, that nothing better lies beside it, and that
 * what it refuses is impossible. Times are those of the cost model; none is measured. */
#include "tests.h"

static Error err;

// ---------------------------------------------------------------------------------------------------------------
// Questions
// ---------------------------------------------------------------------------------------------------------------

static bool one_in(uint64_t *seed, int n) { return test_below(seed, n) == 0; }

/* A question to the search, with what it points to. */
typedef struct {
    Hardware hardware;
    Checkpoint *checkpoint;
    Task task;
    Search search;
} Case;

static void capacity_of(Search *s, const Hardware *h) {
    s->capacity[TIER_GPU] = (size_t)h->gmem, s->capacity[TIER_CPU] = (size_t)h->cmem,
    s->capacity[TIER_DISK] = (size_t)h->nmem;
}

/* Everything is open. */
static void case_open(Case *c, const OptConfig *config, const char *machine, int count, int s, int n) {
    if (hardware_read(&c->hardware, machine, &err)) CU_FAIL_FATAL(err.text);
    c->checkpoint = checkpoint_dummy(config, 0);
    c->task = (Task){.prompts = xcalloc(count, sizeof(Prompt)), .count = count};
    for (int i = 0; i < count; i++) c->task.prompts[i] = (Prompt){.s = s, .n = n};
    c->search = (Search){.hardware = &c->hardware,
                         .checkpoint = c->checkpoint,
                         .task = &c->task,
                         .act_type = F16,
                         .given = {.overlap = true, .page_tokens = 16}};
    capacity_of(&c->search, &c->hardware);
}

static void case_close(Case *c) {
    free(c->task.prompts);
    checkpoint_close(c->checkpoint);
}

/* The machine with its rates scaled, and memory that is a squeeze for the model, mostly. */
static void vary_machine(Case *c, uint64_t *seed) {
    Hardware *h = &c->hardware;
    const OptConfig *m = &c->checkpoint->config;
    double weights = 24. * m->h1 * m->h1 * m->l,
           kv = 0, *const bdw[] = {h->ctog_bdw, h->gtoc_bdw, h->dtoc_bdw, h->ctod_bdw};
    for (int i = 0; i < c->task.count; i++) kv += 4. * m->h1 * m->l * (c->task.prompts[i].s + c->task.prompts[i].n);
    if (one_in(seed, 3))
        h->gmem *= test_spread(seed, .01, 4), h->cmem *= test_spread(seed, .01, 4), h->nmem *= test_spread(seed, .01, 4);
    else
        h->gmem = weights * test_spread(seed, .05, 3) + kv * test_spread(seed, .01, 2),
        h->cmem = weights * test_spread(seed, .02, 3) + kv * test_spread(seed, .01, 2),
        h->nmem = weights * test_spread(seed, .1, 20);
    for (int link = 0; link < 4; link++)
        for (int stage = 0; stage < 2; stage++) bdw[link][stage] *= test_spread(seed, .1, 10);
    h->shared_cores = one_in(seed, 3);
    if (h->shared_cores) h->copy_core_s = test_spread(seed, 1e-12, 2e-11), h->disk_core_s = test_spread(seed, 1e-12, 1e-10);
    c->search.act_type = h->shared_cores ? F32 : F16;
    capacity_of(&c->search, h);
}

/* Shares of the three tiers, in whole percent, in thirds, all on one or as they come. */
static void random_pair(double *gpu, double *cpu, uint64_t *seed) {
    static const double round[][2] = {{1, 0}, {0, 1}, {0, 0}, {.5, .5}, {.3333, .6666}, {.25, 0}};
    int i = test_below(seed, 9);
    double g = (test_random(seed) + 1) / 2, p = (test_random(seed) + 1) / 2;
    *gpu = i < 6 ? round[i][0] : i < 8 ? floor(100 * g) / 100 : g;
    *cpu = i < 6 ? round[i][1] : i < 8 ? floor(100 * (1 - *gpu) * p) / 100 : (1 - *gpu) * p;
}

/* Some of what the search would look for is given. */
static void vary_given(Search *s, uint64_t *seed) {
    Policy *p = &s->given;
    double *const share[] = {&p->wg, &p->wc, &p->cg, &p->cc, &p->hg, &p->hc};
    for (int what = 0; what < 6; what += 2) {
        random_pair(share[what], share[what + 1], seed);
        int which = test_below(seed, 8); /* of the pair; mostly none */
        for (int i = 0; i < 2; i++) s->fixed[what + i] = which < 4 && (which >> i & 1);
        for (int i = 0; i < 2; i++) *share[what + i] *= s->fixed[what + i];
    }
    s->fixed_gbs = one_in(seed, 4), s->fixed_batches = one_in(seed, 4), s->fixed_attention = one_in(seed, 4);
    s->fixed_schedule = one_in(seed, 3);
    if (s->fixed_gbs) p->gbs = (int)test_spread(seed, 1, 2 * s->task->count + 1);
    if (s->fixed_batches) p->num_gpu_batches = (int)test_spread(seed, 1, 12);
    if (s->fixed_schedule) p->schedule = (Schedule)test_below(seed, 3);
    if (p->schedule == SCHEDULE_ROW && !s->fixed_batches) s->fixed_batches = true, p->num_gpu_batches = 1;
    if (s->fixed_attention) p->delegated = one_in(seed, 2);
    const bool packs = s->checkpoint->config.h1 % GROUP == 0; /* and so is h2, and heads are whole sixteens */
    if (one_in(seed, 4)) p->weight_packed = packs;
    if (one_in(seed, 4)) p->cache_packed = packs;
    if (one_in(seed, 4)) p->sparsity = .1, s->fixed_attention = p->delegated = true;
    if (one_in(seed, 4)) s->may_pack = packs;
    p->overlap = !one_in(seed, 8);
    p->page_tokens = one_in(seed, 4) ? 1 + test_below(seed, 64) : 16;
}

/* Large models mean more layers to plan, so that they get few prompts. */
static void random_case(Case *c, uint64_t *seed) {
    static const char *const names[] = {"opt-125m", "opt-125m", "opt-125m", "opt-125m", "opt-125m", "opt-350m",
                                        "opt-350m", "opt-350m", "opt-1.3b", "opt-1.3b", "opt-2.7b", "opt-6.7b",
                                        "opt-13b",  "opt-30b",  "opt-66b",  "opt-175b"};
    static const char *const machines[] = {"hardware/t4.json", "hardware/rtx4090.json", "hardware/h100.json",
                                           "hardware/laptop.json", "hardware/t4-fitted.json"};
    OptConfig small = SMALL_CONFIG(2), config = one_in(seed, 5) ? small : opt_named(names[test_below(seed, 16)]);
    int limit = imin(1000, config.max_pos - 30), s = (int)test_spread(seed, 1, limit), n = (int)test_spread(seed, 1, 20);
    int count = (int)test_spread(seed, 1, config.l > 24 ? 8 : one_in(seed, 16) ? 300 : 20);
    case_open(c, &config, machines[test_below(seed, 5)], count, s, n);
    for (int i = 0, mixed = one_in(seed, 2); mixed && i < count; i++)
        c->task.prompts[i] = (Prompt){.s = (int)test_spread(seed, 1, limit), .n = (int)test_spread(seed, 1, 20)};
    c->search.one_block = one_in(seed, 4);
    vary_machine(c, seed);
    vary_given(&c->search, seed);
}

// ---------------------------------------------------------------------------------------------------------------
// Answers
// ---------------------------------------------------------------------------------------------------------------

static bool near(double a, double b) { return fabs(a - b) <= 1e-12 * fabs(b); } /* a few roundings */

/* Whether the policy's plan fits, asked of the plan alone. */
static bool plan_of_policy_fits(const Search *s, const Policy *p) {
    Error why;
    Task task = *s->task;
    if (s->one_block) task.count = imin(task.count, block_size(p));
    Plan *plan = plan_make(s->checkpoint, p, &task, s->act_type, &why);
    bool fits = plan && check_fits(plan, s->capacity, true, &why) == 0;
    plan_free(plan);
    return fits;
}

static bool keeps_what_was_given(const Search *s, const Policy *p) {
    const Policy *g = &s->given;
    const double share[] = {p->wg, p->wc, p->cg, p->cc, p->hg, p->hc}, given[] = {g->wg, g->wc, g->cg, g->cc, g->hg, g->hc};
    bool kept = p->overlap == g->overlap && p->page_tokens == g->page_tokens && p->gbs >= 1 && p->num_gpu_batches >= 1;
    for (int i = 0; i < 6; i++) kept = kept && (!s->fixed[i] || fabs(share[i] - given[i]) < 1e-9);
    kept = kept && (!s->fixed_gbs || p->gbs == g->gbs) && (!s->fixed_batches || p->num_gpu_batches == g->num_gpu_batches);
    kept = kept && (!s->fixed_attention || p->delegated == g->delegated);
    kept = kept && (p->weight_packed == g->weight_packed || (p->weight_packed && s->may_pack)); /* given, or added */
    kept = kept && (p->cache_packed == g->cache_packed || (p->cache_packed && s->may_pack));
    kept = kept && p->sparsity == (g->sparsity > 0 ? g->sparsity : 1); /* a plan fills in what was left open */
    bool same =
        p->schedule == SCHEDULE_ZIGZAG && g->schedule == SCHEDULE_DIAGONAL && !s->fixed_batches; /* it adds nothing */
    return kept && (!s->fixed_schedule || p->schedule == g->schedule || same);
}

static bool has_shares(const Policy *p) {
    const double pair[][2] = {{p->wg, p->wc}, {p->cg, p->cc}, {p->hg, p->hc}};
    bool ok = true;
    for (int i = 0; i < 3; i++) ok = ok && pair[i][0] >= 0 && pair[i][1] >= 0 && pair[i][0] + pair[i][1] <= 1 + 1e-9;
    return ok;
}

/* The cost model, asked about the policy as it is, says the same. */
static bool is_what_the_model_predicts(const Search *s, const Found *f) {
    Found again;
    Search given = *s;
    given.given = f->policy;
    if (policy_predict(&again, &given, &err)) return false;
    const Cost *a = &f->cost, *b = &again.cost;
    bool same = near(a->T, b->T) && near(a->T_pre, b->T_pre) && near(a->T_gen, b->T_gen) && near(f->latency, again.latency);
    for (int t = 0; t < NTIERS; t++) same = same && a->peak[t] == b->peak[t] && a->peak[t] <= (double)s->capacity[t];
    return same && near(a->throughput, b->throughput);
}

static void say(const Search *s, const Policy *p, const char *what, int trial) {
    fprintf(
        stderr,
        "\n    %s, trial %d: %s, %d prompts%s, %d x %d, %s, att %d, table %d, w %g/%g c %g/%g h %g/%g, given %d%d%d%d%d%d, "
        "latency %g\n",
        what, trial, s->checkpoint->config.name, s->task->count, s->one_block ? " (one block)" : "", p->gbs,
        p->num_gpu_batches, schedule_name[p->schedule], p->delegated, p->table_home, p->wg, p->wc, p->cg, p->cc, p->hg,
        p->hc, s->fixed[0], s->fixed[1], s->fixed[2], s->fixed[3], s->fixed[4], s->fixed[5], s->max_latency);
}

#define EXPECT(holds)                                    \
    do {                                                 \
        if (!(holds)) say(s, &f->policy, #holds, trial); \
        CU_ASSERT(holds);                                \
    } while (0)

static void check_found(const Search *s, const Found *f, int trial) {
    const Cost *c = &f->cost;
    EXPECT(plan_of_policy_fits(s, &f->policy));
    EXPECT(keeps_what_was_given(s, &f->policy));
    EXPECT(has_shares(&f->policy));
    EXPECT(c->T > 0 && isfinite(c->T) && c->throughput > 0 && isfinite(c->throughput) && c->T_pre > 0 && c->T_gen >= 0);
    EXPECT(is_what_the_model_predicts(s, f));
    EXPECT(f->latency > 0 && (s->max_latency <= 0 || f->latency <= s->max_latency));
    EXPECT(f->latency <= c->T * (1 + 1e-9));
}

/* What the list is sorted by: on shared cores twice the batches must bring two percent, and where a block may have any
 * size, twice the block one. */
static double worth(const Search *s, const Found *f) {
    const double block = block_size(&f->policy), batches = block / f->policy.gbs;
    return f->cost.throughput /
           (1 + (s->hardware->shared_cores ? .02 * log2(batches) : 0) + (s->one_block ? .01 * log2(block) : 0));
}

/* The smallest block that the question allows, with all that is open on one tier: some corner that fits, and that is quick
 * enough. */
static bool some_corner_does(const Search *s, Policy *corner) {
    Search one = *s;
    Policy *p = &one.given;
    p->weight_packed |= s->may_pack, p->cache_packed |= s->may_pack;
    Found found;
    double *const share[] = {&p->wg, &p->wc, &p->cg, &p->cc, &p->hg, &p->hc};
    if (!s->fixed_gbs) p->gbs = 1;
    if (!s->fixed_batches) p->num_gpu_batches = 1;
    for (int where = 0; where < 81 * 2; where++) {
        const int home[] = {where % 3, where / 3 % 3, where / 9 % 3};
        bool possible = true;
        p->table_home = (Tier)(where / 27 % 3);
        if (s->fixed_attention && where >= 81) break;
        if (!s->fixed_attention) p->delegated = where >= 81;
        for (int what = 0; what < 3; what++) {
            const bool *fixed = s->fixed + 2 * what;
            possible = possible && !(fixed[0] && fixed[1] && home[what]); /* once is enough where nothing is open */
            double *gpu = share[2 * what], *cpu = share[2 * what + 1];
            if (!fixed[0]) *gpu = home[what] == TIER_GPU ? 1 - (fixed[1] ? *cpu : 0) : 0;
            if (!fixed[1]) *cpu = home[what] == TIER_CPU ? 1 - (fixed[0] ? *gpu : 0) : 0;
            possible = possible && *gpu + *cpu <= 1 + 1e-9;
        }
        *corner = *p;
        if (possible && plan_of_policy_fits(s, p) &&
            (s->max_latency <= 0 || (!policy_predict(&found, &one, &err) && found.latency <= s->max_latency)))
            return true;
    }
    return false;
}

/* One line for the user: which tier is too small, or that the latency is. */
static bool names_a_reason(const Error *e) {
    static const char *const flag[] = {"--gpu-mem", "--cpu-mem", "--disk-mem", "--max-latency"};
    bool named = false;
    for (int i = 0; i < 4; i++) named = named || strstr(e->text, flag[i]);
    return e->code == EXIT_USAGE && named && !strchr(e->text, '\n');
}

/* Planning all corners of a deep model takes its time: of those every fourth is looked at. */
static void check_refusal(const Search *s, int trial) {
    Found refused = {.policy = s->given}, *f = &refused;
    Error said = err;
    EXPECT(names_a_reason(&said));
    EXPECT((s->checkpoint->config.l > 12 && trial % 4) || !some_corner_does(s, &f->policy));
}

// ---------------------------------------------------------------------------------------------------------------
// A thousand searches
// ---------------------------------------------------------------------------------------------------------------

enum { TEN = 10 };

/* Returns the number of policies, at most `most`; 0 where the search refused. */
static int ask(const Search *s, Found *found, int most, int trial) {
    err = (Error){0, ""};
    int n = policy_search(found, most, s, &err);
    CU_ASSERT(n <= most && n != 0);
    if (n < 0) check_refusal(s, trial);
    for (int i = 0; i < n; i++) check_found(s, &found[i], trial);
    for (int i = 1; i < n; i++) CU_ASSERT(worth(s, &found[i]) <= worth(s, &found[i - 1]));
    return imax(n, 0);
}

/* Some are asked again with less time than the best takes, or more. */
static void a_thousand_searches_find_policies_that_fit_or_say_why_not(void) {
    uint64_t seed = 1;
    int fits = 0, too_slow = 0;
    for (int trial = 0; trial < 1000; trial++) {
        Case c;
        Found found[TEN];
        random_case(&c, &seed);
        int n = ask(&c.search, found, one_in(&seed, 8) ? TEN : 1, trial);
        fits += n > 0;
        if (n > 0 && one_in(&seed, 5)) {
            c.search.max_latency = found[0].latency * test_spread(&seed, .05, 2);
            too_slow += !ask(&c.search, found, 2, trial);
        }
        case_close(&c);
    }
    CU_ASSERT(fits > 500 && fits < 900 && too_slow > 10);
}

// ---------------------------------------------------------------------------------------------------------------
// The best
// ---------------------------------------------------------------------------------------------------------------

/* All shares of three tiers in halves. */
enum { HALVES = 6 };
static const double halves[HALVES][2] = {{1, 0}, {0, 1}, {0, 0}, {.5, .5}, {.5, 0}, {0, .5}};

/* The best throughput of one block size and schedule, over both sides of attention and all placements in halves. */
static double best_of_placements(Search *s) {
    Policy *p = &s->given;
    double best = 0;
    for (int where = 0; where < HALVES * HALVES * HALVES * 2; where++) {
        const double *w = halves[where % HALVES], *c = halves[where / HALVES % HALVES];
        const double *h = halves[where / HALVES / HALVES % HALVES];
        Found found;
        Error why;
        p->wg = w[0], p->wc = w[1], p->cg = c[0], p->cc = c[1], p->hg = h[0], p->hc = h[1];
        p->delegated = where >= HALVES * HALVES * HALVES;
        for (int home = 0, fits = 0; home < NTIERS && !fits; home++) { /* the highest tier that leaves room for the rest */
            p->table_home = (Tier)home;
            fits = policy_predict(&found, s, &why) == 0;
            if (fits) best = fmax(best, found.cost.throughput);
        }
    }
    return best;
}

static double brute_force(const Search *search) {
    static const int block[][2] = {{1, 1}, {2, 1},  {4, 1}, {6, 1}, {12, 1}, {1, 3},
                                   {3, 2}, {1, 12}, {2, 6}, {4, 3}, {6, 2}};
    Search s = *search;
    double best = 0;
    for (size_t b = 0; b < sizeof block / sizeof *block; b++)
        for (int diagonal = 0; diagonal < 2; diagonal++) {
            s.given.gbs = block[b][0], s.given.num_gpu_batches = block[b][1];
            s.given.schedule = diagonal ? SCHEDULE_DIAGONAL : SCHEDULE_ZIGZAG;
            best = fmax(best, best_of_placements(&s));
        }
    return best;
}

/* Twelve prompts on machines of which one thing or another is scarce. The LP does not know that a sequence is not divided,
 * so that a block of two or three may be missed where it just fits: that may cost more, once. */
static void no_policy_of_a_grid_is_two_percent_better(void) {
    uint64_t seed = 11;
    int off = 0;
    OptConfig config = SMALL_CONFIG(2);
    for (int trial = 0; trial < 8; trial++) {
        Case c;
        Found found;
        case_open(&c, &config, "hardware/laptop.json", 12, 40, 12);
        vary_machine(&c, &seed);
        c.hardware.op_s = trial % 2 ? 1e-7 : 0; /* the model is tiny */
        double grid = brute_force(&c.search);
        int n = policy_search(&found, 1, &c.search, &err);
        CU_ASSERT(n == 1 || !grid);
        off += n == 1 && found.cost.throughput < .98 * grid;
        CU_ASSERT(n < 0 || found.cost.throughput >= .8 * grid);
        case_close(&c);
    }
    CU_ASSERT(off <= 1);
}

/* A machine whose GPU has room for a part only. */
static void open_squeeze(Case *c, const char *model, int count, int s, int n) {
    OptConfig config = opt_named(model);
    double weights = 24. * config.h1 * config.h1 * config.l;
    case_open(c, &config, "hardware/laptop.json", count, s, n);
    c->hardware.gmem = 3e8 + .3 * weights, c->hardware.cmem = 3e8 + 1.5 * weights;
    capacity_of(&c->search, &c->hardware);
}

/* The LP's bound never falls (test_policy.c); what is found by steps and rounded may, by little. */
static void more_memory_is_at_most_a_little_worse(void) {
    uint64_t seed = 12;
    for (int trial = 0; trial < 30; trial++) {
        Case c;
        Found before, after;
        random_case(&c, &seed);
        c.search.max_latency = 0;
        if (policy_search(&before, 1, &c.search, &err) == 1) {
            for (int t = 0; t < NTIERS; t++) {
                Search more = c.search;
                more.capacity[t] *= 2;
                CU_ASSERT_EQUAL_FATAL(policy_search(&after, 1, &more, &err), 1);
                CU_ASSERT(worth(&more, &after) >= .98 * worth(&more, &before));
            }
        }
        case_close(&c);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Latency against throughput
// ---------------------------------------------------------------------------------------------------------------

enum { FRONTIER = 64 };

/* The frontier of a squeezed machine. Returns its number of points. */
static int open_frontier(Case *c, Found found[FRONTIER], const char *model, bool one_block) {
    open_squeeze(c, model, 96, 128, 16);
    c->search.one_block = one_block;
    return policy_frontier(found, FRONTIER, &c->search, &err);
}

static void the_frontier_rises_in_latency_and_in_throughput(void) {
    static const char *const models[] = {"opt-125m", "opt-1.3b", "opt-6.7b"};
    for (int m = 0; m < 3; m++)
        for (int one_block = 0; one_block < 2; one_block++) {
            Case c;
            Found found[FRONTIER], best;
            int n = open_frontier(&c, found, models[m], one_block), trial = m;
            CU_ASSERT(n > 3 && n < FRONTIER);
            for (int i = 0; i < n; i++) check_found(&c.search, &found[i], trial);
            for (int i = 1; i < n; i++)
                CU_ASSERT(found[i].latency > found[i - 1].latency &&
                          found[i].cost.throughput > found[i - 1].cost.throughput);
            CU_ASSERT_EQUAL(policy_search(&best, 1, &c.search, &err), 1);
            CU_ASSERT(found[n - 1].cost.throughput >= best.cost.throughput * (1 - 1e-12));
            case_close(&c);
        }
}

/* With the latency of any of its points as the limit the search finds that point, or one that is nearly as good: it comes
 * to the limit by steps. */
static void a_limit_on_latency_finds_the_frontiers_point(void) {
    static const char *const models[] = {"opt-125m", "opt-1.3b"};
    for (int m = 0; m < 2; m++)
        for (int one_block = 0; one_block < 2; one_block++) {
            Case c;
            Found found[FRONTIER], limited;
            int n = open_frontier(&c, found, models[m], one_block);
            for (int i = 0; i < n; i++) {
                c.search.max_latency = found[i].latency * (1 + 1e-9);
                CU_ASSERT_EQUAL_FATAL(policy_search(&limited, 1, &c.search, &err), 1);
                CU_ASSERT(worth(&c.search, &limited) >= .93 * worth(&c.search, &found[i]));
            }
            case_close(&c);
        }
}

static void a_latency_that_cannot_be_is_refused_with_the_least(void) {
    Case c;
    Found found;
    double least = 0;
    open_squeeze(&c, "opt-125m", 96, 128, 16);
    c.search.max_latency = 1e-6;
    CU_ASSERT_EQUAL(policy_search(&found, 1, &c.search, &err), -1);
    CU_ASSERT(err.code == EXIT_USAGE && strstr(err.text, "1e-06 s") && strstr(err.text, "--max-latency"));
    const char *takes = strstr(err.text, "takes ");
    CU_ASSERT_FATAL(takes && sscanf(takes, "takes %lf", &least) == 1);
    Policy corner;
    c.search.max_latency = least * .99;
    CU_ASSERT(!some_corner_does(&c.search, &corner));
    c.search.max_latency = least * 1.01; /* it is said in three digits */
    CU_ASSERT_EQUAL(policy_search(&found, 1, &c.search, &err), 1);
    CU_ASSERT_EQUAL(policy_frontier(&found, 1, &c.search, &err), 1);
    CU_ASSERT(found.latency <= c.search.max_latency);
    case_close(&c);
}

// ---------------------------------------------------------------------------------------------------------------
// By hand
// ---------------------------------------------------------------------------------------------------------------

/* Where the GPU has room for everything, nothing is gained elsewhere; but for a CPU that is fast enough to attend too. */
static void a_gpu_with_room_for_all_gets_all(void) {
    Case c;
    Found found;
    OptConfig config = opt_named("opt-1.3b");
    case_open(&c, &config, "hardware/h100.json", 64, 128, 32);
    c.hardware.cpu_flops[0] = c.hardware.cpu_flops[1] = c.hardware.cpu_bdw = 1e9;
    CU_ASSERT_EQUAL(policy_search(&found, 1, &c.search, &err), 1);
    const Policy *p = &found.policy;
    CU_ASSERT(p->wg == 1 && p->cg == 1 && p->hg == 1 && p->table_home == TIER_GPU && block_size(p) >= 64);
    CU_ASSERT_STRING_EQUAL(found.cost.slowest[0], "gpu^g");
    CU_ASSERT(!found.cost.full[0][0] && !found.cost.full[1][0] && !found.cost.full[2][0]);
    case_close(&c);
}

/* The row schedule has one batch in flight, whatever num_gpu_batches says: its block is one batch. */
static void the_row_schedule_keeps_one_batch_in_flight(void) {
    Case c;
    Found found[TEN];
    open_squeeze(&c, "opt-350m", 48, 64, 8);
    c.search.fixed_schedule = c.search.fixed_batches = true;
    c.search.given.schedule = SCHEDULE_ROW, c.search.given.num_gpu_batches = 4;
    int n = ask(&c.search, found, TEN, 0);
    CU_ASSERT_FATAL(n > 1);
    for (int i = 0; i < n; i++)
        CU_ASSERT(found[i].policy.schedule == SCHEDULE_ROW && block_size(&found[i].policy) == found[i].policy.gbs);
    double row = worth(&c.search, &found[0]);
    c.search.fixed_schedule = c.search.fixed_batches = false;
    CU_ASSERT(ask(&c.search, found, 1, 1) == 1 && worth(&c.search, &found[0]) >= row * (1 - 1e-12));
    case_close(&c);
}

/* Two blocks take twice as long as one and no longer: the search says so of the whole task, and of a block. */
static void two_blocks_take_twice_the_time_of_one(void) {
    Case c;
    Found one, two;
    open_squeeze(&c, "opt-350m", 32, 64, 8);
    c.search.given.gbs = 8, c.search.given.num_gpu_batches = 2;
    c.search.given.wc = c.search.given.cc = c.search.given.hc = 1;
    ASSERT_OK(policy_predict(&two, &c.search, &err));
    c.task.count = 16;
    ASSERT_OK(policy_predict(&one, &c.search, &err));
    CU_ASSERT(fabs(two.cost.T / one.cost.T - 2) < 1e-9);
    CU_ASSERT(fabs(two.cost.throughput / one.cost.throughput - 1) < 1e-9);
    CU_ASSERT(fabs(two.latency / one.latency - 1) < 1e-9 && near(one.latency, one.cost.T));
    c.task.count = 32, c.search.one_block = true; /* as one block of the task's */
    ASSERT_OK(policy_predict(&two, &c.search, &err));
    CU_ASSERT(near(two.cost.T, one.cost.T) && near(two.latency, one.latency));
    case_close(&c);
}

static void a_block_takes_as_long_as_its_longest_prompt(void) {
    for (int longest = 0; longest < 3; longest++) {
        Case c;
        Found found;
        open_squeeze(&c, "opt-350m", 3, 64, 2);
        c.task.prompts[longest].n = 8;
        c.search.given.gbs = 3, c.search.given.num_gpu_batches = 1;
        c.search.given.wc = c.search.given.cc = c.search.given.hc = 1;
        ASSERT_OK(policy_predict(&found, &c.search, &err));
        CU_ASSERT(near(found.latency, found.cost.T)); /* all sweeps are this block's */
        case_close(&c);
    }
}

/* Returns the token/s that the LP of a policy promises with so many workspaces. */
static double bound_with(const Search *s, Policy p, int workspaces) {
    static Lp lp;
    LpAnswer answer;
    double tokens, seconds = 0;
    p.workspaces = workspaces;
    policy_lp(&lp, &tokens, s, &p);
    lp_solve(&answer, &lp);
    CU_ASSERT_EQUAL_FATAL(answer.verdict, LP_OPTIMAL);
    for (int v = LAYER_S; v < RUNTIME_VARS; v++) seconds += lp.c[v] * answer.x[v];
    return tokens / seconds;
}

/* Of policies that promise nearly the same, the search finds the one with more workspaces. Here the smaller batches gain
 * more than a percent with fewer, the largest less. */
static void fewer_workspaces_must_bring_one_percent(void) {
    int fewer = 0, nearly = 0;
    for (int gbs = 24; gbs <= 48; gbs += 8) {
        Case c;
        Found found;
        open_squeeze(&c, "opt-125m", 4 * gbs, 128, 16);
        Search *s = &c.search;
        s->capacity[TIER_GPU] *= 2;
        s->given.gbs = gbs, s->given.num_gpu_batches = 4;
        s->fixed_gbs = s->fixed_batches = s->fixed_schedule = s->fixed_attention = true;
        CU_ASSERT_EQUAL_FATAL(policy_search(&found, 1, s, &err), 1);
        const double more = bound_with(s, found.policy, 3), less = bound_with(s, found.policy, 2);
        CU_ASSERT_EQUAL(found.policy.workspaces, less > 1.01 * more ? 2 : 3);
        fewer += less > 1.01 * more, nearly += less > more && less <= 1.01 * more;
        case_close(&c);
    }
    CU_ASSERT(fewer && nearly); /* or the test would say nothing */
}

/* Short prompts are followed by as many long ones. Of 4,096 every second one is looked at: these are the prompts of the
 * task of half as many, so that the block is the same. */
static void a_long_task_is_looked_at_from_its_beginning_to_its_end(void) {
    enum { LOOKED_AT = 2048 };
    Found found[2];
    for (int times = 1; times <= 2; times++) {
        Case c;
        open_squeeze(&c, "opt-125m", times * LOOKED_AT, 16, 4);
        for (int i = c.task.count / 2; i < c.task.count; i++) c.task.prompts[i].s = 400;
        CU_ASSERT_EQUAL_FATAL(policy_search(&found[times - 1], 1, &c.search, &err), 1);
        case_close(&c);
    }
    CU_ASSERT(found[0].policy.gbs == found[1].policy.gbs);
    CU_ASSERT(found[0].policy.num_gpu_batches == found[1].policy.num_gpu_batches);
}

/* What an LP says that a tier holds at the fractions of a plan, or NAN. */
static double lp_memory(const Lp *lp, const Found *f, Tier tier, const Search *s) {
    double x[LP_MAX_VARS] = {0};
    memcpy(x, f->cost.fraction, sizeof f->cost.fraction);
    for (int i = 0; i < lp->m; i++)
        if (!strcmp(lp->row[i].name, memory_row[tier])) return (double)s->capacity[tier] + lp_excess(&lp->row[i], x, lp->n);
    return NAN;
}

/* Several flights sweep in turn: each has a cache of its own, which the search's LP counts as the plan does (but for
 * layers that stream more than the mean one), makes its own tokens, and the block that counts is one of each. */
static void every_flight_has_its_own_cache_tokens_and_block(void) {
    static Lp lp;
    for (int flights = 1; flights <= 4; flights++) {
        Case c;
        Found found;
        double tokens;
        open_squeeze(&c, "opt-1.3b", 48, 200, 8);
        Search *s = &c.search;
        s->capacity[TIER_GPU] *= 4, s->capacity[TIER_DISK] = s->capacity[TIER_CPU];
        s->given.gbs = 4, s->given.num_gpu_batches = 3, s->given.flights = flights, s->one_block = true;
        s->fixed_gbs = s->fixed_batches = s->fixed_flights = true;
        s->given.cg = .5, s->fixed[2] = s->fixed[3] = true; /* half of all caches on the disk */
        CU_ASSERT_EQUAL_FATAL(policy_search(&found, 1, s, &err), 1);
        policy_lp(&lp, &tokens, s, &found.policy);
        for (int t = 0; t < NTIERS; t++)
            CU_ASSERT(fabs(lp_memory(&lp, &found, (Tier)t, s) - found.cost.peak[t]) <= .05 * (double)s->capacity[t]);
        CU_ASSERT_EQUAL(tokens, flights * 12 * 8);
        CU_ASSERT(near(found.latency, found.cost.T) && near(found.cost.throughput * found.cost.T, tokens));
        s->one_block = false; /* 48 prompts are four blocks, of which each flight has one or more */
        s->given = found.policy;
        ASSERT_OK(policy_predict(&found, s, &err));
        if (flights != 3) CU_ASSERT(near(found.latency * 4 / flights, found.cost.T));
        case_close(&c);
    }
}

/* Of weights a tenth of a percent, of the rest a sequence: a tier has nothing at all, or that. */
static void a_share_is_nothing_or_a_step_at_least(void) {
    for (int step = 0; step < 24; step++) {
        Case c;
        Found found[TEN];
        open_squeeze(&c, "opt-1.3b", 24, 200, 8);
        c.search.capacity[TIER_GPU] = (size_t)((double)c.search.capacity[TIER_GPU] * (1 + .07 * step));
        const int n = policy_search(found, TEN, &c.search, &err);
        for (int i = 0; i < n; i++) {
            const Policy *p = &found[i].policy;
            const double share[3][2] = {{p->wg, p->wc}, {p->cg, p->cc}, {p->hg, p->hc}};
            for (int w = 0; w < 3; w++) {
                const double least = .5 / (w ? 24 : 1000), rest = 1 - share[w][0] - share[w][1];
                CU_ASSERT(rest == 0 || rest > least);
                for (int t = 0; t < 2; t++) CU_ASSERT(share[w][t] == 0 || share[w][t] > least);
            }
        }
        CU_ASSERT(n > 0);
        case_close(&c);
    }
}

static void a_given_policy_is_found_as_it_is(void) {
    Case c;
    Found found[TEN], predicted;
    open_squeeze(&c, "opt-1.3b", 24, 64, 8);
    Search *s = &c.search;
    s->given =
        (Policy){.wg = .123, .wc = .456, .cg = .1, .cc = .8999, .hg = .01, .hc = .99, .gbs = 7, .num_gpu_batches = 3};
    s->given.overlap = true, s->given.page_tokens = 16, s->given.delegated = true;
    for (int i = 0; i < 6; i++) s->fixed[i] = true;
    s->fixed_gbs = s->fixed_batches = s->fixed_schedule = s->fixed_attention = true;
    CU_ASSERT_EQUAL_FATAL(ask(s, found, TEN, 0), 1);
    const Policy *p = &found[0].policy, *g = &s->given;
    CU_ASSERT(p->wg == g->wg && p->wc == g->wc && p->cg == g->cg && p->cc == g->cc && p->hg == g->hg && p->hc == g->hc);
    CU_ASSERT(p->gbs == 7 && p->num_gpu_batches == 3 && p->schedule == SCHEDULE_ZIGZAG && p->delegated);
    s->given.table_home = p->table_home;
    ASSERT_OK(policy_predict(&predicted, s, &err));
    CU_ASSERT(near(predicted.cost.T, found[0].cost.T));
    s->capacity[TIER_CPU] = 1 << 20; /* and refused as it is */
    CU_ASSERT_EQUAL(ask(s, found, TEN, 1), 0);
    CU_ASSERT(strstr(err.text, "CPU") && strstr(err.text, "--cpu-mem"));
    case_close(&c);
}

/* A tenth of a percent of OPT-175B's weights are 350 MB: a plan that is over its tier by less takes another step. With
 * every percent of memory more the one block that is asked for is found, and hardly ever is it slower. */
static void a_step_of_the_percentages_does_not_lose_the_best(void) {
    Case c;
    Found found;
    double before = 0;
    OptConfig config = opt_named("opt-175b");
    case_open(&c, &config, "hardware/h100.json", 8, 400, 8);
    Search *s = &c.search;
    s->given.gbs = 8, s->given.num_gpu_batches = 1, s->given.cc = 0;
    s->fixed_gbs = s->fixed_batches = s->fixed_schedule = s->fixed_attention = s->fixed[3] = true;
    for (int step = 0; step < 60; step++) {
        s->capacity[TIER_CPU] = (size_t)(1.2e11 * (1 + .01 * step));
        CU_ASSERT_EQUAL_FATAL(policy_search(&found, 1, s, &err), 1);
        CU_ASSERT(found.cost.throughput >= .98 * before);
        before = found.cost.throughput;
    }
    case_close(&c);
}

/* 25 x 6 puts all 150 prompts into one block. The search comes to it because it rounds batches up: rounded down, they would
 * leave some prompts to a second block. */
static void a_block_has_room_for_its_share_of_the_task(void) {
    Case c;
    Found found;
    OptConfig config = opt_named("opt-30b");
    case_open(&c, &config, "hardware/t4.json", 150, 512, 32);
    CU_ASSERT_EQUAL_FATAL(ask(&c.search, &found, 1, 0), 1);
    CU_ASSERT(found.policy.gbs == 25 && found.policy.num_gpu_batches == 6);
    case_close(&c);
}

/* What is shown with one digit behind the point can be typed in again: the same tensors and sequences are dealt. */
static void shares_that_are_found_have_three_digits(void) {
    Case c;
    Found found[TEN];
    open_squeeze(&c, "opt-1.3b", 70, 200, 16);
    int n = ask(&c.search, found, TEN, 0);
    CU_ASSERT_EQUAL(n, TEN);
    for (int i = 0; i < n; i++) {
        Policy shown = found[i].policy;
        double *const share[] = {&shown.wg, &shown.wc, &shown.cg, &shown.cc, &shown.hg, &shown.hc};
        for (int f = 0; f < 6; f++) *share[f] = round(*share[f] * 1000) / 1000;
        Plan *as_shown = plan_make(c.checkpoint, &shown, &c.task, F16, &err);
        Plan *as_found = plan_make(c.checkpoint, &found[i].policy, &c.task, F16, &err);
        CU_ASSERT_EQUAL(memcmp(as_shown->achieved, as_found->achieved, sizeof as_shown->achieved), 0);
        CU_ASSERT_EQUAL(memcmp(as_shown->total, as_found->total, sizeof as_shown->total), 0);
        plan_free(as_shown), plan_free(as_found);
    }
    case_close(&c);
}

/* The frontier's shortest block with enough throughput is not much shorter than what is found for somebody who waits. */
static void who_waits_gets_a_shorter_block_where_that_costs_little(void) {
    static const char *const machine[] = {"hardware/t4.json", "hardware/laptop.json"};
    bool shorter = false;
    for (int i = 0; i < 4; i++) {
        Case c;
        Found best, sooner, all[FRONTIER];
        const OptConfig config = opt_named(i < 2 ? "opt-6.7b" : "opt-125m");
        case_open(&c, &config, machine[i % 2], 400, 128, 32);
        CU_ASSERT_FATAL(policy_sooner(&best, &sooner, &c.search, &err) > 0);
        CU_ASSERT(sooner.cost.throughput >= .95 * best.cost.throughput && sooner.latency <= best.latency);
        const int n = policy_frontier(all, FRONTIER, &c.search, &err);
        int first = 0;
        while (first < n - 1 && all[first].cost.throughput < .95 * best.cost.throughput) first++;
        CU_ASSERT(sooner.latency <= 1.25 * all[first].latency);
        const int searched = policy_search(all, FRONTIER, &c.search, &err);
        for (int k = 0; k < searched; k++)
            CU_ASSERT(all[k].latency >= sooner.latency || all[k].cost.throughput < .95 * best.cost.throughput);
        shorter = shorter || sooner.latency < .7 * best.latency;
        case_close(&c);
    }
    CU_ASSERT(shorter); /* or the test would say nothing */
}

static void a_tier_that_is_too_small_is_named(void) {
    static const char *const flag[] = {"--gpu-mem", "--cpu-mem"};
    for (int t = 0; t < 2; t++) {
        Case c;
        Found found;
        open_squeeze(&c, "opt-1.3b", 8, 64, 8);
        c.search.capacity[t] = 100;
        if (t == TIER_CPU) c.search.capacity[TIER_GPU] = (size_t)1 << 40;
        CU_ASSERT_EQUAL(policy_search(&found, 1, &c.search, &err), -1);
        CU_ASSERT(err.code == EXIT_USAGE && strstr(err.text, tier_name[t]) && strstr(err.text, flag[t]));
        CU_ASSERT_EQUAL(policy_frontier(&found, 1, &c.search, &err), -1);
        CU_ASSERT(err.code == EXIT_USAGE && strstr(err.text, flag[t]));
        CU_ASSERT(!strstr(err.text, "--percent") && !strstr(err.text, "--gpu-batch-size")); /* which nobody has given */
        case_close(&c);
    }
}

/* With so many bytes more than it says that it needs beside what it has, there is a policy. */
static void a_refusal_says_the_least_that_would_do(void) {
    Case c;
    Found found;
    double needs, has;
    open_squeeze(&c, "opt-125m", 8, 64, 8);
    c.search.capacity[TIER_CPU] = c.search.capacity[TIER_DISK] = (size_t)1 << 40;
    c.search.capacity[TIER_GPU] = 100;
    CU_ASSERT_EQUAL(policy_search(&found, 1, &c.search, &err), -1);
    CU_ASSERT_EQUAL(sscanf(strstr(err.text, "needs"), "needs %lf MiB and has %lf MiB", &needs, &has), 2);
    for (int more = -1; more <= 1; more += 2) { /* a tenth of a MiB is what it leaves out */
        c.search.capacity[TIER_GPU] = (size_t)((needs + .1 * more) * 1048576);
        CU_ASSERT_EQUAL(policy_search(&found, 1, &c.search, &err) > 0, more > 0);
    }
    case_close(&c);
}

/* In this program instead of libc's: may turn equals round, as libc's does with some when it finds no memory. */
static bool turn_equals;

static int compare_by(const void *a, const void *b, void *compare) {
    return (*(int (**)(const void *, const void *))compare)(a, b);
}

void qsort(void *base, size_t n, size_t size, int (*compare)(const void *, const void *)) {
    char *at = base, *one = xcalloc(size, 1);
    if (!turn_equals) qsort_r(base, n, size, compare_by, &compare);
    for (size_t i = 1; i < n && turn_equals; i++) {
        size_t to = i;
        memcpy(one, at + i * size, size);
        while (to && compare(at + (to - 1) * size, one) > -1) to--;
        memmove(at + (to + 1) * size, at + to * size, (i - to) * size);
        memcpy(at + to * size, one, size);
    }
    free(one);
}

static void what_is_found_does_not_depend_on_the_order_of_equals(void) {
    Found found[2][FRONTIER];
    int n[2][2];
    Case c;
    const OptConfig config = opt_named("opt-1.3b");
    case_open(&c, &config, "hardware/t4.json", 8, 64, 8);
    for (int frontier = 0; frontier < 2; frontier++) {
        for (int turned = 0; turned < 2; turned++) {
            turn_equals = turned;
            n[frontier][turned] = frontier ? policy_frontier(found[turned], FRONTIER, &c.search, &err)
                                           : policy_search(found[turned], FRONTIER, &c.search, &err);
        }
        turn_equals = false;
        CU_ASSERT_FATAL(n[frontier][0] > 1 && n[frontier][0] == n[frontier][1]);
        for (int i = 0; i < n[frontier][0]; i++) {
            const Policy *x = &found[0][i].policy, *y = &found[1][i].policy;
            CU_ASSERT(x->gbs == y->gbs && x->num_gpu_batches == y->num_gpu_batches && x->flights == y->flights);
            CU_ASSERT(x->schedule == y->schedule && x->delegated == y->delegated && x->wg == y->wg);
        }
    }
    case_close(&c);
}

/* A link is as slow as it is given and no faster than it is, in prefill and in generation; what is not given stays. */
static void the_search_is_for_links_as_slow_as_they_are_given(void) {
    uint64_t seed = 12;
    for (int given = 0; given < 1 << 4; given++) {
        Options o = {.link = {0}};
        Hardware h = test_fast_machine(), expected;
        double *const link[] = {h.ctog_bdw, h.gtoc_bdw, h.dtoc_bdw, h.ctod_bdw};
        double *const slow[] = {expected.ctog_bdw, expected.gtoc_bdw, expected.dtoc_bdw, expected.ctod_bdw};
        for (int c = CTOG; c <= CTOD; c++)
            for (int stage = 0; stage < 2; stage++) link[c][stage] = test_spread(&seed, 1e8, 1e10);
        expected = h;
        for (int c = CTOG; c <= CTOD; c++) {
            if (!(given >> c & 1)) continue;
            o.link[c] = test_spread(&seed, 1e8, 1e10);
            for (int stage = 0; stage < 2; stage++)
                if (o.link[c] < link[c][stage]) slow[c][stage] = o.link[c];
        }
        const TaskRun run = {.options = &o, .hardware = &h, .sim = true};
        ASSERT_OK(know_machine(&run, &err));
        CU_ASSERT(!memcmp(&h, &expected, sizeof h));
    }
}

CU_TestInfo tests[] = {
    {"a thousand searches find policies that fit or say why not",
     a_thousand_searches_find_policies_that_fit_or_say_why_not},
    {"no policy of a grid is two percent better", no_policy_of_a_grid_is_two_percent_better},
    {"more memory is at most a little worse", more_memory_is_at_most_a_little_worse},
    {"the frontier rises in latency and in throughput", the_frontier_rises_in_latency_and_in_throughput},
    {"a limit on latency finds the frontier's point", a_limit_on_latency_finds_the_frontiers_point},
    {"a latency that cannot be is refused with the least", a_latency_that_cannot_be_is_refused_with_the_least},
    {"a GPU with room for all gets all", a_gpu_with_room_for_all_gets_all},
    {"the row schedule keeps one batch in flight", the_row_schedule_keeps_one_batch_in_flight},
    {"two blocks take twice the time of one", two_blocks_take_twice_the_time_of_one},
    {"a block takes as long as its longest prompt", a_block_takes_as_long_as_its_longest_prompt},
    {"fewer workspaces must bring one percent", fewer_workspaces_must_bring_one_percent},
    {"a long task is looked at from its beginning to its end", a_long_task_is_looked_at_from_its_beginning_to_its_end},
    {"every flight has its own cache, tokens and block", every_flight_has_its_own_cache_tokens_and_block},
    {"a share is nothing or a step at least", a_share_is_nothing_or_a_step_at_least},
    {"a given policy is found as it is", a_given_policy_is_found_as_it_is},
    {"a step of the percentages does not lose the best", a_step_of_the_percentages_does_not_lose_the_best},
    {"a block has room for its share of the task", a_block_has_room_for_its_share_of_the_task},
    {"shares that are found have three digits", shares_that_are_found_have_three_digits},
    {"who waits gets a shorter block where that costs little", who_waits_gets_a_shorter_block_where_that_costs_little},
    {"a tier that is too small is named", a_tier_that_is_too_small_is_named},
    {"a refusal says the least that would do", a_refusal_says_the_least_that_would_do},
    {"what is found does not depend on the order of equals", what_is_found_does_not_depend_on_the_order_of_equals},
    {"the search is for links as slow as they are given", the_search_is_for_links_as_slow_as_they_are_given},
    CU_TEST_INFO_NULL,
};
