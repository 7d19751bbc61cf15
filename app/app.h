/* app.h: the program around the engine: what a user says and sees.
 *
 * The chapters are in the order of a run: the command line, the run, where it runs and under which
 * policy, the prompts, their completions, and the reports at the end. */
#ifndef APP_H
#define APP_H
#include <cjson/cJSON.h>

#include "cost/cost.h"

#define MEBIBYTE 1048576.0 /* bytes */

// -------------------------------------------------------------------------------------------------
// flags.c: the command line
// -------------------------------------------------------------------------------------------------

typedef enum { GENERATE, BENCH, POLICY, PROFILE, QUANTIZE, EVAL, NCOMMANDS } Command;

/* The values of a flag that may be repeated. */
typedef struct {
    char **text;
    int n;
} Texts;

/* The flags of one command line. */
typedef struct Options {
    const char *prompts, *output, *json, *trace, *perplexity, *last_word, *score, *format, *stages;
    Texts prompt, stop;
    int max_tokens, num_prompts, window, limit;
    int prompt_len[2], gen_len[2]; /* least, most */
    Policy policy;                 /* gbs, num_gpu_batches 0: not given */
    bool fixed[6];                 /* true for each of wg wc cg cc hg hc that is given */
    bool fixed_schedule, frontier, explain, no_rehearsal, no_graph;
    bool compress_weight, compress_head, compress_cache, allow_compression;
    Quant quant;        /* --bits and --group; sizes other than is_stored's are only simulated */
    double max_latency; /* seconds that one block may take; 0: any number */
    bool paper_model;   /* --cost-model paper */
    int nodes;
    double net_gbps, net_ms;           /* the network between the machines of --nodes */
    double wire_bytes_s, wire_delay_s; /* --net; 0: the wire is not slowed */
    bool resume, overwrite, strict, truncate;
    bool verbose, help, version;
    Sampling sampling;      /* temperature below 0: not given, which is greedy, too */
    double link[NCHANNELS]; /* bytes/s; 0: not slowed */
    bool links;             /* true if some link is slowed */
    uint64_t digest;        /* of the flags up to here, the same on all stages of a pipeline */
    /* from here on, fields that may differ between the stages */
    const char *model, *offload_dir, *device, *hardware;
    Texts with;
    int threads;
    Bytes capacity[NTIERS]; /* FROM_MACHINE: not given */
} Options;
#define FROM_MACHINE UINT64_MAX

/* Returns the options of a command line without flags. */
Options options_default(void);
/* Finds the command of that name; -1 and err (EXIT_USAGE) if there is none. */
int command_parse(Command *command, const char *name, Error *err);
/* Reads the n arguments after the command, and cuts "--flag=value" in two. -1 and err (EXIT_USAGE),
 * which says what was expected, or which known flag is nearest to an unknown one. */
int flags_parse(Options *options, Command command, char **args, int n, Error *err);
/* Sets what a flag sets to the value of a field, and adds both to the digest. -1 and err. */
int option_set(Options *options, const char *flag, const cJSON *value, Error *err);
/* The names of what has a place in the policy, in the order of its shares. */
extern const char *const placed_name[3];
/* Checks that the flags go together: 0, or -1 and err (EXIT_USAGE). */
int flags_check(const Options *options, Command command, Error *err);
/* Checks that every result can be written, and over nothing that is read or written as well: no
 * input, no file of the model, no other result. -1 and err (EXIT_USAGE if two are one) if not. */
int files_check(const Options *options, Command command, Error *err);
/* Prints the help text: the commands and all flags. */
void flags_help(FILE *out);
/* Prints the version, the devices that this program has, and what it runs pipelines on. */
void flags_version(FILE *out);
/* Returns true if --device gives this name. */
bool device_is(const Options *options, const char *name);

// -------------------------------------------------------------------------------------------------
// The run: the state of the program
// -------------------------------------------------------------------------------------------------

typedef struct Stage Stage;
typedef struct Completions Completions;

