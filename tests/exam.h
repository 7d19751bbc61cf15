/* exam.h: what the judge of an exercise (test_grade.c) and an exam (exam.c) say to each other.
 *
 * The exam is the program that is linked with a student's code. The judge starts it, writes
 * questions to its standard input, and reads an answer to each from its file 3:
 *
 *     Ask, and behind it the question        Reply, and behind it the answer
 *
 * A question and its answer are the two parts of one struct below; the answer begins at the field
 * that QUESTIONS names. They hold numbers alone, no pointers. Flags are ints. The judge trusts no
 * number of an answer. */
#ifndef EXAM_H
#define EXAM_H
#include <stddef.h>
#include <stdint.h>

/* The kinds of questions: KIND, its struct, the first field of the answer. */
#define QUESTIONS(X)                 \
    X(ATTENTION, Attention, o)       \
    X(SEATS, Line, may)              \
    X(DEAL, Deal, tier)              \
    X(RUN, SmallRun, ended)          \
    X(SEEN, RunSeen, squares)        \
    X(ROWS, Rows, row)               \
    X(PROGRAM, Program, verdict)     \
    X(RULES, Rules, entering)        \
    X(GROUPS, Groups, back)          \
    X(SELECTION, Selection, tokens)  \
    X(PIPELINE, Pipeline, prefill_s) \
    X(KERNEL, Kernel, after)         \
    X(TILES, Tiles, o)               \
    X(PIVOT, Pivot, after)           \
    X(TABLEAU, MiniProgram, after)   \
    X(MINI, MiniRun, ended)          \
    X(MINI_SEEN, MiniSeen, squares)  \
    X(ORDER, Posted, after)          \
    X(SEARCH, Question, nbest)       \
    X(COUNT, Count, sweeps)          \
    X(RACE, Race, calls)
#define ASK(kind, type, answer) ASK_##kind,
typedef enum { QUESTIONS(ASK) NASKS } AskKind;
#undef ASK

typedef struct {
    int32_t kind, bytes; /* AskKind; the size of the question */
} Ask;
/* status is 0, CHANGED, ENDED, or what waitpid said of the process that was to answer. */
typedef struct {
    int32_t status, bytes; /* bytes: the size of the answer, which is zeros unless status is 0 */
} Reply;
enum { CHANGED = -1, ENDED = -2 }; /* The code wrote to its question; it ended its process well, but did not return. */
enum { ANSWERS_FD = 3 };

/* What an exam can do: `work` fills in the answer of the case that it is given, in a process of its own. The rest is NULL.
 */
typedef struct {
    void (*work)(void *c);
} Work;
extern const Work works[NASKS];
void exam_begin(void); /* called in that process before */
/* Ends that process for what should not happen whatever the code that is graded does. */
void must(int done, const char *why);

// ---- 1: plain attention ---------------------------------------------------------------------------------------------

enum { ATT_N = 12, ATT_H1 = 24, GUARD = 7, ATT_MOST = ATT_N * ATT_H1, MOST_IDS = 128, MOST_LOGITS = 1 << 15 };
typedef struct {
    int n, nh, hd;
    float q[ATT_MOST], k[2][ATT_MOST], v[2][ATT_MOST]; /* [1]: with another token */
    int nids;                                          /* a prompt whose logits are wanted too; 0: none */
    int32_t ids[MOST_IDS];
    float o[2][ATT_MOST + GUARD], logits[MOST_LOGITS];
} Attention;
static const float UNTOUCHED = 12345; /* what is in o before */

// ---- 2 and 3: who may be seated -------------------------------------------------------------------------------------

enum { LINE = 64, SWEEPS = 40 };
typedef struct {
    int s[LINE], n[LINE]; /* of the prompts */
    int gbs, num_gpu_batches, page_tokens, count, sweeps;
    int first;                        /* the first sweep that is looked at */
    int stops;                        /* the seat whose sequence stops before it; -1: none */
    int limit;                        /* of the GPU's pages; -1: none */
    int may[SWEEPS], entered[SWEEPS]; /* before each sweep: what seats_for said, who entered */
} Line;

// ---- 4: error diffusion ---------------------------------------------------------------------------------------------

enum { DEALT = 60, MOST_DEALT = 48 * 16 }; /* items; the weights of OPT-30B */
typedef struct {
    double share[3], size[MOST_DEALT];
    int items, layers; /* layers: the items are the weights of OPT-30B, which place_weights deals */
    int tier[MOST_DEALT];
} Deal;

// ---- 5 and 6: the engine --------------------------------------------------------------------------------------------

enum { PROMPTS = 5, RUN_TOKENS = 4, VOCAB = 131, CHANNELS = 7, KINDS = 4 };
typedef struct {
    int s[PROMPTS], words, weights; /* words, weights: the seeds of the prompts and of the model */
    double share[6];
    int gbs, num_gpu_batches, page_tokens, delegated;
} RunCase;
typedef struct {
    RunCase run;
    int ended; /* prompts that got their tokens */
    int32_t ids[PROMPTS][RUN_TOKENS];
    float logits[PROMPTS][RUN_TOKENS][VOCAB];
    uint64_t moved[CHANNELS][KINDS]; /* bytes, and flops of GPU and CPU */
} SmallRun;

