/* flexgen.h: every shared struct, and the prototypes of every file, in the order in which a reader meets them.
 *
 * Names are the paper's: i is a token, j a layer, k a GPU batch; wg wc wd, cg cc cd, hg hc hd are the fractions of
 * weights, KV cache and activations on GPU, CPU and disk; s and n are prompt and output lengths, l layers, h1 and h2
 * hidden sizes, nh heads. Sizes and offsets in bytes are size_t. The header is valid C and C++.
 * Read next: flexgen.c (the commands), then schedule.c (Figure 4). */
#ifndef FLEXGEN_H
#define FLEXGEN_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "check.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cJSON cJSON;
typedef uint16_t f16; /* IEEE binary16 as bits: storage only, arithmetic is float */

static inline int imin(int a, int b) { return a < b ? a : b; }
static inline int imax(int a, int b) { return a > b ? a : b; }

/* U8: bytes of numbers that quant.c has packed. */
typedef enum { F32, F16, BF16, I32, U8 } Type;
static inline size_t type_bytes(Type t) { return t == F32 || t == I32 ? 4 : t == U8 ? 1 : 2; }

/* How numbers are packed (section 5): `bits` each, in groups of `group`. bits 0: they are not. */
typedef struct {
    uint16_t bits, group;
} Quant;

/* The paper's three-level memory hierarchy (section 3). NTIERS also means "nowhere". */
typedef enum { TIER_GPU, TIER_CPU, TIER_DISK, NTIERS } Tier;

/* A view of a matrix; it owns nothing. On GPU and CPU offset counts from the tier's arena; on disk from the start of
 * `file` (0: the offload file, 1 and up: the checkpoint's). Row r begins at offset + r * ld * type_bytes(type). */
typedef struct {
    Tier tier;
    Type type;
    int file;
    Quant quant; /* of U8 */
    size_t offset;
    int rows, cols;
    size_t ld; /* elements from one row to the next, cols when dense */
} Tensor;

// ---------------------------------------------------------------------------------------------------------------
// json.c: strict JSON on top of cJSON
// ---------------------------------------------------------------------------------------------------------------

/* Parses text[0..len) as exactly one JSON value. Refuses what cJSON would let pass: invalid UTF-8, \u0000 (it would cut
 * a string short), lone surrogates, duplicate keys in one object, bytes after the value, nesting deeper than 64. what names
 * the source in messages ("models/x/config.json", "prompts.jsonl line 7"). Returns NULL and fills err; else cJSON_Delete
 * it. */
cJSON *json_parse(const char *text, size_t len, const char *what, Error *err);

/* Reads a whole regular file of at most max_bytes into a malloc'ed buffer with a 0 after it; NULL and err when it is
 * missing, a directory, too large or unreadable. */
char *file_read(const char *path, size_t max_bytes, size_t *len, Error *err);

/* Whether s[0..len) is valid UTF-8 (no overlong forms, no surrogates, at most U+10FFFF). */
bool utf8_valid(const char *s, size_t len);

// ---------------------------------------------------------------------------------------------------------------
// opt_model.c: OPT sizes and the forward pass (section 3)
// ---------------------------------------------------------------------------------------------------------------

typedef struct {
    char name[64];
    int l, h1, h2, nh;  /* layers, hidden size, FFN size, heads */
    int vocab, max_pos; /* vocabulary; positions (the table has max_pos + 2 rows, positions are offset by 2) */
    int embed;          /* word_embed_proj_dim: columns of the token table; h1 unless the model projects in and out */
    bool pre_norm;      /* do_layer_norm_before; false only in opt-350m */
    bool final_norm;    /* a layernorm after the last layer: pre_norm and not _remove_final_layer_norm */
    int eos;            /* </s>, also the first token of every prompt (2) */
} OptConfig;

/* The tensors of one decoder layer. A weight is followed by its bias; matrices are (out, in) as in the checkpoint. */
typedef enum {
    LN1_W,
    LN1_B,
    Q_W,
    Q_B,
    K_W,
    K_B,
    V_W,
    V_B,
    O_W,
    O_B,
    LN2_W,
    LN2_B,
    FC1_W,
    FC1_B,
    FC2_W,
    FC2_B,
    NROLES
} Role;
/* Matrices are what compression packs; the rest are biases and layernorms. */
static inline bool role_is_matrix(Role role) { return role % 2 == 0 && role != LN1_W && role != LN2_W; }

/* The tensors outside the layers. Absent ones have rows 0: project_in/out when embed == h1, final norm when
 * !final_norm, lm_head when it is tied to the token table. */
typedef enum { TOK_EMBED, POS_EMBED, PROJECT_IN, PROJECT_OUT, FINAL_LN_W, FINAL_LN_B, LM_HEAD, NGLOBALS } Global;

/* Fills *config for "opt-125m" ... "opt-175b" ("facebook/" in front is allowed); -1 if the name is none of them. */
int opt_config_by_name(OptConfig *config, const char *name);
/* "opt-125m, opt-350m, ..." for messages. */
const char *opt_known_names(void);
/* Shapes: vectors have rows 1. */
void opt_role_shape(const OptConfig *config, Role role, int *rows, int *cols);
void opt_global_shape(const OptConfig *config, Global global, int *rows, int *cols);

// ---------------------------------------------------------------------------------------------------------------
// checkpoint.c: a Hugging Face directory, mapped, not read
// ---------------------------------------------------------------------------------------------------------------

typedef struct {
    char *path;
    int fd;
    const uint8_t *map; /* the whole file, read-only */
    size_t size;
} MappedFile;

typedef struct {
    OptConfig config;
    MappedFile *files; /* the safetensors files; Tensor.file == 1 + index */
    int nfiles;
    Quant quant;             /* how the matrices of the layers are packed; bits 0: they are not */
    Tensor (*layer)[NROLES]; /* [l], tier DISK, type F16, BF16 or F32, dense; a packed matrix (n, k) is U8, (rows of groups,
                                bytes of one) = (ceil(n / group), k quant_bytes(group)), its quant set */
    Tensor global[NGLOBALS]; /* rows 0 when absent */
    bool dummy;              /* a named size without files: tensors are F16 with file 0, see checkpoint_fill */
    uint64_t seed;           /* of a dummy */
} Checkpoint;

/* What may be packed: bits of a number, numbers of a group, which is a multiple of LEAST_GROUP. */
enum { LEAST_BITS = 2, MOST_BITS = 8, LEAST_GROUP = 16, MOST_GROUP = 1024 };
#define PACKED_FORMAT "flexgen-packed-1"

/* Opens dir/config.json and dir/model.safetensors, or the shards of dir/model.safetensors.index.json. Every tensor that
 * OptConfig asks for is present with its shape and a float type, or where __metadata__ says so packed, lies inside its
 * file, and overlaps no other. NULL and err otherwise. Names are accepted with and without "model." in front;
 * lm_head.weight absent means tied. */
Checkpoint *checkpoint_open(const char *dir, Error *err);
/* A model of a known size with random weights that depend on seed, tensor and element only. */
Checkpoint *checkpoint_dummy(const OptConfig *config, uint64_t seed);
/* Reads only dir/config.json into *config. */
int checkpoint_config(OptConfig *config, const char *dir, Error *err);
/* Writes elements [first, first+count) of a checkpoint's tensor as F16 to dst, or of U8 as the bytes they are: read (not
 * through the mapping, so that a file that shrank is an error and not a SIGBUS) and converted, or generated for a dummy.
 * Fails on a read error and where a BF16 or F32 value is not finite in F16. Thread safe. */
int checkpoint_fill(const Checkpoint *checkpoint, void *dst, const Tensor *tensor, size_t first, size_t count, Error *err);
/* Writes one row of groups of a matrix to `to`, tensor->cols quant_bytes(group) bytes: what quant_pack_rows makes of rows
 * [row group, (row + 1) group), as far as there are so many, or of a U8 tensor, whose quant it must be, the bytes that are
 * there. scratch: group * cols numbers; not for U8. -1 and err that names the tensor where it cannot be read or a number
 * is not finite. Thread safe. */
int checkpoint_pack(const Checkpoint *checkpoint, uint8_t *to, f16 *scratch, const Tensor *tensor, int row, Quant quant,
                    Error *err);
/* -1 and err that names the tensor where one of x[count], its elements from `first` on, is not finite. */
int checkpoint_finite(const Checkpoint *checkpoint, const f16 *x, const Tensor *tensor, size_t first, size_t count,
                      Error *err);
/* The name of the tensor that a view belongs to, "model.decoder.layers.3.fc1.weight". */
const char *checkpoint_name(char name[100], const Checkpoint *checkpoint, const Tensor *view);
void checkpoint_close(Checkpoint *checkpoint);

/* The plain forward of one whole sequence, written to be read beside section 3: no tiers, no pages, no lanes. Everything
 * is float but weights, and K and V rounded to F16 as the cache stores them. logits is (n, vocab), for all positions.
 * ids[n], n <= max_pos. Slow on purpose. Fails on a read error. */
int reference_forward(float *logits, const Checkpoint *checkpoint, const int32_t *ids, int n, Error *err);