/* The simulated machines of a pipeline; n 0: there is none. */
typedef struct {
    int n;
    Stage *stage;
    World *world;
} Stages;

/* One run of a command: what it was asked, what it opened, where it runs, how it went. choose.c
 * decides, flexgen.c runs, report.c prints. A policy takes one way: what is asked of it (options,
 * then given), what is found for it (found), and the plan, which has it in its final form. */
typedef struct {
    /* what was asked, and what was opened for it */
    const Options *options;
    Checkpoint *checkpoint;  /* NULL: no model was named; on a stage, its part of the model */
    Checkpoint *whole, part; /* the whole model; in a pipeline, a process's part of it */
    int first_layer;         /* of that part */
    Tokenizer *tokenizer;    /* opened for commands that read texts */
    Net *net;                /* the pipeline; NULL: one machine ... */
    Stages stages;           /* ... or simulated ones; plan and device are those of the first */
    int nstages;             /* of the pipeline; 1: one machine */

    /* the machine */
    bool sim;               /* nothing is computed; --hardware names the machine */
    Gpu *gpu;               /* NULL on the other devices */
    Error no_gpu;           /* its text says why there is no GPU; empty with --device host */
    Hardware *hardware;     /* the machine simulated or searched for; NULL: not needed */
    int threads;            /* that compute */
    int processors;         /* of the machine, if a CPU quota allows only some of them; else 0 */
    Bytes capacity[NTIERS]; /* of the tiers */
    size_t memory;          /* bytes of this process that the tiers may have together */
    size_t overhead;        /* bytes that the process should have at most besides the tiers */
    size_t in_use_before;   /* bytes in use on the GPU before there is a tier, by its own account */
    size_t in_use;          /* the same count at the end of the run */

    /* the policy and the plan */
    Policy given;   /* what is asked of the policy: the flags', settled for this run */
    bool may_pack;  /* the search may pack weights and cache */
    bool one_block; /* the task has as many prompts as a block may have, and is cut to one block of
                       the policy that is found */
    Found found;    /* the policy that was chosen; the rest only if predicted */
    bool predicted; /* the cost model has predicted its costs */
    Plan *plan;     /* with the policy in its final form */

    /* the work, and how it went */
    bool bench;
    Device *device;
    Completions *completions; /* of a job with an output; NULL in other commands */
    cJSON *head;              /* the journal's head for that job */
    bool traced;        /* the device notes what it does, for --trace or for bench's breakdown */
    size_t trace_limit; /* slices that a trace keeps at a time, if it only adds up; 0: all */
    Trace *traces;      /* [nstages] the first process collects those of the others at the end */
    uint64_t digest;    /* bench's: a hash of all tokens, to compare two runs */
    RunStats stats;
    cJSON *json; /* the report: a list of all figures, ... */
    FILE *text;  /* ... and the stream that its text goes to, /dev/null if none is wanted */
} TaskRun;

// -------------------------------------------------------------------------------------------------
// choose.c: where a task runs, its policy and its plan
// -------------------------------------------------------------------------------------------------

/* Decides everything before anything is allocated or written: where the task runs, under which
 * policy, and where every byte of it lies. A task that does not fit is refused. */
int plan_task(TaskRun *run, Task *task, Error *err);
/* Sets the number of threads that compute: as many as are given, or one for each processor, as far
 * as a CPU quota keeps them busy. */
void choose_threads(TaskRun *run);
/* Chooses the device, the number of threads and the capacities. on_paper: nothing runs, and a
 * machine of --hardware consists of numbers, as for the sim. With a GPU, two threads fewer compute,
 * since the GPU's lanes, which post, copy and wait, need cores too. */
int choose_machine(TaskRun *run, bool on_paper, Error *err);
/* Reads the machine of --hardware, with the numbers that --with changes. */
int read_machine(Hardware *hardware, const Options *options, Error *err);
/* Finds out the numbers of the machine that the search is for: from a file, or by measuring this
 * one. Links that will be slowed are as slow in them. */
