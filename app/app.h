/* app.h: the program around the engine: what a user says and sees. */
#ifndef APP_H
#define APP_H
#include "cost/cost.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct World World;

// -------------------------------------------------------------------------------------------------
// quantize.c: a packed copy of a checkpoint
// -------------------------------------------------------------------------------------------------

/* What a copy came to. */
typedef struct {
    int files;
    bool untied;              /* as in the checkpoint */
    size_t before, after;     /* bytes of the source's files, of the copy's tensors */
    double bits, packed_bits; /* bits of a number: over the whole copy, over its packed matrices */
} CopyStats;

/* Writes a copy of the checkpoint in dir to the directory output, with the matrices of the layers
 * packed and the rest as F16. checkpoint_open reads it, and quantize.c says how it is laid out. A
 * shard has at most shard_bytes, or one layer. output must be new or empty. progress may be NULL.
 * -1 and err for what checkpoint_open, checkpoint_packs or checkpoint_pack refuse, for a checkpoint
 * that is packed already or an output that exists (both EXIT_USAGE), and for a full disk; then
 * nothing is left behind. A killed program leaves OUTPUT.tmp-PID, which the next one clears away.
 */
int checkpoint_quantize(CopyStats *stats, const char *dir, const char *output, Bytes shard_bytes,
                        int threads, FILE *progress, Error *err);

// -------------------------------------------------------------------------------------------------
// job.c: prompts in
// -------------------------------------------------------------------------------------------------

/* A prompt, and what has come of it. */
typedef struct {
    int line;        /* of the input, from 0 */
    char *id, *text; /* the id as JSON text ("7" with or without quotes); the prompt as given, if it
                        can be completed */
    char *error;     /* why it cannot be completed; NULL: it can */
    int32_t *ids;    /* s tokens, and behind them those that an earlier run had chosen */
    int s, n;        /* prompt length; tokens to generate at most */
    int32_t *tokens; /* those known so far, </s> included */
    int known;
    bool cut;            /* fewer than were asked for, since the model's positions end */
    bool ended, stopped; /* no more will come; because of </s> or a stop text */
} Request;

/* What a user asked for. The first line is to be set before reading. */
typedef struct {
    const Tokenizer *tokenizer;
    const OptConfig *config;
    int max_tokens;     /* where a prompt does not say */
    bool strict;        /* a prompt that is impossible refuses the job */
    const char *format; /* "jsonl", "text"; NULL: to be found out */
    Request *request;   /* [count], in the order of the input */
    int count;
    uint64_t digest; /* two jobs share it only if their prompts are the same */
    Task task;       /* what is left to do */
} Job;

/* Adds one prompt, given as a text. If it is impossible, it becomes a request with an error, or
 * with `strict` -1 and err. where names the prompt in messages. */
int job_add(Job *job, const char *text, size_t len, int line, const char *where, Error *err);
/* All prompts have been added: those without an id get one that nobody has, by default the number
 * of their line. One whose id an earlier one was given is impossible. name: of the input, for
 * messages. */
int job_settle(Job *job, const char *name, Error *err);
/* Prompts from a file or pipe ("-": standard input): JSON lines {"id"?, "prompt", "max_tokens"?} or
 * plain lines, by `format`, the file's name (.jsonl, .txt) or its first line. Blank lines are
 * skipped. An id is a string or a whole number below 2^53. Without `format`, plain lines that are
 * JSON objects and a file that is one JSON value are refused. */
int job_read(Job *job, const char *path, Error *err);
/* Makes the task of what has not ended yet: tokens that are known are part of a longer prompt. */
void job_rest(Job *job);
void job_free(Job *job);

/* The tokens of a text after </s>, with which OPT begins every text; the caller frees *ids. where
 * names the text in messages. Returns their number, or -1 and err. */
int text_encode(int32_t **ids, const char *text, size_t len, const char *where,
                const Tokenizer *tokenizer, const OptConfig *config, Error *err);

// -------------------------------------------------------------------------------------------------
// completions.c: how far a run is
// -------------------------------------------------------------------------------------------------

/* A line on standard error. The seconds of a sweep are taken to be a + b work, fitted to the sweeps
 * so far. */