// ---------------------------------------------------------------------------------------------------------------
// tokenizer.c: byte-level BPE
// ---------------------------------------------------------------------------------------------------------------

typedef struct Tokenizer Tokenizer;

/* Opens dir/vocab.json and dir/merges.txt. vocab is the model's: every id must be below it; gaps are allowed. Refuses two
 * pieces with one id, merges of unknown pieces, a missing byte symbol, a missing </s>. */
Tokenizer *tokenizer_open(const char *dir, int vocab, Error *err);
/* Ids of text[0..len) (valid UTF-8), without </s>; the caller frees *ids. Returns their number, or -1 and err. */
int tokenizer_encode(const Tokenizer *tokenizer, const char *text, size_t len, int32_t **ids, Error *err);
/* The bytes of ids[0..n), 0-terminated, malloc'ed; *len their number. Special pieces (<s> <pad> </s> <unk>) and ids without
 * a piece give nothing. Invalid UTF-8 at the very end (a character whose bytes are not all there) or inside becomes U+FFFD,
 * so that the result is always valid UTF-8. */
char *tokenizer_decode(const Tokenizer *tokenizer, const int32_t *ids, int n, size_t *len);
/* How many bytes of text the pieces of ids[0..n) stand for; special pieces, none. */
size_t tokenizer_bytes(const Tokenizer *tokenizer, const int32_t *ids, int n);
void tokenizer_close(Tokenizer *tokenizer);

// ---------------------------------------------------------------------------------------------------------------
// quant.c: group-wise quantization (section 5)
//
// A group of n numbers, n <= quant.group, is 4 + codes bytes: its min and its scale, F16, little-endian, then a code of
// quant.bits (2 to 8) for each number, then zeros to a whole multiple of 4 bytes.
//     scale = (max - min) / (2^bits - 1), rounded up to F16      code = round((x - min) / scale)
// What comes back is F16(min + scale * code): within half a scale and F16's rounding of x, exact in a constant group. Codes
// of 4 bits lie as SIMD reads them: number i in byte i / 32 * 16 + i % 16, in its low half where i % 32 < 16, else in its
// high half. Codes of another width are a string of bits, the first lowest.
// ---------------------------------------------------------------------------------------------------------------

/* Bytes of n numbers in groups, one behind the other; the last may be shorter. */
size_t quant_bytes(Quant quant, int n);
/* Packs x[0], x[stride], ... x[(n-1) stride]. False where one of them is not finite; its group then gives NaN. */
bool quant_pack(uint8_t *to, const f16 *x, size_t stride, int n, Quant quant);
void quant_unpack(f16 *x, size_t stride, const uint8_t *from, int n, Quant quant);

/* A weight w (n, k) is grouped along n, its output channels, which stride in a checkpoint; packed, a group is contiguous:
 * numbers (g group .. , c) begin at byte (g k + c) quant_bytes(quant, group). Where n is no multiple of group, the last row
 * of groups has room for whole ones as well. */
size_t quant_matrix_bytes(Quant quant, int n, int k);
/* One row of groups: rows <= group rows of w. Fast; the same bytes as quant_pack. */
bool quant_pack_rows(uint8_t *to, const f16 *w, int rows, int k, Quant quant);
void quant_unpack_rows(f16 *w, const uint8_t *from, int rows, int k, Quant quant);

/* A token's k or v, x (nh, hd), is grouped within heads: head h begins at byte h quant_bytes(quant, hd). Fast. */
bool quant_pack_heads(uint8_t *to, const f16 *x, int nh, int hd, Quant quant);

// ---------------------------------------------------------------------------------------------------------------
// quantize.c: a packed copy of a checkpoint
// ---------------------------------------------------------------------------------------------------------------

/* What a copy came to. */
typedef struct {
    int files;
    size_t before, after;     /* bytes of the source's files, of the copy's tensors */
    double bits, packed_bits; /* of a number of the copy: of all, of those in the packed matrices */
} CopyStats;

/* Writes a copy of the checkpoint in dir to the directory output, with the matrices of the layers packed and the rest as
 * F16, which checkpoint_open reads; quantize.c says how it is laid out. Shards are of at most shard_bytes, or of one layer.
 * output is new, or empty. progress may be NULL. -1 and err for what checkpoint_open or checkpoint_pack refuse, for a
 * checkpoint that is packed already, for an output that is there (both EXIT_USAGE), for a disk that is full; then nothing
 * is left behind. A killed program leaves OUTPUT.tmp-PID. */
int checkpoint_quantize(CopyStats *stats, const char *dir, const char *output, Quant quant, size_t shard_bytes, int threads,
                        FILE *progress, Error *err);

// ---------------------------------------------------------------------------------------------------------------
// host.c: the arithmetic of the device that is this CPU. Plain functions on plain pointers, the specification of
// the CUDA launchers of the same names.
//
// Batch invariance: a row of a result depends on that row's inputs only, bit for bit, whatever the other rows, the
// number of threads, the page size or the number of sequences. Activations are float, weights and KV f16.
// ---------------------------------------------------------------------------------------------------------------

float f16_to_f32(f16 x);
f16 f32_to_f16(float x); /* to nearest even */
/* "AVX-512", "AVX2", "portable": what the kernels were compiled for. */
const char *host_isa(void);
/* Threads the kernels may use from now on (OpenMP); 0 asks for all cores. Returns the number. */
int host_set_threads(int threads);

/* y[r] = table[idx[r]] (or y[r] += with add). y (rows, cols) F32 or F16, table (any, cols) F16, BF16 or F32, table_ld in
 * elements. */
void host_embed(void *y, Type y_type, const void *table, Type type, size_t table_ld, const int32_t *idx, int rows, int cols,
                bool add);
/* y[r] = (x[r] - mean) / sqrt(var + 1e-5) * w + b; y may be x. x, y (rows, cols) F32; w, b (cols) F16. */
void host_layernorm(float *y, const float *x, const f16 *w, const f16 *b, int rows, int cols);
/* y = x w^T + b, then ReLU if relu, then + residual if not NULL (which may be y itself, with y's type F32 and y's ld).
 * x (m, k) F32 dense; w (n, k) F16 dense; b (n) F16 or NULL; y (m, n) F32 or F16, y_ld elements from row to row.
 * Every output sums over k in one fixed order (section 3's x.w_Q and so on). */
void host_linear(void *y, Type y_type, size_t y_ld, const float *x, const f16 *w, const f16 *b, const float *residual,
                 bool relu, int m, int n, int k);
/* The same with w (n, k) packed by quant_pack_rows; unpacked inside, on the way. Sums over k in another order than
 * host_linear, as fixed. */
void host_linear_packed(void *y, Type y_type, size_t y_ld, const float *x, const uint8_t *w, Quant quant, const f16 *b,
                        const float *residual, bool relu, int m, int n, int k);
/* Prefill attention: causal softmax(q k^T / sqrt(hd)) v of nseq whole prompts lying one after another. Sequence r owns rows
 * start[r] .. start[r+1]. q, o (rows, h1) F32 dense; kv (rows, 2 h1) F16: a row is its k then its v. q is not yet scaled.
 * Working memory per thread does not grow with nseq or with s x s. */
void host_attend_prefill(float *o, const float *q, const f16 *kv, const int32_t *start, int nseq, int h1, int nh);
/* Decode attention of one new token per sequence over paged KV (section 4.2, computation delegation: the same function
 * serves the GPU tier and the CPU). Sequence r's token t lies in page pages[r*max_pages + t/page_tokens], row t %
 * page_tokens; it attends to tokens 0 .. len[r]-1. k, v: (npages, page_tokens, h1) F16, or with quant.bits packed by
 * quant_pack_heads: then the result is, bit for bit, that of F16 pages with what quant_unpack gives. q, o (nseq, h1) of
 * act_type, F32 or F16 (what a GPU sends down). Reads every byte of K and V once, in place. */
void host_attend(void *o, const void *q, Type act_type, const void *k, const void *v, const int32_t *pages,
                 const int32_t *len, int nseq, int max_pages, int page_tokens, int h1, int nh, Quant quant);
/* Rows of k then v, kv (rows, 2 h1) F16, packed head by head for pages of the cache. */
void host_pack(uint8_t *packed, const f16 *kv, int rows, int h1, int nh, Quant quant);
/* Puts kv row r (k then v, (rows, 2 width) F16, or packed bytes two at a time) at token pos[r] of sequence seq[r] of the
 * page table (seq may skip and repeat). */
void host_append(void *k, void *v, const void *kv, const int32_t *seq, const int32_t *pos, const int32_t *pages, int rows,
                 int max_pages, int page_tokens, int width);

/* Sparse attention (section 5) of a new token reads all of K, but V only of itself and of k = ceil(sparsity past) of the
 * `past` tokens before it: for each query and head those with the largest scores; of equal scores the earlier token. Their
 * number, with itself: */
