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

typedef enum { F32, F16, BF16, I32 } Type;
static inline size_t type_bytes(Type t) { return t == F32 || t == I32 ? 4 : 2; }

/* The paper's three-level memory hierarchy (section 3). NTIERS also means "nowhere". */
typedef enum { TIER_GPU, TIER_CPU, TIER_DISK, NTIERS } Tier;

/* A view of a matrix; it owns nothing. On GPU and CPU offset counts from the tier's arena; on disk from the start of
 * `file` (0: the offload file, 1 and up: the checkpoint's). Row r begins at offset + r * ld * type_bytes(type). */
typedef struct {
    Tier tier;
    Type type;
    int file;
    size_t offset;
    int rows, cols;
    size_t ld; /* elements from one row to the next, cols when dense */
} Tensor;

// ---------------------------------------------------------------------------------------------------------------
// json.c: strict JSON on top of cJSON
// ---------------------------------------------------------------------------------------------------------------

/* Parses text[0..len) as exactly one JSON value. Refuses what cJSON would let pass: invalid UTF-8, \u0000 (it would cut
 * a string short), lone surrogates, duplicate keys in one object, bytes after the value, nesting deeper than 64. what names
 * the source in messages ("models/x/config.json", "prompts.jsonl line 7"). Returns NULL and fills err; else cJSON_Delete it. */
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
    int l, h1, h2, nh;    /* layers, hidden size, FFN size, heads */
    int vocab, max_pos;   /* vocabulary; positions (the table has max_pos + 2 rows, positions are offset by 2) */
    int embed;            /* word_embed_proj_dim: columns of the token table; h1 unless the model projects in and out */
    bool pre_norm;        /* do_layer_norm_before; false only in opt-350m */
    bool final_norm;      /* a layernorm after the last layer: pre_norm and not _remove_final_layer_norm */
    int eos;              /* </s>, also the first token of every prompt (2) */
} OptConfig;

/* The tensors of one decoder layer. A weight is followed by its bias; matrices are (out, in) as in the checkpoint. */
typedef enum {
    LN1_W, LN1_B, Q_W, Q_B, K_W, K_B, V_W, V_B, O_W, O_B, LN2_W, LN2_B, FC1_W, FC1_B, FC2_W, FC2_B, NROLES
} Role;

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
    Tensor (*layer)[NROLES];  /* [l], tier DISK, type F16, BF16 or F32, dense */
    Tensor global[NGLOBALS];  /* rows 0 when absent */
    bool dummy;               /* a named size without files: tensors are F16 with file 0, see checkpoint_fill */
    uint64_t seed;            /* of a dummy */
} Checkpoint;

/* Opens dir/config.json and dir/model.safetensors, or the shards of dir/model.safetensors.index.json. Every tensor that
 * OptConfig asks for is present with its shape and a float type, lies inside its file, and overlaps no other. NULL and err
 * otherwise. Names are accepted with and without "model." in front; lm_head.weight absent means tied. */
Checkpoint *checkpoint_open(const char *dir, Error *err);
/* A model of a known size with random weights that depend on seed, tensor and element only. */
Checkpoint *checkpoint_dummy(const OptConfig *config, uint64_t seed);
/* Reads only dir/config.json into *config. */
int checkpoint_config(OptConfig *config, const char *dir, Error *err);
/* Writes elements [first, first+count) of a checkpoint's tensor as F16 to dst: read (not through the mapping, so that a
 * file that shrank is an error and not a SIGBUS) and converted, or generated for a dummy. Fails on a read error and where
 * a BF16 or F32 value is not finite in F16. Thread safe. */
int checkpoint_fill(const Checkpoint *checkpoint, f16 *dst, const Tensor *tensor, size_t first, size_t count, Error *err);
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
/* The bytes of ids[0..n), 0-terminated, malloc'ed; *len their number. Special pieces (<s> <pad> </s> <unk>) and ids without a
 * piece give nothing. Invalid UTF-8 at the very end (a character whose bytes are not all there) or inside becomes U+FFFD, so that the
 * result is always valid UTF-8. */
char *tokenizer_decode(const Tokenizer *tokenizer, const int32_t *ids, int n, size_t *len);
void tokenizer_close(Tokenizer *tokenizer);

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

/* y[r] = table[idx[r]] (or y[r] += with add). y (rows, cols) F32, table (any, cols) F16, BF16 or F32, table_ld in elements. */
void host_embed(float *y, const void *table, Type type, size_t table_ld, const int32_t *idx, int rows, int cols, bool add);
/* y[r] = (x[r] - mean) / sqrt(var + 1e-5) * w + b; y may be x. x, y (rows, cols) F32; w, b (cols) F16. */
void host_layernorm(float *y, const float *x, const f16 *w, const f16 *b, int rows, int cols);
/* y = x w^T + b, then ReLU if relu, then + residual if not NULL (which may be y itself, with y's type F32 and y's ld).
 * x (m, k) F32 dense; w (n, k) F16 dense; b (n) F16 or NULL; y (m, n) F32 or F16, y_ld elements from row to row.
 * Every output sums over k in one fixed order (section 3's x.w_Q and so on). */
void host_linear(void *y, Type y_type, size_t y_ld, const float *x, const f16 *w, const f16 *b, const float *residual, bool relu,
                 int m, int n, int k);
/* Prefill attention: causal softmax(q k^T / sqrt(hd)) v of nseq whole prompts lying one after another. Sequence r owns rows
 * start[r] .. start[r+1]. q, o (rows, h1) F32 dense; kv (rows, 2 h1) F16: a row is its k then its v. q is not yet scaled.
 * Working memory per thread does not grow with nseq or with s x s. */
void host_attend_prefill(float *o, const float *q, const f16 *kv, const int32_t *start, int nseq, int h1, int nh);
/* Decode attention of one new token per sequence over paged KV (section 4.2, computation delegation: the same function serves the
 * GPU tier and the CPU). Sequence r's token t lies in page pages[r*max_pages + t/page_tokens], row t % page_tokens; it attends to
 * tokens 0 .. len[r]-1. k, v: (npages, page_tokens, h1) F16. q, o (nseq, h1) F32. Reads every byte of K and V once, in place. */
void host_attend(float *o, const float *q, const f16 *k, const f16 *v, const int32_t *pages, const int32_t *len, int nseq,
                 int max_pages, int page_tokens, int h1, int nh);
/* Puts kv row r (k then v, (rows, 2 h1) F16) at token pos[r] of sequence seq[r] of the page table (seq may skip and repeat). */
void host_append(f16 *k, f16 *v, const f16 *kv, const int32_t *seq, const int32_t *pos, const int32_t *pages, int rows, int max_pages,
                 int page_tokens, int h1);

typedef struct {
    float temperature; /* 0: greedy */
    float top_p;       /* 1: off */
    int top_k;         /* 0: off */
    uint64_t seed;
} Sampling;

/* The next token of each row of logits (rows, vocab) F32. Greedy: the largest, the lowest id among equals. Otherwise softmax at
 * temperature, cut to top_k, then to the smallest set with mass >= top_p, drawn with a counter-based generator from (seed, prompt[r],
 * pos[r]) alone. ids[rows]. NaN logits never win over numbers. */
void host_pick(int32_t *ids, const float *logits, const int32_t *prompt, const int32_t *pos, const Sampling *sampling, int rows, int vocab);

#ifdef __cplusplus
}
#endif
#endif