typedef struct {
    bool on;
    double sweeps, work; /* of the whole run, if no sequence stops early */
    double pair;  /* the work of attending to one token; that of a row of the products is 1 */
    long tokens;  /* that are wanted; progress_open counts them where it finds 0 */
    double shown; /* when */
    double n, w, ww, t, wt; /* sums over sweeps: of 1, work, its square, seconds, work x seconds */
    double work_before, total_before; /* work and seconds of all sweeps before the newest */
} Progress;
void progress_open(Progress *progress, const Plan *plan, const Task *task);
/* After a sweep; `tokens` of those wanted have come. */
void progress_show(Progress *progress, const RunStats *stats, long tokens);
void progress_clear(const Progress *progress);
/* Seconds that are left; below 0: not known yet. */
double progress_left(const Progress *progress, const RunStats *stats);

// -------------------------------------------------------------------------------------------------
// journal.c: what a job has chosen so far, on disk
// -------------------------------------------------------------------------------------------------

typedef struct Journal Journal;
typedef struct {
    uint32_t place; /* of the prompt */
    int32_t token;
} Pair;
#define JOURNAL_VERSION "flexgen journal 1" /* a name in its first line */

/* Opens OUTPUT.journal, makes it if need be, and locks it until it is closed. -1 and err if another
 * process has it (EXIT_USAGE) for longer than patience, in seconds, or if it is something else. */
Journal *journal_open(const char *output, double patience, Error *err);
/* The object in its first line; NULL: the journal is new. */
const cJSON *journal_head(const Journal *journal);
const char *journal_path(const Journal *journal);
/* Calls take for every token in the order in which they were written. -1 and err if it returns -1.
 * Records that do not hold end the journal. */
typedef int TakeToken(void *ctx, uint32_t place, int32_t token);
int journal_read(Journal *journal, TakeToken *take, void *ctx, Error *err);
/* Begins it anew for a job; with head NULL it goes on behind what has been read. */
int journal_begin(Journal *journal, const cJSON *head, Error *err);
int journal_append(Journal *journal, const Pair *pairs, size_t n,
                   Error *err); /* one record, n > 0 */
int journal_sync(const Journal *journal, Error *err);
/* Its job has ended, and the file goes. */
int journal_remove(const Journal *journal, Error *err);
void journal_close(Journal *journal); /* which removes one that was never begun */

// -------------------------------------------------------------------------------------------------
// completions.c: what becomes of a job
// -------------------------------------------------------------------------------------------------

typedef struct Completions Completions;
typedef struct Options Options;

/* Looks at --output and locks it; nothing is changed yet. -1 and err if it is there and neither
 * --resume nor --overwrite is given. job and options must outlive it. */
Completions *completions_open(Job *job, const Tokenizer *tokenizer, const Options *options,
                              Error *err);
/* Whether there is a journal, so that the job can go on later. */
bool completions_last(const Completions *completions);
/* For a stage that only follows: the same tokens end its sequences, and nothing is written. */
Completions *completions_follow(Job *job, const Tokenizer *tokenizer, const Options *options);
/* With --resume: the head of the journal that is there, or NULL. */
const cJSON *completions_head(const Completions *completions);
/* With --resume: the requests of the job get the tokens that the journal has. head: what must be
 * the same in both. *finished: the job had ended. -1 and err if the output or the journal is of
 * another job. */
int completions_resume(Completions *completions, const cJSON *head, bool *finished, Error *err);
/* Opens the output, begins the journal (which then says `head`), starts the thread that writes. */
int completions_begin(Completions *completions, const cJSON *head, Error *err);
/* The listener that takes tokens. */
Listener completions_listener(Completions *completions);
Progress *completions_progress(Completions *completions);
/* Writes what is left and syncs it; then the journal goes. Returns status, the success of the run;
 * or if that is 0 and something could not be written, -1 and err. */
int completions_end(Completions *completions, int status, Error *err);
long completions_tokens(const Completions *completions); /* in all lines of the output */
void completions_free(Completions *completions);
/* Listener.done for runs that need no word of it. */
int completion_ignored(void *ctx, int prompt, const int32_t *tokens, int n, FinishReason reason,
                       Error *err);

// -------------------------------------------------------------------------------------------------
// eval.c: perplexity and last words (section 6.2, Table 6)
// -------------------------------------------------------------------------------------------------

/* A scored task made of texts, and its results. Prompts are windows of a text, or lines whose last
 * word counts. */
