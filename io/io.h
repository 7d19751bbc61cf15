/* io.h: what comes in and goes out, from the ground up: checkpoints, prompts, flags, reports. */
#ifndef IO_H
#define IO_H
#include "flexgen.h"
#include "io/text.h"

typedef struct Found Found;
typedef struct Gpu Gpu;
typedef struct ClusterCost ClusterCost;

#ifdef __cplusplus
extern "C" {
#endif

// ---------------------------------------------------------------------------------------------------------------
// config.c: which model it is; its sizes and shapes are declared in flexgen.h
// ---------------------------------------------------------------------------------------------------------------

enum { MAX_JSON = 100 << 20 }; /* bytes of a JSON file or header of a model */

/* Reads dir/config.json: the sizes, the last component of dir as the name, and *tied, its tie_word_embeddings. -1 and err
 * if it is no OPT. */
int config_read(OptConfig *config, bool *tied, const char *dir, Error *err);
/* Reads dir/name as a JSON object, and puts its path into `path`. NULL and err if it is none. */
cJSON *config_object(char path[MAX_PATH], const char *dir, const char *name, Error *err);

// ---------------------------------------------------------------------------------------------------------------
// checkpoint.c: the tensors of a Hugging Face directory
// ---------------------------------------------------------------------------------------------------------------

/* A safetensors file, open for reading. */
typedef struct {
    char *path;
    int fd;
    size_t size;
} TensorFile;

struct Checkpoint {
    OptConfig config;
    TensorFile *files; /* the safetensors files; Tensor.file == 1 + index */
    int nfiles;
    Quant quant;             /* how the matrices of the layers are packed; bits 0: they are not */
    Tensor (*layer)[NROLES]; /* [l], tier DISK, type F16, BF16 or F32, dense; a packed matrix (n, k) is U8, (rows of groups,
                                bytes of one) = (ceil(n / group), k quant_bytes(group)), its quant set */
    Tensor global[NGLOBALS]; /* rows 0 when absent */
    bool dummy;              /* a named size without files: tensors are F16 with file 0, see checkpoint_fill */
    uint64_t seed;           /* of a dummy */
};

/* What may be packed: bits of a number, numbers of a group, which is a multiple of LEAST_GROUP. */
enum { LEAST_BITS = 2, MOST_BITS = 8, LEAST_GROUP = 16, MOST_GROUP = 1024 };
#define PACKED_FORMAT "flexgen-packed-1"

/* Opens dir/config.json and dir/model.safetensors, or the shards of dir/model.safetensors.index.json. Every tensor that
 * OptConfig asks for is present with its shape and a float type (or packed, if __metadata__ says so), lies inside its file,
 * and overlaps no other. NULL and err otherwise. Names are accepted with and without "model." in front; without an
 * lm_head.weight the head is tied. */
Checkpoint *checkpoint_open(const char *dir, Error *err);
/* A model of a known size with random weights that depend on seed, tensor and element only. */
Checkpoint *checkpoint_dummy(const OptConfig *config, uint64_t seed);
/* Writes elements [first, first+count) of a checkpoint's tensor to dst as F16 (U8: as they are). They are read (not through
 * a mapping, so that a file that shrank is an error and not a SIGBUS) and converted, or generated for a dummy. Fails on a
 * read error, and if a BF16 or F32 value is not finite in F16. Thread safe. */
int checkpoint_fill(const Checkpoint *checkpoint, void *dst, const Tensor *tensor, size_t first, size_t count, Error *err);
/* Writes one row of groups of a matrix, tensor->cols * quant_bytes(group) bytes, to `to`: what quant_pack_rows makes of
 * rows [row * group, (row + 1) * group), as far as there are so many. A U8 tensor must have the same quant, and its bytes
 * are copied. scratch: group * cols numbers; not for U8. -1 and err, which names the tensor, if it cannot be read or a
 * number is not finite. Thread safe. */
int checkpoint_pack(const Checkpoint *checkpoint, uint8_t *to, f16 *scratch, const Tensor *tensor, int row, Quant quant,
                    Error *err);
/* -1 and err, which names the tensor, if one of x[count], its elements from `first` on, is not finite. */
int checkpoint_finite(const Checkpoint *checkpoint, const f16 *x, const Tensor *tensor, size_t first, size_t count,
                      Error *err);
/* One of a checkpoint's tensors. */
typedef struct {
    Tensor *tensor;      /* rows 0: it is absent */
    int layer, role;     /* layer -1: it is outside of the layers, and role is a Global */
    bool vector, matrix; /* it has one dimension; it is a layer's matrix, which may be packed */
} Part;
/* How many there are, with the absent ones, and number t of them: those outside of the layers come first. */
static inline int part_count(const OptConfig *config) { return NGLOBALS + config->l * NROLES; }
Part checkpoint_part(const Checkpoint *checkpoint, int t);
/* The name of the tensor that a view belongs to, "model.decoder.layers.3.fc1.weight". */
const char *checkpoint_name(char name[100], const Checkpoint *checkpoint, const Tensor *view);
void checkpoint_close(Checkpoint *checkpoint);

// ---------------------------------------------------------------------------------------------------------------
// quantize.c: a packed copy of a checkpoint
// ---------------------------------------------------------------------------------------------------------------

/* What a copy came to. */
typedef struct {
    int files;
    size_t before, after;     /* bytes of the source's files, of the copy's tensors */
    double bits, packed_bits; /* bits of a number: over the whole copy, over its packed matrices */
} CopyStats;

/* Writes a copy of the checkpoint in dir to the directory output, with the matrices of the layers packed and the rest as
 * F16. checkpoint_open reads it, and quantize.c says how it is laid out. A shard has at most shard_bytes, or one layer.
 * output must be new or empty. progress may be NULL. -1 and err for what checkpoint_open or checkpoint_pack refuse, for a
 * checkpoint that is packed already or an output that exists (both EXIT_USAGE), and for a full disk; then nothing is left
 * behind. A killed program leaves OUTPUT.tmp-PID. */
int checkpoint_quantize(CopyStats *stats, const char *dir, const char *output, Quant quant, size_t shard_bytes, int threads,
                        FILE *progress, Error *err);

// ---------------------------------------------------------------------------------------------------------------
// job.c: prompts in, completions out
// ---------------------------------------------------------------------------------------------------------------

/* What a user asked for: a task, and what came with each prompt. */
typedef struct {
    char **text, **id; /* [task.count] the prompt as given; its id as JSON text ("7" with or without quotes) */
    Task task;
} Job;

/* Adds one prompt, given as a text. n tokens are to be generated, or fewer if the model's positions end before. where names
 * the prompt in messages. */
int job_add(Job *job, const char *text, size_t len, const char *id, int n, const Tokenizer *tokenizer,
            const OptConfig *config, const char *where, Error *err);
/* Prompts from a file ("-": standard input): JSON lines {"id"?, "prompt", "max_tokens"?} if the first line begins with {,
 * else plain lines. Blank lines are skipped; an id is a string or a whole number below 2^53 and defaults to the line's
 * number from 0. */
int job_read(Job *job, const char *path, int n, const Tokenizer *tokenizer, const OptConfig *config, Error *err);
void job_free(Job *job);

/* The tokens of a text after </s>, with which OPT begins every text; the caller frees *ids. where names the text in
 * messages. Returns their number, or -1 and err. */
int text_encode(int32_t **ids, const char *text, size_t len, const char *where, const Tokenizer *tokenizer,
                const OptConfig *config, Error *err);

/* A line on standard error that says how far a run is. */
typedef struct {
    bool on;
    long wanted; /* tokens of the whole run */
    double started, shown;
} Progress;
void progress_open(Progress *progress, bool on, long wanted);
void progress_show(Progress *progress, long sweeps, long tokens);
void progress_clear(const Progress *progress);

/* Writes a completion when its sequence ends, and syncs it: {"id", "prompt", "completion", "tokens", "finish_reason"}. */
typedef struct {
    const Job *job;
    const Tokenizer *tokenizer;
    FILE *out;
    const char *out_name;
    char **stop; /* texts that end a completion, which is cut before them */
    int nstops, max_stop;
    Progress progress;
} Completions;

/* The listener that writes them; ctx is the Completions. */
Listener completions_listener(Completions *completions);
/* Listener.done for runs whose completions nobody wants. */
int completion_ignored(void *ctx, int prompt, const int32_t *tokens, int n, FinishReason reason, Error *err);

// ---------------------------------------------------------------------------------------------------------------
// eval.c: perplexity and last words (section 6.2, Table 6)
// ---------------------------------------------------------------------------------------------------------------

/* A scored task made of texts, and its results. Prompts are windows of a text, or lines whose last word counts. */
typedef struct {
    /* every scored token comes from a decoding step, which reads the KV cache; for a packed cache or sparse attention.
     * Otherwise a prompt is one prefill. To be set before reading */
    bool stepwise;
    Task task;
    int window;        /* tokens of each */
    long tokens, told; /* to be scored; scored so far */
    size_t bytes;      /* of text that they stand for */
    double *nll;       /* [task.count] -log of the probability of all scored tokens of a prompt */
    bool *missed;      /* [task.count] one of them was not the greedy choice */
    Progress progress;
} Eval;

/* Reads a file as one text, with </s> in front, in windows of so many tokens (0: the model's positions), of which the first
 * `limit` count (0: all). The first token of a window is context only. What is left after the last whole window is not
 * scored; a text that is shorter than a window is one window. */
int eval_text(Eval *eval, const char *path, int window, int limit, const Tokenizer *tokenizer, const OptConfig *config,
              Error *err);
/* Reads JSON lines {"text"}, of which the first `limit` count (0: all). The last word of each, with the white space before
 * it, is scored; white space at the end is left out. If a line is too long for the model, its beginning is left out. */
int eval_lines(Eval *eval, const char *path, int limit, const Tokenizer *tokenizer, const OptConfig *config, Error *err);
/* The listener that adds up; ctx is the Eval. */
Listener eval_listener(Eval *eval);

/* The results, which do not depend on the order of scoring: nll is the mean of -log p over tokens, perplexity is exp(nll);
 * word_perplexity is the same over prompts, and accuracy the share of prompts whose scored tokens were all greedy choices.
 */
typedef struct {
    double nll, perplexity, bits_per_byte; /* over tokens */
    double word_perplexity, accuracy;      /* over prompts */
} EvalResult;
EvalResult eval_result(const Eval *eval);
void eval_free(Eval *eval);

// ---------------------------------------------------------------------------------------------------------------
// flags.c: the command line
// ---------------------------------------------------------------------------------------------------------------

typedef enum { GENERATE, BENCH, POLICY, PROFILE, QUANTIZE, EVAL, NCOMMANDS } Command;

typedef struct {
    char **text;
    int n;
} Texts; /* the values of a flag that may be repeated */

/* What the command line says. */
typedef struct {
    const char *model, *prompts, *output, *json, *offload_dir, *device, *hardware, *trace;
    const char *perplexity, *last_word;
    Texts prompt, stop;
    int max_tokens, num_prompts, threads, window, limit;
    int prompt_len[2], gen_len[2]; /* least, most */
    Policy policy;                 /* gbs, num_gpu_batches 0: not given */
    bool fixed[6];                 /* which of wg wc cg cc hg hc are given */
    bool fixed_schedule, frontier;
    bool compress_weight, compress_cache, allow_compression;
    Quant quant;        /* of compression */
    double max_latency; /* seconds of a block; 0: any number */
    bool paper_model;   /* --cost-model paper */
    int nodes;
    double net_gbps, net_ms;
    bool verbose, help;
    Sampling sampling;
    size_t capacity[NTIERS]; /* FROM_MACHINE: not given */
    double link[NCHANNELS];  /* bytes/s; 0: not slowed */
    bool links;              /* some link is */
} Options;
#define FROM_MACHINE SIZE_MAX

Options options_default(void);
/* The command of that name; -1 and err (EXIT_USAGE) if there is none. */
int command_parse(Command *command, const char *name, Error *err);
/* Reads the n arguments after the command. -1 and err (EXIT_USAGE), which says what was expected, or which known flag is
 * nearest to an unknown one. */
int flags_parse(Options *options, Command command, char **args, int n, Error *err);
/* Checks that the flags go together: 0, or -1 and err (EXIT_USAGE). */
int flags_check(const Options *options, Command command, Error *err);
/* The help text: the commands and all flags. */
void flags_help(FILE *out);
/* Whether --device gives this name. */
bool device_is(const Options *options, const char *name);

// ---------------------------------------------------------------------------------------------------------------
// report.c: what the commands say
// ---------------------------------------------------------------------------------------------------------------

/* Prints the plan; with peak, after a run, only the totals with the measured peaks beside them. */
void plan_print(FILE *out, const Plan *plan, const size_t capacity[NTIERS], const size_t *peak);
/* One run of a command: what it was asked, what it opened, where it runs, how it went. */
typedef struct {
    Options *options;
    Checkpoint *checkpoint; /* NULL: no model was named */
    Tokenizer *tokenizer;   /* for texts */
    Gpu *gpu;               /* NULL on the other devices */
    bool sim;               /* nothing is computed, and --hardware says which machine it is */
    Hardware *hardware;     /* that machine, or the one that the policy is searched for; NULL if not needed */
    Found *found;           /* what is expected of the policy; NULL: nothing */
    Error no_gpu;           /* text: why there is no GPU; empty with --device host */
    size_t in_use_before;   /* bytes of the GPU before there is a tier, by its own account */
    size_t in_use;          /* at the end of the run */
    size_t overhead;        /* bytes that the process should have at most besides the tiers */
    Plan *plan;
    Device *device;
    bool bench;
    bool traced;        /* the device notes what it does, for --trace or for bench's breakdown */
    size_t trace_limit; /* slices that it notes at most; 0: all */
    RunStats stats;
} TaskRun;

/* Results go as text to standard output, and with --json as one JSON object to a file. If that file is standard output, the
 * text is left out. The object is the list of all figures; the text is a form that is filled in from it. */
typedef struct {
    const TaskRun *run;
    cJSON *json;
    FILE *file, *text; /* NULL: not wanted */
} Report;

/* Opens --json, before the work, so that an hour of it is not lost to a wrong path. -1 and err. */
int report_open(Report *report, const TaskRun *run, Error *err);
/* Writes the object, if all went well, and closes it; as output_close. */
int report_close(Report *report, int status, Error *err);

/* The results of a run: times, bytes and seconds of the lanes and channels, Table 4. */
void report_bench(Report *report);
/* Perplexity or last words, the times, the policy. */
void report_eval(Report *report, const Eval *eval);
/* Policies that were found. The first is the answer; `key` lists all of them. */
void report_found(Report *report, const char *key, const Found *found, int n);
/* A placement by Appendix A.3. */
void report_paper(Report *report, const Cost *cost, const Block *block);
/* One machine, a pipeline, a chain without offloading; NULL if it does not fit. The chain needs `least` machines. */
void report_clusters(Report *report, const ClusterCost *const cost[3], int least);

/* The following go to standard error. The plan's totals and what was used; then what was predicted, if anything was, beside
 * what was measured. */
void print_peaks(const TaskRun *run);
void print_prediction(const TaskRun *run);
/* Prompts, tokens, seconds, and under which policy. */
void print_summary(const TaskRun *run, int prompts);

#ifdef __cplusplus
}
#endif
#endif