#ifdef __CUDACC__
__host__ __device__
#endif
    static inline int
    sparse_tokens(double sparsity, int len) {
    double k = sparsity * (len - 1);
    int whole = (int)k;
    return 1 + whole + (k - whole > 1e-9 * k);
}
/* The first half of it: which tokens, ascending, and their softmax over all tokens; what the others weigh is lost. tokens,
 * weights (nseq, nh, most), most >= sparse_tokens of every len; the rest as in host_attend. */
void host_select(int32_t *tokens, float *weights, const void *q, Type act_type, const void *k, const int32_t *pages,
                 const int32_t *len, int nseq, int max_pages, int page_tokens, int h1, int nh, Quant quant, double sparsity,
                 int most);
/* The second half: o = their weighted sum of V. Touches no other token's V. */
void host_weigh(void *o, Type act_type, const int32_t *tokens, const float *weights, const void *v, const int32_t *pages,
                const int32_t *len, int nseq, int max_pages, int page_tokens, int h1, int nh, Quant quant, double sparsity,
                int most);

typedef struct {
    float temperature; /* 0: greedy */
    float top_p;       /* 1: off */
    int top_k;         /* 0: off */
    uint64_t seed;
} Sampling;

/* The next token of each row of logits (rows, vocab) F32. Greedy: the largest, the lowest id among equals. Otherwise
 * softmax at temperature, cut to top_k, then to the smallest set with mass >= top_p, drawn with a counter-based generator
 * from (seed, prompt[r], pos[r]) alone. ids[rows]. NaN logits never win over numbers. */
void host_pick(int32_t *ids, const float *logits, const int32_t *prompt, const int32_t *pos, const Sampling *sampling,
               int rows, int vocab);
/* For evaluation: logp[r] = log softmax(logits[r])[target[r]], and the greedy choice best[r] as host_pick makes it. */
void host_score(float *logp, int32_t *best, const float *logits, const int32_t *target, int rows, int vocab);

// ---------------------------------------------------------------------------------------------------------------
// lanes.c: the table of device functions; the host and the cuda device
// ---------------------------------------------------------------------------------------------------------------

/* What a lane occupies: a link, a processor. */
typedef enum { CTOG, GTOC, DTOC, CTOD, GPU, CPU, NCHANNELS } Channel;

/* In-order queues. W_: weights, C_: cache and activations; READ: disk to CPU, LOAD: CPU to GPU. A_DOWN and A_UP carry the
 * queries of delegated attention down and its results up, so that they never wait behind a slab or a store. PROJECT and
 * FINISH are the two halves of a layer on either side of its attention; they share the GPU, so that batch k+1 can be
 * projected while the CPU still attends for batch k. */
typedef enum { W_READ, W_LOAD, C_READ, C_LOAD, STORE, D_WRITE, A_DOWN, A_UP, PROJECT, FINISH, ATTEND, NLANES } Lane;
extern const Channel lane_channel[NLANES];
extern const char *const lane_name[NLANES], *const channel_name[NCHANNELS], *const tier_name[NTIERS];

/* A point on a lane: it has happened when the lane has finished its seq-th op. A value; seq 0 has always happened. */
typedef struct {
    int lane;
    uint64_t seq;
} Event;

/* What moves or is computed, for the counters. */
typedef enum { WEIGHT, CACHE, ACTIVATION, OTHER, NKINDS } Kind;

/* An order to a lane: begin when every event in after has happened. The rest is for traces and for the sim's rates: i the
 * sweep, j the layer, k the GPU batch by its place in the sweep, batch its number since the beginning, in the order in
 * which they entered; prefill: the batch is in prefill. */
typedef struct {
    Lane lane;
    Kind kind;
    bool prefill;
    int i, j, k, batch, nafter;
    Event after[8];
} Op;

/* One piece of a copy: dst and src have the same shape; types differ only from disk, where weights become F16. */
typedef struct {
    Tensor dst, src;
} Move;

/* One layer's paged KV on one tier, as attention sees it: k and v are (npages * page_tokens, h1) views, or of packed rows
 * (npages * page_tokens, bytes) U8; pages (nseq, max_pages) and len (nseq) I32 views, all on the tier of the processor that
 * attends. Indices only: a GPU kernel reads it as it is. */
typedef struct {
    Tensor k, v, pages, len;
    int page_tokens, h1, nh;
} PageTable;
/* Bytes of a token's K, or V. */
static inline size_t table_row_bytes(const PageTable *table) { return table->k.cols * type_bytes(table->k.type); }

typedef struct {
    size_t moved[NKINDS]; /* bytes, by what they were */
    size_t read[2];       /* bytes of K, of V that attention to the cache has read */
    double busy_s;        /* the lane worked; waits for events are not counted, those for a slowed link are */
} LaneCount;

/* One call of Figure 4 as it ran on one lane: ops of the same call that follow each other at once are one slice. Seconds of
 * Device.now. */
typedef struct {
    Lane lane;
    Kind kind;
    bool prefill;
    int i, j, k, batch;
    double begin, end;
    size_t bytes; /* moved; 0 for arithmetic */
} Slice;

/* What a device did, in the order in which calls ended on each lane. */
typedef struct {
    Slice *slice;
    size_t n, capacity;
    size_t limit;      /* slices behind which nothing more is noted; 0: none */
    long last[NLANES]; /* 1 + index of each lane's newest slice */
} Trace;

/* A device: in-order lanes that carry out ops and meet at events. A function only posts and returns the event of its end;
 * views, page tables and moves are copied by the post, the index arrays that they point to are not. Shapes as in the host_
 * twins. */
typedef struct Device Device;
struct Device {
    const char *name;
    Type act_type;       /* of activations: F32 on the host */
    size_t peak[NTIERS]; /* bytes of each tier in use: how far ops have reached into each term of the plan */
    LaneCount count[NLANES];
    Error notice; /* text: what its user should know, such as memory that could not be pinned; mostly empty */
    Trace *trace; /* where finished ops are noted; NULL: nowhere. Set before the first op */
    double
        link[NCHANNELS];  /* host device: bytes/s that a link is slowed to, set before the first op; 0: as fast as it is */
    int delay_us[NLANES]; /* each op of a lane is held up by so much before it begins; tests find missing events with it */

    Event (*copy)(Device *, const Op *, const Move *, int n);
    Event (*embed)(Device *, const Op *, Tensor y, Tensor table, Tensor idx, bool add);
    Event (*layernorm)(Device *, const Op *, Tensor y, Tensor x, Tensor w, Tensor b);
    /* w F16, or packed, U8, where the device multiplies packed weights (the host; act_type F32) */
    Event (*linear)(Device *, const Op *, Tensor y, Tensor x, Tensor w, Tensor b, Tensor residual, bool relu);
    /* w (n, k) F16 of packed weights, for a device that multiplies F16 alone */
    Event (*unpack)(Device *, const Op *, Tensor w, Tensor packed);
    /* New k, v, rows of (2 h1) F16, as rows of U8 for packed pages: k's heads, then v's */
    Event (*pack)(Device *, const Op *, Tensor packed, Tensor kv, int nh);
    Event (*attend_prefill)(Device *, const Op *, Tensor o, Tensor q, Tensor kv, Tensor start, int nh);
    Event (*attend)(Device *, const Op *, Tensor o, Tensor q, const PageTable *);
    /* Sparse attention: tokens I32 and weights F32 are (nseq, nh * most), by nh * most. fetch brings the V of these tokens,
     * and no other, from their home on disk to their places in the table's staging pages; it is an op of C_READ. */
    Event (*select)(Device *, const Op *, Tensor tokens, Tensor weights, Tensor q, const PageTable *, double sparsity);
    Event (*fetch)(Device *, const Op *, const PageTable *staged, const PageTable *home, Tensor tokens, double sparsity);
    Event (*weigh)(Device *, const Op *, Tensor o, Tensor tokens, Tensor weights, const PageTable *, double sparsity);
    Event (*append)(Device *, const Op *, const PageTable *, Tensor kv, Tensor seq, Tensor pos);
    Event (*pick)(Device *, const Op *, Tensor ids, Tensor logits, Tensor prompt, Tensor pos, const Sampling *);
    /* logp (1, rows) F32, best and target (1, rows) I32 */
    Event (*score)(Device *, const Op *, Tensor logp, Tensor best, Tensor logits, Tensor target);

    /* Puts count elements at element `first` of a dense view on GPU or CPU, at once: for loading, before any op is posted.
     * NULL on the sim, which has nothing to load. */
    void (*upload)(Device *, Tensor dst, size_t first, const void *src, size_t count);
    int (*wait)(Device *, Event, Error *); /* until it has happened; -1 once any op has failed (the first error sticks) */
    void *(*host)(Device *, Tensor);       /* address of a view on the CPU tier, for the thread that posts; on the
                                              sim only index tables have one, the others are NULL */
    double (*now)(Device *);               /* seconds */
    void (*close)(Device *);               /* ends lanes, frees tiers, removes the offload file */
};

typedef struct Plan Plan;
typedef struct Gpu Gpu;
/* Opens the host device with one allocation a tier, as large as the plan says: GPU and CPU in memory, disk in an unlinked
 * file under offload_dir (fully allocated beforehand, so that a full disk is an error here and nowhere else). checkpoint
 * serves disk reads of weights and must outlive the device. NULL and err when memory or disk are not there. */