typedef struct {
    /* every scored token comes from a decoding step, which reads the KV cache; for a packed cache
     * or sparse attention. Otherwise a prompt is one prefill. To be set before reading */
    bool stepwise;
    Task task;
    int window;        /* tokens of each */
    long tokens, told; /* to be scored; scored so far */
    long unscored;     /* tokens of the text in no window, or first in one */
    size_t bytes;      /* of text that they stand for */
    double *nll;       /* [task.count] -log of the probability of all scored tokens of a prompt */
    bool *missed;      /* [task.count] one of them was not the greedy choice */
    Progress progress;
} Eval;

/* Reads a file as one text, with </s> in front, in windows of so many tokens (0: the model's
 * positions), of which the first `limit` count (0: all). The first token of a window is context
 * only. What is left after the last whole window is not scored; a text that is shorter than a
 * window is one window. */
int eval_text(Eval *eval, const char *path, int window, int limit, const Tokenizer *tokenizer,
              const OptConfig *config, Error *err);
/* Reads JSON lines {"text"}, of which the first `limit` count (0: all). The last word of each, with
 * the white space before it, is scored; white space at the end is left out. If a line is too long
 * for the model, its beginning is left out. */
int eval_lines(Eval *eval, const char *path, int limit, const Tokenizer *tokenizer,
               const OptConfig *config, Error *err);
/* The listener that adds up; ctx is the Eval. */
Listener eval_listener(Eval *eval);

/* The results, which do not depend on the order of scoring: nll is the mean of -log p over tokens,
 * perplexity is exp(nll); word_perplexity is the same over prompts, and accuracy the share of
 * prompts whose scored tokens were all greedy choices.
 */
typedef struct {
    double nll, perplexity, bits_per_byte; /* over tokens */
    double word_perplexity, accuracy;      /* over prompts */
} EvalResult;
EvalResult eval_result(const Eval *eval);
void eval_free(Eval *eval);

// -------------------------------------------------------------------------------------------------
// stage.c: what the stages of a pipeline agree on before a run (section 4.4)
// -------------------------------------------------------------------------------------------------

#define PIPELINE_VERSION "1" /* of what stages tell each other */

typedef struct {
    char **text;
    int n;
} Texts; /* the values of a flag that may be repeated */

/* A number that two command lines share if what must be the same on all stages is. */
uint64_t flags_digest(char **args, int n);
/* -1 and err, on all stages, if one has another model, other flags or another version than the
 * first. */
int stage_join(Net *net, const Checkpoint *checkpoint, uint64_t flags, Error *err);
/* How many of l layers this stage has, *first being the first of them: equally many, or as given.
 * -1 and err. */
int stage_layers(int *first, int l, const Net *net, const Texts *given, Error *err);
/* The first stage's task comes to all others, who then own it; a job's (NULL: it is none's) with
 * the tokens that are known already. */
int stage_share_task(Net *net, Task *task, Job *job, Error *err);
/* A line for each stage on the first one's standard error. */
int stage_print_plans(Net *net, const Plan *plan, int first, Error *err);

/* What the stage's device has noted and will note, under the stage's name. */
Trace *stage_trace(int stage, int first, int layers, size_t limit);
/* all[0] is what this stage has noted. The first stage gets the others' as all[1] and so on, with
 * its own clock; it frees their slices, even after a failure. */
int stage_gather_traces(Net *net, Trace *all, Error *err);

/* A simulated machine of a pipeline: its part of the model, from layer `first` on. */
typedef struct {
    Checkpoint part;
    int first;
    Plan *plan;
    Device *device;
    pthread_t thread;
    const Task *task;
    Listener listener;
    RunStats stats;
    Error err;
} Stage;
/* All of them; n 0: there is none. */
typedef struct {
    int n;
    Stage *stage;
    World *world;
} Stages;

/* The parts of m stages, as stage_layers has them; `whole` must outlive them. */
int stages_split(Stages *stages, const Checkpoint *whole, int m, const Texts *given, Error *err);
/* Their plans, each with the token table where there is room. -1 and err, which names the first
 * stage that has too little.
 */
int stages_plan(Stages *stages, const Policy *policy, const Task *task, Type act_type,
                const Bytes capacity[NTIERS], Error *err);
/* Their devices, with wires of so many bytes/s and a delay between them (device.h). */
void stages_open(Stages *stages, const Hardware *hardware, double bytes_s, double delay_s);
/* Runs the task on all. listener and stats are the first stage's. */
int stages_run(Stages *stages, const Task *task, const Listener *listener, RunStats *stats,
               Error *err);
/* With the traces of its devices. */
void stages_close(Stages *stages);

