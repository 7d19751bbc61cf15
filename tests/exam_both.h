/* exam_both.h: what an exam and the judge both make of a question. */
#ifndef EXAM_BOTH_H
#define EXAM_BOTH_H
#include "exam.h"
#include "ops.h"
#include "tests.h"

/* Returns the op of a question about a kernel, which the exam has a GPU carry out, and the judge the host. Data lies at
 * `there`, on the GPU or here; x and y may be of another type. */
static inline Op kernel_op(const Kernel *c, Type act, const void *x, const void *y, const Data *there) {
    const f16 *second = there->pair + MOST_NUMBERS;
    const PageTable pool =
        paged(there->pair, second, there->pages, NULL, SEQUENCES, POOL / SEQUENCES, PER_PAGE, c->cols / 2, 1, false);
    if (c->what == NORMALIZE) return norm(act, c->onto ? x : y, x, there->pair, second, c->rows, c->cols);
    if (c->what == GATHER) return embedding(y, act, there->table, F16, c->cols, there->idx, c->rows, c->cols, c->onto);
    return appending(pool, there->table, c->cols, false, c->cols, there->seq, there->pos, c->rows);
}

/* Returns the engine of exercises 5 and 6, for the task and the model that the caller frees. */
static inline Rig run_rig(const RunCase *c, Checkpoint *model, Task *task, const char *dir) {
    Rig r = {.model = model, .policy = placed(c->share, c->gbs, c->num_gpu_batches), .task = task, .dir = dir};
    r.policy.page_tokens = c->page_tokens, r.policy.delegated = c->delegated;
    return r;
}
static inline Task run_task(const RunCase *c) {
    static const int n[PROMPTS] = {RUN_TOKENS, RUN_TOKENS, RUN_TOKENS, RUN_TOKENS, RUN_TOKENS};
    Task task = random_task(PROMPTS, c->s, n, VOCAB, c->words);
    task.keep_logits = true;
    return task;
}
static inline Checkpoint *run_model(const RunCase *c) {
    const OptConfig small = SMALL_CONFIG(-1);
    return checkpoint_dummy(&small, c->weights);
}

/* Returns an OPT-125M with l layers, for the sim. */
static inline OptConfig short_opt(int l) {
    OptConfig config = opt_named("opt-125m");
    config.l = l, config.eos = -1;
    return config;
}
static inline Policy on_cpu(Schedule schedule, int gbs, int K) {
    Policy p = on_tiers(0, 1, 0, 1, 0, 1, gbs, K);
    p.schedule = schedule, p.page_tokens = 1, p.table_home = TIER_CPU;
    return p;
}
/* Returns the machine and fills in the prompts of a race. */
static inline Hardware race_machine(Prompt prompts[RACING], const Race *c) {
    static int32_t ids[64];
    for (int i = 0; i < RACING; i++) prompts[i] = (Prompt){.ids = ids, .s = c->s[i], .n = c->n[i]};
    return machine_with("ctog_bdw=1e10 gtoc_bdw=1e10 mm_flops=1e14 bmm_flops=1e14");
}

/* Returns the question to the search; the caller has the machine, the model and the task. */
static inline Search search_of(const Question *c, const Hardware *machine, const Checkpoint *model, const Task *task) {
    Search s = open_question(machine, model, task);
    s.one_block = true, s.fixed_batches = c->fixed_batches, s.fixed_gbs = c->fixed_gbs;
    s.capacity[TIER_GPU] = c->gpu, s.capacity[TIER_CPU] = c->cpu;
    s.given.num_gpu_batches = c->num_gpu_batches, s.given.gbs = c->gbs;
    return s;
}
static inline OptConfig search_config(const Question *c) { return opt_named(c->large ? "opt-350m" : "opt-125m"); }
#endif