// ---- 5, 6 and 14: what each square had ------------------------------------------------------------------------------
//
// When a run was wrong, the judge asks for this to name the first square that differs from its own; it gives no points for
// that. When a run of 5 was right, it looks for data that were loaded too late. Rows are in the order of the batch.

enum { LONGEST = 16, MOST_ROWS_X = PROMPTS * LONGEST, MOST_SEEN = LONGEST + RUN_TOKENS };
enum { MOST_SWEEPS = 3 * RUN_TOKENS, MOST_COLUMNS = 7, MOST_K = 3, LOADED_KINDS = 3 };
/* A row as two numbers: the sum of its numbers, and of their absolute values. */
typedef struct {
    float sum, size;
} Row;
/* The sequences for which a processor has computed attention, and k and v of the tokens that each has attended to. */
typedef struct {
    int n, len[PROMPTS];
    Row kv[2][PROMPTS][MOST_SEEN];
} Attended;
typedef struct {
    int arrived, left;     /* rows of x */
    Row x[2][MOST_ROWS_X]; /* x as it arrived [0] and as it left [1] */
    Attended by[2];        /* the GPU [0], the CPU [1] */
    int prompt[PROMPTS];   /* of the head: whose tokens were chosen */
    int computed; /* the sweep has asked for the computation of so many squares, this one included; 0: not of this one */
    /* When it asked for this square's weights, cache and activations, the next to be computed was square number ...; 0:
     * never. */
    int loaded[LOADED_KINDS];
} SquareSeen;
/* The squares of all sweeps: sweep i of block b is number b RUN_TOKENS + i. */
typedef struct {
    int computed; /* the squares for whose computation the sweep has asked */
    SquareSeen at[MOST_SWEEPS][MOST_COLUMNS][MOST_K];
} Squares;
typedef struct {
    RunCase run;
    Squares squares;
} RunSeen;

// ---- 7: Appendix A.3 in generation ----------------------------------------------------------------------------------

enum { CTOG_G, GTOC_G, DTOC_G, CTOD_G, COMP_G, NROWS_G };
static const char *const row_g[NROWS_G] = {"ctog^g", "gtoc^g", "dtoc^g", "ctod^g", "comp^g"};
enum { PAPER_VARS = 11 };
typedef struct {
    double bdw[4][2], mm_flops[2], bmm_flops[2], cpu_flops[2];
    int l, h1, h2, s, n, gbs, num_gpu_batches;
    struct {
        int found, equal;
        double a[PAPER_VARS], b;
    } row[NROWS_G];
} Rows;

// ---- 8 and 13: the simplex method -----------------------------------------------------------------------------------

enum { PROGRAM_VARS = 24, PROGRAM_ROWS = 64 };
typedef struct {
    int n, m, equal[PROGRAM_ROWS];
    double c[PROGRAM_VARS], a[PROGRAM_ROWS][PROGRAM_VARS], b[PROGRAM_ROWS];
    int verdict; /* LpVerdict */
    double value;
} Program;

/* What the rules look at: costs of the phase, and of one column the entries and right-hand sides. What they say: the column
 * that enters and the row that leaves in phase 2. */
enum { RULES_M = 4, RULES_N = 5 };
typedef struct {
    double cost[RULES_N + RULES_M], entry[RULES_M], right[RULES_M];
    int column, basic[RULES_M];
    int entering, leaving;
} Rules;

/* mini.c's Tableau: behind the columns are the right sides, and behind the rows the costs, and those of phase 1. */
enum { MINI_ROWS = 31, MINI_COLUMNS = 12, MINI_COST = MINI_ROWS };
typedef struct {
    int basic[MINI_ROWS], other[MINI_COLUMNS];
    double at[MINI_ROWS + 2][MINI_COLUMNS + 1];
} MiniTableau;
typedef struct {
    MiniTableau before;
    int r, c; /* basic[r] and other[c] are exchanged */
    MiniTableau after;
} Pivot;
typedef struct {
    MiniTableau before;
    MiniTableau after;
    int ended; /* what minimize returned, in phase 2 */
} MiniProgram;

// ---- 9: groups of a few bits ----------------------------------------------------------------------------------------

enum { PACKED = 192, MOST_STRIDE = 3 };
typedef struct {
    float x[PACKED];
    int n, stride, bits, group;
    float back[PACKED];
    int finite;
} Groups;

// ---- 10: the tokens with the largest scores -------------------------------------------------------------------------

enum { NH = 2, HEAD = 4, H1 = NH * HEAD, SEQS = 2, PAGE = 2, PAGES = 8, LEN = PAGE * PAGES, MOST = LEN + 1 };
typedef struct {
    float score[SEQS][NH][LEN]; /* halves, which q and k give exactly */
    int32_t len[SEQS], pages[SEQS][PAGES];
    double sparsity;
    int32_t tokens[SEQS][NH][MOST];
    float weights[SEQS][NH][MOST];
} Selection;