Device *host_open(const Plan *plan, const Checkpoint *checkpoint, const char *offload_dir, Error *err);
/* Opens the cuda device on an open GPU, which must outlive it: the GPU tier is memory of the GPU, the CPU tier is pinned
 * (where that fails, a line on standard error says so and copies are slower), lanes that touch the GPU are streams. The
 * rest is as on the host. */
Device *cuda_open(Gpu *gpu, const Plan *plan, const Checkpoint *checkpoint, const char *offload_dir, Error *err);

// ---------------------------------------------------------------------------------------------------------------
// flexgen.cu: a GPU, as lanes.c sees it
//
// One stream a lane. The launchers are the twins of the host_ functions of the same names, with the same arguments, but for
// pointers, which are addresses on the GPU, and activations, which are F16; sums are F32. They post kernels on the stream
// of `lane` and return at once, -1 and err where that fails. A row of a result depends on that row's inputs, and in linear
// on the number of rows, alone: attention splits at fixed tokens of a sequence.
// ---------------------------------------------------------------------------------------------------------------

enum { MARKS = 256 }; /* points of a stream that can be waited for at any time, numbered around */

struct Gpu {
    char name[96];           /* "NVIDIA H200, sm_90" */
    size_t total;            /* bytes of its memory */
    size_t overhead;         /* of them in use before there is a GPU tier: context, workspaces of cuBLAS and of attention */
    size_t spare;            /* of them that come on top as kernels are loaded when they are first used */
    int max_head;            /* elements of a head that attention has room for */
    const volatile int *bad; /* not 0 once pick, since alloc, has met logits that are not finite */

    int (*embed)(Gpu *, Lane lane, void *y, const void *table, size_t table_ld, const int32_t *idx, int rows, int cols,
                 bool add, Error *);
    int (*layernorm)(Gpu *, Lane lane, void *y, const void *x, const void *w, const void *b, int rows, int cols, Error *);
    /* cuBLAS. y may be F16 or F32; b and residual may be NULL; residual is y itself, and then there is no ReLU. The lane is
     * PROJECT or FINISH, which have a workspace each. */
    int (*linear)(Gpu *, Lane lane, void *y, Type y_type, size_t y_ld, const void *x, const void *w, const void *b,
                  const void *residual, bool relu, int m, int n, int k, Error *);
    /* rows: of q, start[nseq]; the host knows it, and the kernel's grid needs it. */
    int (*attend_prefill)(Gpu *, Lane lane, void *o, const void *q, const void *kv, const int32_t *start, int nseq,
                          int rows, int h1, int nh, Error *);
    int (*attend)(Gpu *, Lane lane, void *o, const void *q, const void *k, const void *v, const int32_t *pages,
                  const int32_t *len, int nseq, int max_pages, int page_tokens, int h1, int nh, Quant quant, Error *);
    int (*select)(Gpu *, Lane lane, int32_t *tokens, float *weights, const void *q, const void *k, const int32_t *pages,
                  const int32_t *len, int nseq, int max_pages, int page_tokens, int h1, int nh, Quant quant,
                  double sparsity, int most, Error *);
    int (*weigh)(Gpu *, Lane lane, void *o, const int32_t *tokens, const float *weights, const void *v,
                 const int32_t *pages, const int32_t *len, int nseq, int max_pages, int page_tokens, int h1, int nh,
                 Quant quant, double sparsity, int most, Error *);
    int (*pack)(Gpu *, Lane lane, void *packed, const void *kv, int rows, int h1, int nh, Quant quant, Error *);
    int (*append)(Gpu *, Lane lane, void *k, void *v, const void *kv, const int32_t *seq, const int32_t *pos,
                  const int32_t *pages, int rows, int max_pages, int page_tokens, int width, Error *);
    /* w (n, k) F16 = what quant_unpack_rows gives, for all rows of groups */
    int (*unpack)(Gpu *, Lane lane, void *w, const void *packed, int n, int k, Quant quant, Error *);
    int (*pick)(Gpu *, Lane lane, int32_t *ids, const float *logits, const int32_t *prompt, const int32_t *pos,
                const Sampling *sampling, int rows, int vocab, Error *);
    int (*score)(Gpu *, Lane lane, float *logp, int32_t *best, const float *logits, const int32_t *target, int rows,
                 int vocab, Error *);

    /* rows of row_bytes from src to dst, pitches in bytes; either is on the GPU, or on the host (pinned, to overlap) */
    int (*copy)(Gpu *, Lane lane, void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t row_bytes,
                int rows, Error *);

    /* begin and end note the times before and after what is posted between them. A mark's number may be taken again for the
     * one MARKS later, once it has passed. */
    int (*begin)(Gpu *, Lane lane, uint64_t mark, Error *);
    int (*end)(Gpu *, Lane lane, uint64_t mark, Error *);
    int (*after)(Gpu *, Lane lane, Lane other, uint64_t mark,
                 Error *);                                 /* lane goes on when other has reached the mark's end */
    int (*sync)(Gpu *, Lane lane, uint64_t mark, Error *); /* the calling thread sleeps until the mark's end */
    double (*took)(Gpu *, Lane lane, uint64_t first,
                   uint64_t last); /* seconds from first's begin to last's end, both past */
    /* When a past mark began: CLOCK_MONOTONIC at opening, and seconds of the GPU's clock since then. In order on each lane;
     * of this mark nothing can be asked any more. */
    double (*began)(Gpu *, Lane lane, uint64_t mark);

    void *(*alloc)(Gpu *, size_t bytes, Error *);         /* the GPU tier; one at a time */
    void (*release)(Gpu *, void *);                       /* waits for the streams first */
    int (*pin)(Gpu *, void *host, size_t bytes, Error *); /* memory of ours becomes page-locked, so that copies overlap */
    void (*unpin)(Gpu *, void *host);
    int (*upload)(Gpu *, void *dst, const void *src, size_t bytes, Error *);   /* waits; any thread */
    int (*download)(Gpu *, void *dst, const void *src, size_t bytes, Error *); /* for tests */
    size_t (*in_use)(Gpu *); /* cudaMemGetInfo: bytes of the whole GPU, by anyone */
    void (*close)(Gpu *);
};

/* Opens the first GPU (CUDA_VISIBLE_DEVICES chooses) with streams, cuBLAS and workspaces. NULL and err, one line that says
 * what to do, without a driver, without a GPU, with one that is too old or too full. In a build without CUDA there is no
 * such function: its address is NULL. */
Gpu *cuda_open_gpu(Error *err) __attribute__((weak));

// ---------------------------------------------------------------------------------------------------------------
// opt_model.c again: the forward pass through the table of device functions, as pieces of a sweep (section 3)
//
// Each posts on op.lane, the first op behind op.after, and returns its last event. Views: x (rows, h1) is the hidden state,
// changed in place; w one layer's tensors on the GPU; norm and ffn are scratch of at most norm.rows rows, through which the
// rows pass piece by piece.
// ---------------------------------------------------------------------------------------------------------------

/* Rows first .. first+n-1 of a view. */
static inline Tensor tensor_rows(Tensor t, int first, int n) {
    t.offset += (size_t)first * t.ld * type_bytes(t.type);
    t.rows = n;
    return t;
}
/* Columns first .. first+n-1 of a view. */
static inline Tensor tensor_cols(Tensor t, int first, int n) {
    t.offset += (size_t)first * type_bytes(t.type);
    t.cols = n;
    return t;
}

/* The hidden state of new tokens: x = token rows + position rows. tokens: (rows, embed) gathered token rows, or with rows 0
 * the table itself is on the GPU: table, ids. positions (1, rows) I32 are already offset by 2. embedded: scratch for
 * project_in. */
Event opt_embed(Device *device, Op op, const OptConfig *config, const Tensor global[NGLOBALS], Tensor x, Tensor tokens,
                Tensor ids, Tensor positions, Tensor embedded);
/* The half of a layer before attention: q (rows, h1) and kv (rows, 2 h1) F16, a row's k then its v. */
Event opt_project(Device *device, Op op, const OptConfig *config, const Tensor w[NROLES], Tensor q, Tensor kv, Tensor x,
                  Tensor norm);
/* The half after it: x += o w_O, then the MLP; o (rows, h1). */
Event opt_finish(Device *device, Op op, const OptConfig *config, const Tensor w[NROLES], Tensor x, Tensor o, Tensor norm,
                 Tensor ffn);
/* Final norm, project_out and the head: logits (rows, vocab) of the last rows x (rows, h1), which it overwrites. */
Event opt_logits(Device *device, Op op, const OptConfig *config, const Tensor global[NGLOBALS], Tensor head, Tensor logits,
                 Tensor x, Tensor out);

// ---------------------------------------------------------------------------------------------------------------
// tier.c: placement, the plan, KV pages (section 4.2)
// ---------------------------------------------------------------------------------------------------------------

typedef enum { SCHEDULE_ZIGZAG, SCHEDULE_ROW, SCHEDULE_DIAGONAL } Schedule;
extern const char *const schedule_name[];