int know_machine(const TaskRun *run, Error *err);
/* Settles run->given: by the flags, a packed checkpoint, or the run before of a job that goes on,
 * how weights and cache are packed; and that the CPU attends if attention is sparse. */
int settle_compression(TaskRun *run, Error *err);
/* Returns what is to be searched for: what the flags leave open. */
Search search_for(const TaskRun *run, const Task *task);
enum { MANY_FOUND = 64 }; /* policies that a rehearsal chooses from */
/* Finds the best policies, at most `most`, the one that the sim prefers first if s->rehearse; or
 * takes the one that the flags give in full, with its token table where there is room; and what is
 * expected of them, if the machine is known (s->hardware not NULL). Returns their number, or -1 and
 * err. */
int find_policies(Found *found, int most, Search *s, Error *err);
/* Returns the machines of a pipeline, which are processes or simulated, and their network. */
Cluster cluster_of(const TaskRun *run);
/* Returns the bytes that the process should have at most besides the tiers, once the plan is known:
 * four moves for each page of a batch in the schedule and in every lane's queue, and two notes for
 * each page in each batch that passes through staging. In a trace a lane has at most two slices for
 * a layer and a batch. */
size_t process_planned(const TaskRun *run);
/* Returns true on a stage behind the first, which prints nothing. */
bool follows(const TaskRun *run);

// -------------------------------------------------------------------------------------------------
// job.c: prompts in, and texts that are to be scored
// -------------------------------------------------------------------------------------------------

/* What is known of scored tokens. */
typedef struct {
    double nll;  /* -log of the probability of all of them */
    int tokens;  /* their number, in a sum of scores */
    bool missed; /* true if one of them was not the greedy choice */
} Score;

/* A prompt, and what has come of it. In a job that is scored, n given tokens stand behind it, and
 * their scores take the place of new tokens. */
typedef struct {
    int line;          /* its line in the input, from 0 */
    char *id;          /* as JSON text ("7" with or without quotes) */
    char *text;        /* the prompt as given; NULL if it cannot be completed, or is scored */
    char *error;       /* why it cannot be completed; NULL: it can */
    int32_t *ids;      /* s tokens, and behind them those that are scored, or that an earlier run
                          had chosen */
    int s, n;          /* prompt length; tokens to generate at most */
    int32_t *tokens;   /* those known so far, </s> included; none if they are scored */
    int known;         /* how many tokens are known */
    Score score;       /* of the known tokens, if they are scored */
    Sampling sampling; /* the flags', but for what its line says */
    Text stop;         /* its line's stop texts, each with its 0, and then another 0; empty: it has
                          none, and those of --stop count */
    uint64_t own;      /* a hash of what its line says in place of flags */
    bool part;         /* the next request scores more of the same line, and has its id */
    bool truncated;    /* tokens at the beginning of the text are left out */
    bool cut;          /* n is less than was asked for, or the prompt has lost its beginning, since
                          the model's positions end */
    bool ended, stopped; /* no more tokens will come; they ended with </s> or a stop text */
} Request;

/* The prompts that a user wants completed, or with task.scored the texts whose probability is
 * wanted. The fields before `request` are set before reading, and what the task needs. */
typedef struct {
    const Tokenizer *tokenizer;
    const OptConfig *config;
    int max_tokens;     /* for prompts that do not say */
    Sampling sampling;  /* likewise */
    bool strict;        /* one impossible prompt refuses the whole job */
    bool truncate;      /* a prompt that leaves too little room keeps its last tokens */
    const char *format; /* "jsonl", "openai", "text"; NULL: job_read finds out */
    int limit;          /* no line is read when there are as many requests; 0: all are */
    /* true: every scored token comes from a decoding step, which reads the KV cache; needed for a
     * packed cache or sparse attention. false: a prompt is one prefill. */
    bool stepwise;
    Request *request; /* [count], in the order of the input */
    int count;
    uint64_t digest;   /* two jobs share it only if their prompts are the same */
    char fields[4000]; /* those of lines that are known or have been said not to be, in quotes */
    Task task;         /* what is left to do */
} Job;