// ---- 11: a pipeline -------------------------------------------------------------------------------------------------
//
// A case says what the formulas speak of: t, x, K and so on; what the function gets is the sums over sweeps that a plan
// has. [0] is generation, [1] prefill.

typedef struct {
    int M, G, K, l, blocks, n;
    double t[2], x[2], d;
    double prefill_s, token_s, T;
} Pipeline;

// ---- 12 and 18: kernels ---------------------------------------------------------------------------------------------

enum { TABLE = 20, GATHERED = 5, POOL = 12, PER_PAGE = 3, SEQUENCES = 2 };
/* Columns of most rows that are gathered, and of the widest; a block has threads for 2048 at once. */
enum { WIDE_ROW = 700, WIDEST = 2400, MOST_NUMBERS = POOL * PER_PAGE * WIDEST };
typedef struct {
    int idx[GATHERED], seq[GATHERED], pos[POOL], pages[POOL];
    _Alignas(16) uint16_t act[2 * MOST_NUMBERS]; /* x, and y */
    _Alignas(16) uint16_t table[MOST_NUMBERS];
    _Alignas(16) uint16_t pair[2 * MOST_NUMBERS]; /* w and b, or the pools of k and v */
} Data;
/* Rows of x are normalized with w and b; or rows of a table are gathered into y, or as pairs of k and v put into pages. */
enum { NORMALIZE, GATHER, SCATTER };
typedef struct {
    int what, rows, cols;
    int onto; /* y is x, or a sum with what it has */
    Data before, after;
    int64_t most_work; /* numbers that one thread has rounded */
} Kernel;

// ---- 20: attention in mini.cu ---------------------------------------------------------------------------------------

enum { TILE = 128, MOST_TOKENS = 5 * TILE, MOST_HEADS = 3, WIDE = TILE + 16, MOST_ROWS = 4 };
/* Row r of q sees first + r tokens. */
typedef struct {
    int rows, first, nh, hd;
    int halves;                                 /* a cache of F16, not the floats of a prefill */
    int sparse, kept[MOST_HEADS * MOST_TOKENS]; /* sparse: of the other tokens v is not read */
    float q[MOST_ROWS * MOST_HEADS * WIDE];     /* (rows, nh, hd) */
    float k[MOST_TOKENS * MOST_HEADS * WIDE];   /* (tokens, nh, hd) */
    float v[MOST_TOKENS * MOST_HEADS * WIDE];
    float o[MOST_ROWS * MOST_HEADS * WIDE + GUARD];
    int64_t most_work; /* halves that one thread has read */
} Tiles;

// ---- 14: mini.c -----------------------------------------------------------------------------------------------------

enum { MINI_LINKS = 4 };
enum { MINI_WORDS = 700 };
typedef struct {
    char words[MINI_WORDS]; /* the arguments of mini, a line each */
    int ended;              /* prompts that got their tokens */
    int32_t ids[PROMPTS][RUN_TOKENS];
    uint64_t carried[MINI_LINKS]; /* bytes */
    double T;                     /* of --policy: seconds of a block; else NaN */
} MiniRun;
typedef struct {
    char words[MINI_WORDS];
    Squares squares;
} MiniSeen;

// ---- 15: what must come after what ----------------------------------------------------------------------------------

enum { OPS = 24, BYTES = 5, LANES = 4, UNKNOWN = 31 };
/* In a set of ops bit j is op j; UNKNOWN stands for what was not posted. */
typedef struct {
    int lane[OPS];
    uint32_t written[OPS], read[OPS]; /* bit b: byte b */
    uint32_t after[OPS];              /* the ops whose events it waits for */
    int events[OPS];
} Posted;

// ---- 16: the search over blocks, and the frontier of Figure 1 -------------------------------------------------------

enum { MOST_FOUND = 64, ASKED = 64 };
/* A policy that was found. */
typedef struct {
    double share[6];
    int gbs, num_gpu_batches, schedule, delegated, table_home, piece_rows, workspaces;
} Choice;
typedef struct {
    int large; /* OPT-350M, not OPT-125M */
    int s, n;
    double gpu, cpu; /* bytes of the tiers */
    int gbs, num_gpu_batches, fixed_gbs, fixed_batches, frontier;
    int nbest;
    Choice best;
    int nfrontier;
    Choice found[MOST_FOUND];
} Question;

// ---- 17 and 19: schedules -------------------------------------------------------------------------------------------

typedef struct {
    int schedule; /* and an IoCase */
    int l, h1;
    double layer_bytes, head_bytes;
    int s, n, gbs, K, count;
    double sweeps, weights, cache, activations;
} Count;

/* A fourth schedule in the place of the diagonal. Its record is what it said, call by call; the judge runs the same prompts
 * with what it said. */
enum { RACING = 80, MOST_CALLS = 1 << 14 };
typedef struct {
    int s[RACING], n[RACING], gbs, K;
    int calls, said[MOST_CALLS];
} Race;

#endif