/* A policy (section 4.3): fractions are 0 to 1, the disk's share is what is left. */
typedef struct {
    double wg, wc, cg, cc, hg, hc;
    int gbs, num_gpu_batches;
    Schedule schedule;
    bool cpu_attention; /* attention over CPU and disk pages runs on the CPU (computation delegation) */
    bool overlap;       /* false: every post is waited for */
    int page_tokens;    /* tokens of a KV page */
    Tier table_home;    /* where the token table (and lm_head) rests */
    Quant weight_quant; /* how the matrices of the layers are packed, on every tier; bits 0: they are F16 */
    Quant cache_quant;  /* how the KV pages are */
    double sparsity; /* of attention to the cache, if between 0 and 1; only with cpu_attention, since only where the pages
                        are can V be passed over */
} Policy;
static inline bool is_sparse(const Policy *policy) { return policy->sparsity > 0 && policy->sparsity < 1; }

typedef struct {
    int32_t *ids; /* s tokens, </s> first; in a scored task s + n */
    int s, n;     /* prompt length; tokens to generate at most, s + n - 1 <= max_pos */
    int from;     /* of a scored task: tokens from this one on, 1 <= from <= s + n - 1, are scored */
} Prompt;

/* What is to be generated. Prompt indices are places in the input. */
typedef struct {
    Prompt *prompts;
    int count;
    Sampling sampling;
    bool keep_logits; /* bring every step's logits to the CPU (tests); not of a scored task */
    bool scored;      /* evaluation: what follows each token is given, and how probable it was is told */
} Task;

/* Rows of a prompt in prefill that the head wants: the last; of a scored task all that are followed by a scored token. */
static inline int head_rows(const Task *task, const Prompt *prompt) {
    return task->scored ? prompt->s + 1 - imin(prompt->from, prompt->s) : 1;
}

/* A place in a block: its GPU batch (of the block; a batch's place in a sweep, Op.k, may be another), the homes of the KV
 * pages and the activations of whoever sits there. */
typedef struct {
    int k;
    Tier kv, act;
    int prompt; /* who sits there, an index into the task; -1: nobody */
    long since; /* the sweep of its prefill */
} Seat;

/* Deals the seats of a block of count sequences, all vacant, to GPU batches of gbs and to tiers, so that the block as a
 * whole has its cg cc cd and hg hc hd to within one sequence. Within a batch seats are ordered by kv tier, and their act
 * tiers never fall back, so that each tier's rows lie together. */
void deal_block(Seat *seats, const Policy *policy, int count);
/* Seats in a block: gbs * num_gpu_batches, or gbs where the schedule keeps one batch in flight. */
int block_size(const Policy *policy);

/* Chooses a home for every tensor of every decoder layer (a weight and its bias stay together), by error diffusion across
 * layers: bytes per tier are wg, wc, wd of all to within the share of one tensor. home is [l][NROLES]. */
void place_weights(Tier (*home)[NROLES], const OptConfig *config, double wg, double wc);

/* One line of the plan: bytes of one tier for one purpose. */
typedef struct {
    Tier tier;
    const char *name, *remedy; /* "KV cache", "--percent (third number), ..." */
    size_t offset, bytes;
} Term;
enum { MAX_TERMS = 48 };

/* Where a layer's tensors lie while it computes: in their GPU home, or at an offset of the layer's staging slot. */
typedef struct {
    Tensor home;        /* tier DISK: in the checkpoint (or the offload file for a dummy) */
    size_t slab_offset; /* in the slot, when home is not the GPU */
} WeightPlace;

/* What the sweeps of one kind have to do for a task if no sequence stops early: sums over these sweeps. */
typedef struct {
    double sweeps;
    double prefills, prompts, prompt_rows, pairs; /* batches in prefill; their prompts, tokens; queries meeting keys */
    double decodes, steps, past;                  /* batches that decode; their new tokens; tokens that those attend to */
    double heads;                                 /* rows that the head wants of both */
} Workload;

/* Every byte that each tier will hold, before anything is allocated, and where. Layer l stands for the head: the token
 * table (or lm_head), which is streamed like a layer when it does not rest on the GPU. */
struct Plan {
    OptConfig config;
    Policy policy;
    Type act_type;
    Term terms[MAX_TERMS];
    int nterms;
    size_t total[NTIERS];       /* of arenas and offload file, and for the disk of the checkpoint's share too */
    size_t offload_bytes;       /* of the disk's total: the offload file */
    double achieved[3][NTIERS]; /* weights, cache, activations: fractions as they come out */

    WeightPlace (*weight)[NROLES]; /* [l] */
    Role (*slab_order)[NROLES];    /* [l] the order of a layer's tensors in its slab: as in the checkpoint */
    WeightPlace global[NGLOBALS];  /* the head streams as layer l when it is not on the GPU */
    Global head;                   /* the matrix that makes logits: LM_HEAD, or TOK_EMBED when they are tied */
    size_t *cpu_slab, *disk_slab;  /* [l + 1] bytes of a layer that stream from the CPU tier, from disk */
    size_t *cpu_slab_offset;       /* [l + 1] in the CPU arena */
    size_t slot_bytes[2];          /* of the two staging slots on the GPU, which streaming layers take in turn */
    size_t disk_slot_bytes[2];     /* of the disk's two staging slots on the CPU tier */

    int slots;        /* GPU batches in flight; with the diagonal schedule one more, through which topups enter */
    long sweeps;      /* that the task takes if no sequence stops early */
    Workload work[2]; /* in sweeps without a prefill; in those with one */
    double a21_kv;    /* bytes of KV at the peak by A.2.1's estimate for the schedule, for the task's mean lengths */
    int max_rows, max_seqs, max_pages,
        chunk;                 /* of a batch: token rows, sequences; pages of a sequence; rows a piece of the layer takes */
    int head_rows, head_chunk; /* rows of a batch that the head wants; so many become logits at a time */
    int off_rows, off_seqs;    /* largest share of a batch whose KV is not on the GPU: rows, sequences */
    size_t kv_row;             /* bytes of a token's K (or V) in a page */
    int npages[NTIERS];        /* KV pages of each tier's pool */
    int staged_pages[2];       /* pages of one staging slot: on the GPU, on the CPU (of the disk) */
    int nws;                   /* rotating workspaces */
    int *act_rows[NTIERS];     /* [slots] rows of activation home of each batch */
    int *act_first[NTIERS];    /* [slots] its first row in the tier's activation term */
    int max_act_rows[NTIERS];
    bool need_x; /* some batch has activations off the GPU: workspaces hold x */

    /* offsets of the regions, by tier where they exist on several */
    size_t kv[NTIERS], kv_staging[2], act[NTIERS], act_staging[2];
    size_t staging[2], disk_staging[2], x, q, kvrow, o, norm, norm2, ffn, embedded, head_x, head_out, logits;
    size_t cpu_q, cpu_o, cpu_kvrow, gathered, cpu_logits;
    size_t kvpacked;               /* new k, v as they go into packed pages */
    size_t unpacked_bytes;         /* 0: none */
    size_t unpacked;               /* a layer's matrices in F16, for a device that multiplies no packed ones */
    size_t unpacked_at[NROLES];    /* from there */
    int most_chosen;               /* of sparse attention: tokens a query and head may choose */
    size_t chosen[2], weighing[2]; /* GPU, CPU: which, and their weights */
    size_t tables[2], table_bytes; /* GPU, CPU: the batches' index tables, two of each, one after another */
    size_t picked[2];              /* GPU, CPU: chosen ids (slots, max_seqs) */
    size_t scores[2]; /* GPU, CPU, of a scored task: log-probabilities, then the greedy choices (slots, 2, head_rows) */
};

/* Plans the task under the policy. Never fails for want of memory: see plan_fits. Fails where a prompt is impossible. */
Plan *plan_make(const Checkpoint *checkpoint, const Policy *policy, const Task *task, Type act_type, Error *err);
void plan_free(Plan *plan);
/* Bytes of a layer's weights as they rest and move: F16, or packed. */
size_t plan_layer_bytes(const Plan *plan);
/* Whether the disk's share of the layers is a copy in the offload file; if not, it is the checkpoint itself. */
bool copied_to_disk(const Plan *plan, const Checkpoint *checkpoint);
/* -1 and err (EXIT_USAGE) when a tier's total is over its capacity: the tier, what it needs and has, its largest term, the
 * flag that shrinks it. */
int plan_fits(const Plan *plan, const size_t capacity[NTIERS], Error *err);
/* The table for people; with peak, after a run, only the totals and the peaks beside them. */
void plan_print(FILE *out, const Plan *plan, const size_t capacity[NTIERS], const size_t *peak);
/* Puts policy->table_home on the highest tier where the plan fits; -1 and err (of the GPU) when none does. */
int table_home(Policy *policy, const Checkpoint *checkpoint, const Task *task, Type act_type, const size_t capacity[NTIERS],
               Error *err);
/* Fills the weights' homes: reads (or generates) every tensor once into its GPU or CPU home, a dummy's disk share into the
 * offload file. */
int weights_load(const Plan *plan, const Checkpoint *checkpoint, Device *device, Error *err);