/* Adds a request at the end. */
void job_push(Job *job, Request request);
bool job_full(const Job *job);
/* Adds the prompt of a line: a JSON object, or a text. If it is impossible, it becomes a request
 * with an error. */
void job_add(Job *job, const Lines *line, bool json);
/* Completes the job when all prompts have been added: a prompt without an id gets one that no other
 * has, by default the number of its line. A prompt is impossible if an earlier one has its id. name
 * names the input in messages, and is "" where a request's error says enough. With `strict` -1 and
 * the first impossible prompt's error. */
int job_settle(Job *job, const char *name, Error *err);
/* Reads prompts from a file or pipe ("-": standard input): JSON lines {"id"?, "prompt", ...}, those
 * of OpenAI's batches, or plain lines, by `format`, the file's name (.jsonl, .txt) or its first
 * line. Fields that are not known are named on standard error. Blank lines are skipped. An id is a
 * string or a whole number below 2^53. Without `format`, plain lines that are JSON objects and a
 * file that is one JSON value are refused. Lines that are scored are {"id"?, "prompt",
 * "completion"}, or {"id"?, "text"}, whose last word is scored. If a prompt and what is scored are
 * too long for the model, the prompt loses its beginning; if the latter is too long by itself, it
 * is cut into windows. */
int job_read(Job *job, const char *path, Error *err);
/* Makes the task of what has not ended yet: tokens that are known are part of a longer prompt. */
void job_rest(Job *job);
/* Adds up the scores of a line, whose last request this is. */
Score line_score(const Job *job, const Request *last);
void job_free(Job *job);
/* Frees the prompts of a task that owns their tokens; a job owns its own. */
void prompts_free(Task *task);

/* Encodes a text as tokens after the one that the model's tokenizer puts in front, if it does; the
 * caller frees *ids. Returns their number, or -1 and err. */
int text_encode(int32_t **ids, const char *text, size_t len, const Tokenizer *tokenizer,
                Error *err);
/* Returns a copy of ids[n], which the caller frees. */
int32_t *copy_ids(const int32_t *ids, int n);

// -------------------------------------------------------------------------------------------------
// journal.c: what a job has chosen so far, on disk
// -------------------------------------------------------------------------------------------------

/* A journal that is open. */
typedef struct {
    char path[MAX_PATH];
    int fd;
    uint64_t identity; /* of the file, once it is locked */
    char *text;        /* (size) the file as it was opened, until the job begins */
    size_t size;
    cJSON *head;    /* its first line; NULL: the journal is new */
    size_t end;     /* bytes that are valid */
    uint64_t check; /* the hash of these bytes */
} Journal;

/* One generated token as the journal records it, or the log-probability of a scored one. As this
 * is never above 0, its sign is free: it is negative if the token was the greedy choice. */
typedef struct {
    uint32_t place; /* the request's place in the job */
    union {
        int32_t token;
        float logp;
    };
} Pair;
#define JOURNAL_VERSION "flexgen journal 2" /* a name in its first line */
#define JOURNAL_ENDED "output" /* another, whose value is the state of a finished output */

/* Opens OUTPUT.journal, makes it if need be, and locks it until it is closed. -1 and err if another
 * process has it (EXIT_USAGE), or if it is something else. */
Journal *journal_open(const char *output, Error *err);
/* Takes one token of a journal that is read; -1 and err end the reading. */
typedef int TakeToken(void *ctx, Pair pair);
/* Calls take for every token in the order in which they were written. -1 and err if it returns -1.
 * The first invalid record ends the journal. */
int journal_read(Journal *journal, TakeToken *take, void *ctx, Error *err);
/* Begins it anew for a job; with head NULL it goes on behind what has been read. */
int journal_begin(Journal *journal, const cJSON *head, Error *err);
/* Appends n > 0 tokens as one record. */
int journal_append(Journal *journal, const Pair *pairs, size_t n, Error *err);
int journal_sync(const Journal *journal, Error *err);
/* Puts a file with the head alone in its place, when its job has ended and the output is on the
 * disk. The head then also has the output's state. */