// -------------------------------------------------------------------------------------------------
// flags.c: the command line
// -------------------------------------------------------------------------------------------------

typedef enum { GENERATE, BENCH, POLICY, PROFILE, QUANTIZE, EVAL, NCOMMANDS } Command;

/* What the command line says. */
struct Options {
    const char *model, *prompts, *output, *json, *offload_dir, *device, *hardware, *trace;
    const char *perplexity, *last_word, *format;
    Texts prompt, stop, stages, with;
    int max_tokens, num_prompts, threads, window, limit;
    int prompt_len[2], gen_len[2]; /* least, most */
    Policy policy;                 /* gbs, num_gpu_batches 0: not given */
    bool fixed[6];                 /* which of wg wc cg cc hg hc are given */
    bool fixed_schedule, fixed_temperature, frontier, explain;
    bool compress_weight, compress_cache, allow_compression;
    Quant quant;        /* of compression; what is_study says is not stored, but studied */
    double max_latency; /* seconds of a block; 0: any number */
    bool paper_model;   /* --cost-model paper */
    int nodes;
    double net_gbps, net_ms;           /* of the machines on paper */
    double wire_bytes_s, wire_delay_s; /* of --net; 0: as it is */
    bool resume, overwrite, strict;
    bool verbose, help;
    Sampling sampling;
    Bytes capacity[NTIERS]; /* FROM_MACHINE: not given */
    double link[NCHANNELS]; /* bytes/s; 0: not slowed */
    bool links;             /* some link is */
};
#define FROM_MACHINE UINT64_MAX

Options options_default(void);
/* The command of that name; -1 and err (EXIT_USAGE) if there is none. */
int command_parse(Command *command, const char *name, Error *err);
/* Reads the n arguments after the command. -1 and err (EXIT_USAGE), which says what was expected,
 * or which known flag is nearest to an unknown one. */
int flags_parse(Options *options, Command command, char **args, int n, Error *err);
/* Checks that the flags go together: 0, or -1 and err (EXIT_USAGE). */
int flags_check(const Options *options, Command command, Error *err);
/* The help text: the commands and all flags. */
void flags_help(FILE *out);
/* Whether --device gives this name. */
bool device_is(const Options *options, const char *name);

// -------------------------------------------------------------------------------------------------
// report.c: what the commands say
// -------------------------------------------------------------------------------------------------

/* Prints the plan; with peak, after a run, only the totals with the measured peaks beside them. */
void plan_print(FILE *out, const Plan *plan, const Bytes capacity[NTIERS], const Bytes *peak);
/* One run of a command: what it was asked, what it opened, where it runs, how it went. */
typedef struct {
    Options *options;
    Checkpoint *checkpoint; /* NULL: no model was named; of a stage its part of it */
    Checkpoint *whole, part;
    Net *net;      /* the pipeline; NULL: one machine ... */
    Stages stages; /* ... or simulated ones, whose first has this plan and this device */
    int first_layer;
    uint64_t flags;       /* flags_digest */
    Tokenizer *tokenizer; /* for texts */
    Gpu *gpu;             /* NULL on the other devices */
    bool sim;             /* nothing is computed, and --hardware says which machine it is */
    Hardware *
        hardware; /* that machine, or the one that the policy is searched for; NULL if not needed */
    Found *found; /* what is expected of the policy; NULL: nothing */
    Error no_gpu; /* text: why there is no GPU; empty with --device host */
    size_t in_use_before; /* bytes of the GPU before there is a tier, by its own account */
    size_t in_use;        /* at the end of the run */
    int processors;       /* that a quota of CPU leaves only a part of; 0: there is none */
    size_t memory;        /* bytes of this process that the tiers may have together */
    size_t overhead;      /* bytes that the process should have at most besides the tiers */
    Plan *plan;
    Device *device;
    Completions *completions; /* of generate, and which job they are of; else NULL */
    const cJSON *head;
    bool bench;
    bool traced;        /* the device notes what it does, for --trace or for bench's breakdown */
    size_t trace_limit; /* slices that it keeps at a time, if it only adds up; 0: all */
    Trace *traces;      /* of all stages, on the first, when the run is over */
    uint64_t digest;    /* of bench: of all its tokens, for two runs to be compared */
    RunStats stats;
    cJSON *json; /* the report: a list of all figures, ... */
    FILE *text;  /* ... and where its text goes; NULL: it is not wanted */
} TaskRun;