/* How far views have reached into each term of a plan: measured peaks. Not thread safe. */
typedef struct {
    int nterms;
    Term terms[MAX_TERMS];
    size_t high[MAX_TERMS]; /* bytes of each term touched so far, from its beginning */
} Reach;
/* Nothing is touched yet but what rests in the checkpoint: *peak begins with it. */
void reach_open(Reach *reach, size_t peak[NTIERS], const Plan *plan);
/* Bytes from the first element of a view to behind its last. */
static inline size_t tensor_span(Tensor t) { return t.rows ? ((t.rows - 1) * t.ld + t.cols) * type_bytes(t.type) : 0; }
/* Raises the peaks by what a view reaches further than those before it. Aborts when it lies outside the plan; views of the
 * checkpoint are no part of it. */
void reach_note(Reach *reach, size_t peak[NTIERS], Tensor view);

/* Page indices of one tier's pool: the lowest free one first, so that pages taken together lie together. */
typedef struct {
    uint64_t *free; /* a bit a page */
    int npages, used, peak, hint;
} PagePool;
void pool_open(PagePool *pool, int npages);
int pool_take(PagePool *pool); /* the plan promises that one is there */
void pool_give(PagePool *pool, int page);
void pool_close(PagePool *pool);
/* Pages for `tokens` tokens. */
static inline int pages_for(int tokens, int page_tokens) { return (tokens + page_tokens - 1) / page_tokens; }

/* Computes every product of a layer and of the head once, at the shapes of a prefill and of a decoding step, on whatever
 * the workspaces hold. A GPU's library chooses and loads a kernel when it first meets a shape; the first prompts need not
 * wait for that. Before the run: counters are 0 again. */
int opt_warm_up(Device *device, const Plan *plan, Error *err);

// ---------------------------------------------------------------------------------------------------------------
// admission.c: row, zig-zag, diagonal (sections 4.1 and A.2)
// ---------------------------------------------------------------------------------------------------------------

/* Who is in flight, and which KV pages they will hold. */
typedef struct {
    const Policy *policy;
    const Task *task;
    const int *limit;      /* [NTIERS] pages of each pool; NULL: as many as are needed (the plan) */
    Seat *seat;            /* dealt anew for every block; [min(block_size, task count)] */
    int nseats;            /* of the present block */
    int seated, *in_batch; /* who sits anywhere, in batch k */
    bool *with_members;    /* of batch k, before the last admission */
    int next_prompt;
    long sweep;        /* the one that is to come */
    long n;            /* tokens of a prompt in the mean */
    int horizon;       /* sweeps that the longest prompt takes */
    int *need[NTIERS]; /* pages in sweep i, at [i % horizon], of those seated if none stops early */
    int peak[NTIERS];  /* the largest need so far */
} Admission;

/* limit must outlive it. */
void admission_open(Admission *a, const Policy *policy, const Task *task, const int *limit);
/* Before a sweep: the waiting prompts that enter it take their seats. Fills entered[] with seats and returns their number;
 * the first *topups of them (at most gbs) sit in batches that have members, the others have their batch for themselves.
 * Prompts of one batch, and the topups together, are neighbours in the input. Where nobody is seated and prompts wait,
 * some enter. */
int admission_next(Admission *a, long sweep, int *entered, int *topups);
/* Who sits there has ended with so many tokens. */
void admission_leave(Admission *a, int seat, int generated);
void admission_close(Admission *a);

// ---------------------------------------------------------------------------------------------------------------
// schedule.c: the sweep, Figure 4
// ---------------------------------------------------------------------------------------------------------------

typedef enum { FINISH_STOP, FINISH_LENGTH } FinishReason;

/* Calls back on the thread that runs the schedule. */
typedef struct {
    void *ctx;
    /* A token of a prompt has become known; true ends the sequence there (a stop text). May be NULL. */
    bool (*token)(void *ctx, int prompt, const int32_t *tokens, int n);
    /* A sequence has ended; tokens are without the final </s>. -1 and err stops the run. */
    int (*done)(void *ctx, int prompt, const int32_t *tokens, int n, FinishReason reason, Error *err);
    /* With task.keep_logits: (vocab) of the step that chose token n-1. May be NULL. */
    void (*logits)(void *ctx, int prompt, int n, const float *logits);
    /* Of a scored task: token `at` of the prompt had log-probability logp, and `best` would have been chosen. In order for
     * a prompt. May be NULL. */
    void (*scored)(void *ctx, int prompt, int at, float logp, int32_t best);
    /* After every sweep. May be NULL. */
    void (*sweep)(void *ctx, long sweeps, long tokens);
} Listener;

typedef struct {
    double prefill_s, decode_s, total_s;     /* sweeps in which some batch was in prefill; the others; their sum */
    long prefill_tokens, generated, decoded; /* prompt tokens; new tokens; those of them made by the decode sweeps */
    long sweeps, prefill_sweeps;
} RunStats;

/* Generates for the whole task, block after block, as the plan's policy says. 0, or -1 and err. */
int schedule_run(const Plan *plan, const Task *task, Device *device, const Listener *listener, RunStats *stats, Error *err);

// ---------------------------------------------------------------------------------------------------------------
// trace.c: what happened on the lanes, as a file and as the paper's Table 4
// ---------------------------------------------------------------------------------------------------------------

/* Notes an op that has run from begin to end. It prolongs the lane's newest slice where that is the same call (kind, i, j,
 * k, batch, stage) and ended less than 0.1 ms before. A Trace of zeros is empty. Not thread safe: devices call it under
 * their lock. */
void trace_add(Trace *trace, const Op *op, size_t bytes, double begin, double end);
/* Figure 4's name of the call that a slice is part of: "load_weight", "store_cache", "project", ... */
const char *trace_call(const Slice *slice);
/* Chrome trace JSON (chrome://tracing, Perfetto): one row a lane, one slice a call with its i, j, k, its batch and
 * that batch's token, bytes and stage, times in microseconds from the first slice. What could not be written shows in
 * ferror(out). */
void trace_write(const Trace *trace, const char *process, FILE *out);
void trace_free(Trace *trace);

/* A row of Table 4 for one stage: seconds that its lanes were busy, and how many of them some processor was busy as well.
 */
typedef struct {
    double busy_s, hidden_s;
} Share;
enum { COMPUTE, WEIGHT_READ, CACHE_READ, CACHE_WRITE, ACTIVATION_MOVES, NPARTS };
typedef struct {
    Share part[2][NPARTS]; /* [prefill] */
    double total_s[2];     /* in which anything was busy */
    int sweeps;            /* that the trace knows of */
} Breakdown;
extern const char *const part_name[NPARTS];
/* Times are unions: two lanes that are busy at once with the same part count once. COMPUTE is the GPU's and the CPU's
 * lanes; its hidden_s is the time in which some copy ran beside it. A sweep in which some batch prefills counts as prefill,
 * as in RunStats. */
void trace_breakdown(const Trace *trace, Breakdown *breakdown);

// ---------------------------------------------------------------------------------------------------------------
// lp.c: small linear programs (the inner problem of section 4.3)
// ---------------------------------------------------------------------------------------------------------------

enum { LP_MAX_VARS = 24, LP_MAX_ROWS = 64 };

/* a x <= b, or with equal set a x = b. */
typedef struct {
    const char *name;
    double a[LP_MAX_VARS], b;
    bool equal;
} LpRow;

/* Minimize c x subject to the m rows and x >= 0; x has n variables. */
typedef struct {
    int n, m;
    double c[LP_MAX_VARS];
    LpRow row[LP_MAX_ROWS];
} Lp;

typedef enum { LP_OPTIMAL, LP_INFEASIBLE, LP_UNBOUNDED, LP_LOST } LpVerdict;

/* A verdict and its proof: x, and a weight y for every row, at least 0 for a row with <=.
 *   optimal      x satisfies every row, c + y A >= 0, and c x = -y b: no x can do better. y is what a row's b is worth: by
 *                how much the value falls for each unit more of b
 *   infeasible   y A >= 0 and y b < 0: the rows, weighted by y, add up to something impossible. Rows with y = 0 have no
 *                part in it. x is a point that violates few, and row the one that it violates most
 *   unbounded    x is a direction without end: A x <= 0, E x = 0, c x < 0
 *   lost         no verdict passed its own test: numbers too far apart for doubles, or not finite */
typedef struct {
    LpVerdict verdict;
    int row, pivots;
    double value; /* c x of the optimum */
    double x[LP_MAX_VARS], y[LP_MAX_ROWS];
} LpAnswer;

/* Adds the row 0 x <= b, or = b, and returns it for its coefficients. The name is kept, not copied. */
LpRow *lp_row(Lp *lp, const char *name, bool equal, double b);
/* Simplex in two phases; rows and columns may be of any size, from 1e-12 to 1e15. Takes some 50 microseconds for the LPs of
 * policy.c. */
void lp_solve(LpAnswer *answer, const Lp *lp);
/* a x - b of a row: at most 0 where it holds. */
double lp_excess(const LpRow *row, const double *x, int n);
/* Whether x satisfies the row with nothing to spare. */
bool lp_binds(const LpRow *row, const double *x, int n);