int journal_end(Journal *journal, const char *state, Error *err);
/* Closes it, and removes a file that was never begun. */
void journal_close(Journal *journal);

// -------------------------------------------------------------------------------------------------
// completions.c: what becomes of a job, and how far it is
// -------------------------------------------------------------------------------------------------

/* What standard error says of how far a run is: on a terminal one line that changes, else a new
 * line each minute. The seconds of a sweep are taken to be a + b work, fitted to the sweeps so far.
 */
typedef struct {
    bool on;                /* it is a terminal */
    double every;           /* seconds between two lines; 0: there is none */
    int count;              /* sequences */
    double sweeps, work;    /* of the whole run, if no sequence stops early */
    double pair;            /* work of attending to one token; a row's products are 1 */
    long tokens;            /* that are wanted */
    double shown;           /* the time of the last line, or at first of the beginning */
    double n, w, ww, t, wt; /* sums over sweeps: 1, work, its square, seconds, work x s */
} Progress;
/* Starts it for a task, before the first sweep. */
void progress_open(Progress *progress, const Plan *plan, const Task *task);
/* Updates it after a sweep; `tokens` of those wanted have come. */
void progress_show(Progress *progress, const RunStats *stats, long tokens);
/* Erases the line. */
void progress_clear(const Progress *progress);
/* Returns the seconds that are left; below 0: not known yet. */
double progress_left(const Progress *progress);

/* Looks at --output and locks it; nothing is changed yet. -1 and err if it is there and neither
 * --resume nor --overwrite is given. job and options must outlive it. */
Completions *completions_open(Job *job, const Options *options, Error *err);
/* Opens the completions of a stage that only follows: the same tokens end its sequences, and
 * nothing is written. */
Completions *completions_follow(Job *job, const Options *options);
/* Returns the head of the journal that is there, with --resume; else NULL, also without
 * completions. */
const cJSON *completions_head(const Completions *completions);
/* Gives the requests of the job the tokens that the journal has, with --resume. head: what must be
 * the same in both. *finished: the job had ended. -1 and err if the output or the journal is of
 * another job. */
int completions_resume(Completions *completions, const cJSON *head, bool *finished, Error *err);
/* Opens the output, begins the journal (which then says `head`), starts the thread that writes. */
int completions_begin(Completions *completions, const cJSON *head, Error *err);
/* Returns the listener that takes tokens. */
Listener completions_listener(Completions *completions);
Progress *completions_progress(Completions *completions);
/* Writes what is left and syncs it; then only the journal's head stays, with the output's state.
 * Returns status, the success of the run; or if that is 0 and something could not be written, -1
 * and err. */
int completions_end(Completions *completions, int status, Error *err);
/* Returns the number of tokens in all lines of the output. */
long completions_tokens(const Completions *completions);
void completions_free(Completions *completions);

// -------------------------------------------------------------------------------------------------
// stage.c: what the stages of a pipeline agree on before a run (section 4.4)
// -------------------------------------------------------------------------------------------------

#define PIPELINE_VERSION "4" /* the version of the messages between stages */

/* Opens the network that mpirun has started this process in: net_open_mpi of device.h, out of the
 * library beside the program. Returns NULL and err if there is one and it cannot be used. Returns
 * NULL with err's text empty, at once and without loading MPI, if there is none or this process is
 * alone in it. */
Net *net_open(double bytes_s, double delay_s, Error *err);
/* Copies the first stage's bytes to all stages; every stage must call it. net NULL, here and below:
 * there are no others. */
int stage_share(Net *net, void *bytes, size_t size, Error *err);
/* Returns 0 if all stages have status 0; every stage calls it with its own status: 0, or -1 and
 * err. Otherwise returns -1 on all stages, with the err of the first stage that has -1, which it
 * names. The network can be used in either case. */
int stage_agree(Net *net, int status, Error *err);
/* Compares this stage with the first. -1 and err, on all stages, if one has another model, another
 * tokenizer (with which every stage looks for stop texts; NULL: none needs one), other flags or
 * another version of the program. */