/* Results go as text to standard output, and with --json as one JSON object to a file. If that file
 * is standard output, the text is left out. The object is the list of all figures; the text is a
 * form that is filled in from it. */
/* Before the work, so that an hour of it is not lost to a wrong --json. -1 and err. */
int report_open(TaskRun *run, Error *err);
/* Writes what there is so far; the object only if that is a file, which is replaced later. -1 and
 * err. */
int report_write(const TaskRun *run, Error *err);
/* Writes the object, if all went well. Returns status, or -1 and err. */
int report_close(TaskRun *run, int status, Error *err);

/* The results of a run: times, bytes and seconds of the lanes and channels, Table 4. */
void report_bench(const TaskRun *run);
/* The same task's lanes and Table 4, in a run behind it that was traced. */
void report_traced(const TaskRun *run);
/* Perplexity or last words, the times, the policy. */
void report_eval(const TaskRun *run, const Eval *eval);
/* Policies that were found. The first is the answer; `key` lists all of them. */
void report_found(const TaskRun *run, const char *key, const Found *found, int n);
/* A placement by Appendix A.3. */
void report_paper(const TaskRun *run, const Cost *cost, const Block *block);
/* One machine, a pipeline, a chain without offloading; NULL if it does not fit. The chain needs
 * `least` machines. */
void report_clusters(const TaskRun *run, const Found *const found[3], int least);
/* explain.c: the linear program of a policy that was found, or without one (NULL) that of a block
 * by Appendix A.3: its rows and their dual prices, what more memory or faster links would bring, a
 * picture. search: the machine with its capacities and the model. -1 and err if it has no optimum.
 */
int report_explained(const TaskRun *run, const Search *search, const Policy *policy,
                     const Block *block, Error *err);

/* The following go to standard error. The plan's totals and what was used; then what was predicted,
 * if anything was, beside what was measured; a scored task generates nothing. */
void print_peaks(const TaskRun *run);
void print_prediction(const TaskRun *run, const Task *task);
/* Prompts and tokens of the whole job; the seconds of this run, and under which policy. */
void print_summary(const TaskRun *run, int prompts, long tokens);

// -------------------------------------------------------------------------------------------------
// choose.c: where a task runs, its policy and its plan
// -------------------------------------------------------------------------------------------------

/* Decides everything before anything is allocated or written: where the task runs, under which
 * policy, and where every byte of it lies. What does not fit is refused. one_block: as for
 * search_for. */
int plan_task(TaskRun *run, Task *task, bool one_block, Error *err);
/* Threads that compute: as many as are given, or one for each processor, as far as a quota of CPU
 * keeps them busy. */
void choose_threads(TaskRun *run);
/* Where the task runs, with how many threads and how much memory. on_paper: nothing runs, and a
 * machine of --hardware is all numbers, as for the sim. Beside the CPU's attention the lanes of a
 * GPU post, copy and wait: they get cores as well.
 */
int choose_machine(TaskRun *run, bool on_paper, Error *err);
/* The machine of --hardware, with the numbers that --with changes. */
int read_machine(Hardware *hardware, const Options *options, Error *err);
/* The machine that the search is for: a file's, or this one, measured; with its links as slow as
 * they will be. */
int know_machine(const TaskRun *run, Error *err);
/* How the flags, or a packed checkpoint, say that weights and cache are packed; and who attends
 * sparsely. */
int settle_compression(const TaskRun *run, Error *err);
/* What is searched for: what the flags leave open. one_block: the task is as long as a block may
 * be, and ends behind the policy's. */
Search search_for(const TaskRun *run, const Task *task, bool one_block);
/* The best policies, at most `most`, or the one that the flags give in full, its token table where
 * there is room; with what is expected of them, if the machine is known (found not NULL). Returns
 * their number, or -1 and err. */
int find_policies(Found *found, int most, Search *s, Error *err);
/* The machines of a pipeline, which are processes or made of numbers, and what is between them. */
Cluster cluster_of(const TaskRun *run);
/* All that the process is expected to have besides the tiers, now that the plan is known: four
 * moves for each page of a batch in the schedule and in every lane's queue, and two notes for each
 * page in each batch that passes through staging. In a trace a lane has two slices at most for a
 * layer and a batch. */
size_t process_planned(const TaskRun *run);
/* How many traces the file that this process writes has: one for each stage. */
int trace_count(const TaskRun *run);
/* A stage behind the first, which has nothing to say. */
bool follows(const TaskRun *run);

#ifdef __cplusplus
}
#endif
#endif