// ---------------------------------------------------------------------------------------------------------------
// hardware.c: a machine as numbers (section 4.3, Table 7)
// ---------------------------------------------------------------------------------------------------------------

/* A rate that depends on a size: seconds are taken to be linear in the size between two points, in proportion to it
 * outside.
 */
enum { MAX_POINTS = 16 };
typedef struct {
    int n; /* points, by ascending size; 0: there is no curve */
    double size[MAX_POINTS], rate[MAX_POINTS];
} Curve;

/* The hardware parameters of section 4.3 and Table 7. Of a pair [0] holds in generation, [1] in prefill. */
typedef struct {
    char name[96];
    double gmem, cmem, nmem;                                   /* bytes that the tiers can hold */
    double ctog_bdw[2], gtoc_bdw[2], dtoc_bdw[2], ctod_bdw[2]; /* bytes/s */
    double mm_flops[2], bmm_flops[2], cpu_flops[2];            /* FLOP/s of linear, of attention on the GPU, on the CPU */
    /* keys that a file may leave out */
    double gpu_bdw, cpu_bdw; /* bytes/s at which the processors read their own memory; 0: no bound */
    double op_s;             /* seconds that every op takes besides; 0 */
    bool shared_cores;       /* a host device: GPU and CPU lanes run on the same cores, activations are F32 */
    /* seconds of these cores that a byte takes which a link copies within memory, or reads or writes on disk; 0 */
    double copy_core_s, disk_core_s;
    /* FLOP/s as measured, reading of memory included: of linear by rows; of attention by the tokens of a prompt, by the
     * tokens that a new one attends to. They go before mm_flops, bmm_flops and cpu_flops. */
    Curve mm_rows, bmm_tokens[2], cpu_tokens;
    Curve mm_packed, bmm_packed, cpu_packed; /* of linear with packed weights; of attention to packed pages */
} Hardware;

/* Reads a hardware file: one JSON object with name, gmem cmem nmem, ctog_bdw gtoc_bdw dtoc_bdw ctod_bdw, mm_flops bmm_flops
 * cpu_flops, each rate also as a pair KEY_p, KEY_g; optional gpu_bdw cpu_bdw op_s shared_cores copy_core_s disk_core_s;
 * optional curves mm_rows, bmm_tokens_p, bmm_tokens_g, cpu_tokens, mm_packed, bmm_packed, cpu_packed, lists of [size,
 * FLOP/s] by ascending size; sources, an object of texts that say where each value is from. -1 and one line (EXIT_USAGE)
 * for a missing, unknown, negative, zero or non-numeric value. */
int hardware_read(Hardware *hardware, const char *path, Error *err);
/* Writes a file that hardware_read reads back to the same numbers; sources may be NULL. What could not be written shows in
 * ferror(out). */
void hardware_write(const Hardware *hardware, const cJSON *sources, FILE *out);

/* The bandwidth of a link, of generation and of prefill. */
static inline const double *link_bdw(const Hardware *hardware, Channel link) {
    const double *const bdw[] = {hardware->ctog_bdw, hardware->gtoc_bdw, hardware->dtoc_bdw, hardware->ctod_bdw};
    return bdw[link];
}
/* Seconds that an op takes at full speed, without op_s. The cost model and the sim ask here, so that they agree. */
/* y (m, n) = x (m, k) w^T: by the curve, or the longer of its flops and of reading and writing everything. act_bytes: of an
 * element of x and y. */
double linear_seconds(const Hardware *hardware, bool prefill, double m, double n, double k, double act_bytes);
/* Causal attention of whole prompts of s tokens, s (s + 1) / 2 pairs of a query and a key each: 4 h1 flops a pair. */
double attend_prefill_seconds(const Hardware *hardware, double nseq, double s, double h1, double act_bytes);
/* The same with packed weights, which are unpacked on the way. */
double linear_packed_seconds(const Hardware *hardware, bool prefill, double m, double n, double k, double act_bytes);
/* New tokens attend to `len` tokens each over paged KV: as many bytes as flops, 4 h1 a token; packed, fewer bytes. */
double attend_seconds(const Hardware *hardware, bool on_cpu, bool prefill, double nseq, double len, double h1, bool packed);

// ---------------------------------------------------------------------------------------------------------------
// profile.c: the machine, measured (section 4.3)
// ---------------------------------------------------------------------------------------------------------------

/* What is measured: a layer's shapes, how far its curves go, how much memory is cold. */
typedef struct {
    int h1, h2, nh, nseq; /* sequences that decode */
    int rows, tokens;     /* largest product; longest prompt, and what a new token attends to */
    size_t cold, disk;    /* bytes of the upper tiers' memory, and of the file */
    double seconds;       /* about so long for a value */
} ProfileSize;
/* The usual: at the model's shapes where they are not too large to be measured in time (config NULL: at the largest). */
ProfileSize profile_size(const Gpu *gpu, const OptConfig *config);

/* Measures this machine through the functions of the device that will run: the host device with so many threads, or on
 * gpu the cuda device; the disk cold, in offload_dir. capacity: bytes of the tiers. Takes less than a minute; says on
 * progress (may be NULL) what it is at. */
int profile_measure(Hardware *hardware, const ProfileSize *size, Gpu *gpu, const char *offload_dir, int threads,
                    const size_t capacity[NTIERS], FILE *progress, Error *err);
/* The same from the file of an earlier time on this machine, or measured and kept there. */
int profile_machine(Hardware *hardware, const ProfileSize *size, Gpu *gpu, const char *offload_dir, int threads,
                    const size_t capacity[NTIERS], FILE *progress, Error *err);
/* That file: hardware-KEY.json in flexgen/ of XDG_CACHE_HOME or ~/.cache. KEY stands for all that the rates depend on: the
 * model's shapes, processor, threads and kernels, GPU, the disk of offload_dir, the profile's version; not the capacities.
 * "" where there is no such directory. */
void profile_path(char *path, size_t size, const ProfileSize *shapes, const Gpu *gpu, const char *offload_dir, int threads);
/* Keeps it there; where that cannot be, does nothing. */
void profile_keep(const Hardware *hardware, const ProfileSize *size, const Gpu *gpu, const char *offload_dir, int threads);
/* Writes the hardware file with how each value was measured, and today's date. */
void profile_write(const Hardware *hardware, FILE *out);

// ---------------------------------------------------------------------------------------------------------------
// policy.c: what a placement costs (section 4.3, Appendix A.3)
// ---------------------------------------------------------------------------------------------------------------

/* The nine fractions, the first variables of every LP here. */
enum { WG, WC, WD, CG, CC, CD, HG, HC, HD, NFRACTIONS };
extern const char *const fraction_name[NFRACTIONS]; /* "wg", ... */

/* A placement and what a cost model expects of it. */
typedef struct {
    double fraction[NFRACTIONS];            /* wg wc wd cg cc cd hg hc hd */
    double T_pre, T_gen, T;                 /* seconds: of a layer, of a layer, of a block (runtime: of the whole task) */
    double throughput;                      /* token/s */
    double peak[NTIERS];                    /* bytes */
    char slowest[2][96], full[NTIERS][200]; /* rows that bind T_gen [0] and T_pre [1], and the tiers; "" */
} Cost;

/* One LP of the paper's: the task, and a block of num_gpu_batches GPU batches of gbs sequences. */
typedef struct {
    int s, n, gbs, num_gpu_batches;
} Block;

/* The paper's variables: the fractions, and the seconds that a layer takes in prefill and in generation. */
enum { T_PRE = NFRACTIONS, T_GEN, NVARS };
/* Its rows, by what they bound: the first of each kind. */
enum { T_PRE_ROWS = 0, T_GEN_ROWS = 5, GPU_ROWS = 10, CPU_ROWS = 22, DISK_ROWS = 24, SUM_ROWS = 25, NROWS = 28 };

/* Appendix A.3 as printed, for one block: minimize T / bls over placements, a row for each term of each max. Rows have the
 * names of their equations: "ctog^p", "gpu_peak^g with att_1^g". */
void paper_lp(Lp *lp, const Hardware *hardware, const OptConfig *config, const Block *block);

/* The best placement of one block by A.3. -1 and one line (EXIT_USAGE) that names the tiers which cannot hold it. */
int paper_cost(Cost *cost, const Hardware *hardware, const OptConfig *config, const Block *block, Error *err);

/* The variables of `runtime`: the fractions, and of sweeps without a prefill [0] and with one [1] the seconds of a layer,
 * and of the last layer with the head behind it. */
enum { LAYER_S = NFRACTIONS, LAST_S = LAYER_S + 2, RUNTIME_VARS = LAST_S + 2 };

extern const char *const memory_row[NTIERS]; /* the names of its rows for the tiers */

/* What this engine does with a task, as an LP over placements: minimize the seconds of all its sweeps. plan: of the task
 * and the policy (its gbs, num_gpu_batches, schedule, overlap, table_home), with everything on the CPU tier and without
 * cpu_attention: what the sweeps do and what the tiers must hold besides is taken from there. delegated: with
 * cpu_attention. capacity: bytes of the tiers. Rows are named like the paper's: "ctog^p", "gpu^g", "GPU memory". */