int stage_join(Net *net, const Checkpoint *checkpoint, const Tokenizer *tokenizer, uint64_t flags,
               Error *err);
/* Writes this stage's part of the model to *part, and its first layer to *first: equally many
 * layers on all stages, or as given, such as "10,10,4" (NULL: it is not given). -1 and err. */
int stage_part(Checkpoint *part, int *first, const Checkpoint *whole, const Net *net,
               const char *given, Error *err);
/* Sends the first stage's task to all others, who then own it; a job's (NULL: there is no job) with
 * the tokens that are known already. net NULL: there are no others. */
int stage_share_task(Net *net, Task *task, Job *job, Error *err);
/* Prints a line for each stage on the first one's standard error. */
int stage_print_plans(Net *net, const Plan *plan, int first, Error *err);

/* Returns an empty trace for a stage's device, under the stage's name. */
Trace stage_trace(int stage, int first, int layers, size_t limit);
/* Collects the traces on the first stage. all[0] is this stage's own; the first stage receives the
 * others' as all[1] and so on, converted to its own clock, and frees their slices, even after a
 * failure. */
int stage_gather_traces(Net *net, Trace *all, Error *err);

/* A simulated machine of a pipeline: its part of the model, from layer `first` on. */
struct Stage {
    Checkpoint part;
    int first;
    Plan *plan;
    Device *device;
    pthread_t thread;
    const Task *task;
    Listener listener;
    RunStats stats;
    Error err;
};

/* Splits the model into m stages, as stage_part does; `whole` must outlive them. */
int stages_split(Stages *stages, const Checkpoint *whole, int m, const char *given, Error *err);
/* Makes their plans, each with the token table where there is room. -1 and err, which names the
 * first stage that has too little. */
int stages_plan(Stages *stages, const Policy *policy, const Task *task, Type act_type,
                const Bytes capacity[NTIERS], Error *err);
/* Opens their devices, with wires of bytes_s bytes/s and delay_s seconds between them (device.h).
 */
void stages_open(Stages *stages, const Hardware *hardware, double bytes_s, double delay_s);
/* Runs the task on all stages. listener and stats are the first stage's. */
int stages_run(Stages *stages, const Task *task, const Listener *listener, RunStats *stats,
               Error *err);
/* Closes them and their devices. */
void stages_close(Stages *stages);

// -------------------------------------------------------------------------------------------------
// eval.c: perplexity and last words (section 6.2, Table 6)
// -------------------------------------------------------------------------------------------------

/* A scored job: its requests are windows of a text, or lines whose last word counts. */
typedef struct {
    Job job;
    int window;    /* tokens of each window; before reading also 0: the model's positions */
    long unscored; /* tokens of the text in no window, or first in one */
} Eval;

/* Reads a file as one text, with </s> in front, in windows. The first token of a window is context
 * only. What is left after the last whole window is not scored; a text that is shorter than a
 * window is one window. */
int eval_text(Eval *eval, const char *path, Error *err);

/* The results, which do not depend on the order of scoring: nll is the mean of -log p over tokens,
 * perplexity is exp(nll); word_perplexity is the same over lines (or windows), and accuracy the
 * share of lines whose scored tokens were all greedy choices. */
typedef struct {
    double nll, perplexity, bits_per_byte; /* over tokens */
    double word_perplexity, accuracy;      /* over lines */
    long tokens;                           /* that are scored */
    int lines;
} EvalResult;
EvalResult eval_result(const Job *job);

// -------------------------------------------------------------------------------------------------
// quantize.c: a packed copy of a checkpoint
// -------------------------------------------------------------------------------------------------

/* The size of a copy, compared with its source. */
typedef struct {
    int files;
    bool untied;              /* as in the checkpoint */
    size_t before, after;     /* bytes of the source's files, of the copy's tensors */
    double bits, packed_bits; /* of a number: over the whole copy, over its packed matrices */
} CopyStats;