void runtime_lp(Lp *lp, const Hardware *hardware, const Checkpoint *checkpoint, const Plan *plan, bool delegated,
                const double capacity[NTIERS]);
/* The seconds of all sweeps at a point of the LP; its objective besides has a small price for what lanes do in their shade.
 */
double runtime_seconds(const Lp *lp, const double *x);
/* What it expects of a plan, by the rows of its LP, with the plan's own layers and shares. */
void runtime_cost(Cost *cost, const Lp *lp, const Plan *plan);

// ---------------------------------------------------------------------------------------------------------------
// search.c: the policy search (section 4.3)
// ---------------------------------------------------------------------------------------------------------------

/* What is to be found, and where. */
typedef struct {
    const Hardware *hardware;
    const Checkpoint *checkpoint;
    const Task *task;
    bool one_block; /* the task's prompts are as many as a block may have; a policy is measured by one block of them */
    Type act_type;  /* of the device */
    size_t capacity[NTIERS];
    Policy given;  /* its overlap and page_tokens hold; the rest where it is fixed */
    bool fixed[6]; /* which of wg wc cg cc hg hc are given */
    bool fixed_gbs, fixed_batches, fixed_schedule, fixed_attention;
    Quant allowed;      /* compression that may be taken where given.weight_quant, cache_quant have none; bits 0: none */
    double max_latency; /* seconds that one block may take; 0: any number */
} Search;

/* A policy whose plan fits, and what the cost model `runtime` expects of it. */
typedef struct {
    Policy policy;
    Cost cost;
    double latency; /* seconds of one block */
} Found;

/* The best policies, best first by throughput (on shared cores twice the batches in flight must bring two percent more), at
 * most `most`. Returns their number, or -1 and one line (EXIT_USAGE) that says why there is none. */
int policy_search(Found *found, int most, const Search *search, Error *err);
/* The best throughput for every latency that a block may have (Figure 1), quickest first, at most `most`; as above. */
int policy_frontier(Found *found, int most, const Search *search, Error *err);
/* What the cost model expects of search->given as it is. -1 and err when its plan does not fit. */
int policy_predict(Found *found, const Search *search, Error *err);

// ---------------------------------------------------------------------------------------------------------------
// cluster.c: many machines on paper (sections 4.4 and 6.4)
// ---------------------------------------------------------------------------------------------------------------

/* Equal machines, and the network between neighbours: bytes/s, seconds that a message takes besides. */
typedef struct {
    int nodes;
    double net_bdw, delay_s;
} Cluster;

/* A policy of one machine, and what a pipeline of such machines makes of it. */
typedef struct {
    Found found;
    double prefill_s, token_s, T; /* seconds: of a block's prefill, of one token for all of it, of the block */
    double throughput, decode_throughput;
} ClusterCost;

/* The best policy of the search's task (one block of equal prompts) for the cluster; without offloading, one that keeps
 * everything on the GPUs. -1 and one line (EXIT_USAGE) where a machine's part does not fit. */
int cluster_search(ClusterCost *best, const Search *search, const Cluster *cluster, bool offloading, Error *err);
/* How many machines it takes to keep one sequence on the GPUs; 0: even one layer is too much for one. */
int cluster_least(const Search *search);

// ---------------------------------------------------------------------------------------------------------------
// sim.c: the device that is a clock
// ---------------------------------------------------------------------------------------------------------------

/* Opens the sim for a plan of any act_type: the same lanes and events, but an op only takes time: bytes over the bandwidth
 * of its channel, or flops over the rate of its processor (the longer of that and its bytes over that processor's memory
 * bandwidth). Lanes of one link share its bandwidth equally; the GPU does one op at a time, in the order of posting. No
 * data, no tiers: memory does not grow with the model. now is the simulated clock. */
Device *sim_open(const Plan *plan, const Hardware *hardware, Error *err);

// ---------------------------------------------------------------------------------------------------------------
// job.c: prompts in, completions out
// ---------------------------------------------------------------------------------------------------------------

/* What a user asked for: a task, and what came with each prompt. */
typedef struct {
    char **text, **id; /* [task.count] the prompt as given; its id as JSON text ("7" with or without quotes) */
    Task task;
    int capacity;
} Job;

/* One prompt as a text. default_n tokens are to be generated; less where the model's positions end before. where names it
 * in messages. */
int job_add(Job *job, const char *text, size_t len, const char *id, int n, const Tokenizer *tokenizer,
            const OptConfig *config, const char *where, Error *err);
/* Prompts from a file ("-": standard input): JSON lines {"id"?, "prompt", "max_tokens"?} if the first line begins with {,
 * else plain lines. Blank lines are passed over; an id is a string or a whole number below 2^53 and defaults to the line's
 * number from 0. */
int job_read(Job *job, const char *path, int n, const Tokenizer *tokenizer, const OptConfig *config, Error *err);
void job_free(Job *job);

/* The whole of a file ("-": standard input, and *path becomes its name for messages), with a 0 behind it. NULL and err. */
char *input_read(const char **path, size_t *len, Error *err);
/* Calls take for each of its lines that is not blank, with the number of the line from 0, until it returns -1. Ends of
 * lines, CR LF too, and a byte order mark are no part of a line. */
int input_lines(const char **path, int (*take)(void *ctx, const char *line, size_t len, int number, Error *), void *ctx,
                Error *err);

/* A line on standard error that says how far a run is. */
typedef struct {
    bool on;
    long wanted; /* tokens of the whole run */
    double started, shown;
} Progress;
void progress_open(Progress *progress, bool on, long wanted);
void progress_show(Progress *progress, long sweeps, long tokens);
void progress_clear(const Progress *progress);

/* Writes completions as sequences end: JSON lines {"id", "prompt", "completion", "tokens", "finish_reason"}, each synced.
 */
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

// ---------------------------------------------------------------------------------------------------------------
// eval.c: perplexity and last words (section 6.2, Table 6)
// ---------------------------------------------------------------------------------------------------------------

/* A scored task made of texts, and what its tokens come to. Prompts are windows of a text, or lines whose last word counts.
 */
typedef struct {
    /* every scored token comes from a decoding step, which reads the KV cache: where that is packed, or attention sparse.
     * Otherwise a prompt is one prefill. Set before reading */
    bool stepwise;
    Task task;
    int capacity, window; /* window: tokens of each */
    long tokens, told;    /* that are scored; of them so far */
    size_t bytes;         /* of text that they stand for */
    double *nll;          /* [task.count] -log of the probability of all scored tokens of a prompt */
    bool *missed;         /* [task.count] one of them was not the greedy choice */
    Progress progress;
} Eval;

/* A file as one text as it is, with </s> in front, in windows of so many tokens one after another (0: the model's
 * positions), the first `limit` of them (0: all). The first token of a window is context only. What is left behind the last
 * whole window does not count; a text shorter than a window is one. */
int eval_text(Eval *eval, const char *path, int window, int limit, const Tokenizer *tokenizer, const OptConfig *config,
              Error *err);
/* A file of JSON lines {"text"}, the first `limit` of them (0: all). Of each the last word, with the white space before it,
 * is scored; white space at the end is left out. Of a line too long for the model the beginning is left out. */
int eval_lines(Eval *eval, const char *path, int limit, const Tokenizer *tokenizer, const OptConfig *config, Error *err);
/* The listener that adds up; ctx is the Eval. */
Listener eval_listener(Eval *eval);

/* In whichever order tokens were scored: nll, the mean of -log p over tokens, and exp(nll); bits of a byte of text; and of
 * lines nll over words, and how many words were the greedy choice, token by token. */
typedef struct {
    double nll, perplexity, bits_per_byte; /* of tokens */
    double word_perplexity, accuracy;      /* of prompts */
} EvalResult;
EvalResult eval_result(const Eval *eval);
void eval_free(Eval *eval);

// ---------------------------------------------------------------------------------------------------------------
// report.c: what the commands say of policies and costs
// ---------------------------------------------------------------------------------------------------------------

typedef struct {
    const char *name;
    double value;
} Figure;
void add_figures(cJSON *to, const Figure *figures, size_t n);
/* wg ... hd, gbs, num_gpu_batches, bls, schedule, cpu_cache_compute. */
void add_policy(cJSON *json, const Policy *policy);
/* What a cost model expects: T, T_pre, T_gen, throughput, what binds them, peaks. */
void add_cost(cJSON *json, const Cost *cost);
cJSON *paper_json(const Cost *cost, const Block *block);
void print_paper(const Cost *cost, const Block *block, const Hardware *hardware);
/* The first of n, and under `key` all of them. */
cJSON *found_json(const char *key, const Found *found, int n);
/* A line each: the policy, what it promises, what binds it. */
void print_found(const Found *found, int n);
void add_cluster(cJSON *json, const char *name, const ClusterCost *cost);
void print_cluster(const char *name, const ClusterCost *cost);
/* Writes the object and frees it. */
void print_json(FILE *out, cJSON *json);

#ifdef __cplusplus
}
#endif
#endif