/* Writes a copy of the checkpoint in dir to the directory output, with the matrices of the layers
 * and, if head is true, the token table and lm_head packed, and the rest as F16. checkpoint_open
 * reads it, and quantize.c says how it is laid out. A shard has at most shard_bytes, or one layer.
 * output must be new or empty. progress may be NULL. -1 and err for what checkpoint_open,
 * checkpoint_packs or checkpoint_pack refuse, for a checkpoint that is packed already or an output
 * that exists (both EXIT_USAGE), and for a full disk; then nothing is left behind. A killed program
 * leaves OUTPUT.tmp-PID, which the next one clears away.
 */
int checkpoint_quantize(CopyStats *stats, const char *dir, const char *output, Bytes shard_bytes,
                        bool head, FILE *progress, Error *err);

// -------------------------------------------------------------------------------------------------
// report.c: what the commands say
// -------------------------------------------------------------------------------------------------

/* Results go as text to standard output, and with --json as one JSON object to a file. If that file
 * is standard output, the text is left out. The object is the list of all figures. */

/* Opens the report before the work, so that a wrong --json does not lose an hour of it. -1 and err.
 */
int report_open(TaskRun *run, Error *err);
/* Writes what there is so far; the object only if that is a file, which is replaced later. -1 and
 * err. */
int report_write(const TaskRun *run, Error *err);
/* Writes the object, if all went well. Returns status, or -1 and err. */
int report_close(TaskRun *run, int status, Error *err);

/* A number of the object, under its name. */
typedef struct {
    const char *name;
    double value;
} Figure;
/* Adds figures to an object; behind the last is one without a name. */
void add_figures(cJSON *to, const Figure *figures);
#define ADD(to, ...) add_figures(to, (const Figure[]){__VA_ARGS__, {0}})

/* Reports the results of bench: times, bytes and seconds of the lanes and channels, Table 4. */
void report_bench(const TaskRun *run);
/* Reports the lanes and Table 4 of the same task in a second run, which was traced. */
void report_traced(const TaskRun *run);
/* Reports perplexity or last words, the times, the policy. */
void report_eval(const TaskRun *run, const Eval *eval);
/* Reports policies that were found. The first is the answer; `key` lists all of them. */
void report_found(const TaskRun *run, const char *key, const Found *found, int n);
/* Reports a placement by Appendix A.3. */
void report_paper(const TaskRun *run, const Cost *cost, const Block *block);
/* Reports one machine, a pipeline, and a chain without offloading; NULL if it does not fit. The
 * chain needs `least` machines. */
void report_clusters(const TaskRun *run, const Found *const found[3], int least);

/* Adds up in bytes[], by tier, the regions that have the name of region i, counted through all
 * purposes and tiers: such as the two slots of weights. Returns the name if i is the first of them,
 * else NULL. */
const char *plan_purpose(Bytes bytes[NTIERS], const Plan *plan, int i);
/* Prints the plan before a run. */
void plan_print(FILE *out, const Plan *plan, const Bytes capacity[NTIERS]);
/* Prints to standard error the plan's totals and, after a run, the memory that was used. */
void print_peaks(const TaskRun *run);
/* Prints to standard error what was predicted, if anything was, beside what was measured; a scored
 * task generates nothing. */
void print_prediction(const TaskRun *run, const Task *task);
/* Prints to standard error the prompts and tokens of the whole job, the seconds of this run, and
 * its policy. */
void print_summary(const TaskRun *run, int prompts, long tokens);

// -------------------------------------------------------------------------------------------------
// explain.c: the linear program of a policy
// -------------------------------------------------------------------------------------------------

/* Reports the linear program of a policy that was found, or without one (NULL) that of a block by
 * Appendix A.3: its rows and their dual prices, what more memory or faster links would bring, a
 * picture. search: the machine with its capacities and the model. -1 and err if the program has no
 * optimum. */
int report_explained(const TaskRun *run, const Search *search, const Policy *policy,
                     const Block *block, Error *err);

#endif
