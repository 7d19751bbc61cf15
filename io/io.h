/* io.h: the ground: files, JSON, tokens, and checkpoints. */
#ifndef IO_H
#define IO_H
#include <sys/stat.h>
#include <time.h>

#include "flexgen.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cJSON cJSON;

// -------------------------------------------------------------------------------------------------
// file.c: whole files in, results out
// -------------------------------------------------------------------------------------------------

/* What is wrong with a path that is to be a directory's; NULL: nothing. */
const char *directory_fault(const char *path);
/* Puts dir/name into path. -1 and err if that is too long. */
int file_path(char path[MAX_PATH], const char *dir, const char *name, Error *err);
/* The path of this program with a suffix behind it, where its libraries lie. */
void program_file(char path[MAX_PATH], const char *suffix);
/* Reads bytes [offset, offset + size) of an open file. Returns NULL, or for a message what went
 * wrong. Thread safe. */
const char *file_read_at(int fd, void *to, size_t size, size_t offset);
/* The same, malloc'ed and with a 0 after them; NULL and err, where `name` is for the message. */
char *file_read_part(int fd, const char *name, size_t size, size_t offset, Error *err);
/* Writes them, in the same way. */
const char *file_write_at(int fd, const void *from, size_t size, size_t offset);
/* Opens a regular file for reading: its descriptor, or -1 and err. */
int file_open(const char *path, struct stat *st, Error *err);
/* Reads a whole regular file of at most max_bytes into a malloc'ed buffer with a 0 after it; NULL
 * and err when it is missing, a directory, too large or unreadable. */
char *file_read(const char *path, size_t max_bytes, size_t *len, Error *err);

/* The whole of a file or pipe ("-": standard input), with a 0 after it. NULL and err. */
char *input_read(const char *path, size_t *len, Error *err);
const char *input_name(const char *path); /* for messages */

/* The lines of a text that are not blank, one by one; it begins with text, len and name. Ends of
 * lines, CR LF too, and a byte order mark are not part of a line. */
typedef struct {
    const char *text;
    size_t len;
    const char *name; /* of the text, for messages; or "" */
    size_t at;        /* where the next line begins */
    const char *line; /* this one ... */
    size_t size;
    int number;      /* ... counted from 1 */
    char where[600]; /* for messages: "prompts.jsonl line 7", without a name "line 7" */
} Lines;
/* Goes to the next line; false: there is none. */
bool line_next(Lines *lines);

/* Whether a path is standard output ("-"), a device or a pipe: no file that could be replaced. */
bool output_is_special(const char *path);
/* Whether it is standard output by any name, such as /dev/stdout. */
bool output_is_standard(const char *path);
/* Whether two paths lead to one file, there or still to be made. NULL is no file, and neither is
 * "-". */
bool same_file(const char *a, const char *b);
/* The name of a file beside the one that a path leads to: a link stays a link, and all links to a
 * file have one beside it. -1 and err. */
int file_beside(char name[MAX_PATH], const char *path, const char *suffix, Error *err);
/* Bytes of a file; 0: there is none. -1 and err if that cannot be told. */
int file_size(size_t *size, const char *path, Error *err);
/* Locks an open file until it is closed. Whoever has the lock is waited for, so many seconds. If it
 * cannot be had, errno says why (EWOULDBLOCK). */
bool file_lock(int fd, double patience);
/* What is to become the file or the directory PATH is made as PATH.tmp-PID, one at a time, and goes
 * by unfinished_remove or at the end of the process; what a killed process has left goes now. Its
 * descriptor, or -1 and err. A file's is the caller's. */
int unfinished_begin(const char *path, bool directory, Error *err);
const char *unfinished_name(void);
/* It is whole, and takes the name of PATH. -1 and err. */
int unfinished_end(const char *path, Error *err);
void unfinished_remove(void);
/* Before an hour of work: whether results could be written there. flag names the path in messages.
 * -1 and err. */
int output_check(const char *flag, const char *path, Error *err);
/* Opens a file for results. What is there stays until output_close puts the new file in its place.
 * NULL and err. */
FILE *output_open(const char *flag, const char *path, Error *err);
/* Closes it. -1 and err if not everything could be written; then what was there is still there. */
int output_close(FILE *out, const char *flag, const char *path, Error *err);

/* A text that grows; it begins as {0}. */
typedef struct {
    char *text; /* malloc'ed */
    size_t len, room;
} Text;
/* A stream that writes to its end. A memory stream of the C library would drop what it has no
 * memory for, and its fclose would not say so; here that is the end, as everywhere. */
FILE *text_stream(Text *text);

// -------------------------------------------------------------------------------------------------
// json.c: JSON by cJSON, but stricter, and UTF-8
// -------------------------------------------------------------------------------------------------

/* Bytes of the first character in s[0..len), len > 0; or, with *valid false, of the longest start
 * of a character there
 * ("maximal subpart", Unicode 3.9), for which one U+FFFD stands, as in Python's errors="replace".
 */
size_t utf8_step(const char *s, size_t len, bool *valid);
/* Where the first bytes of s[0..len) are that are not UTF-8 (overlong forms and surrogates are
 * not); len: nowhere. */
size_t utf8_invalid_at(const char *s, size_t len);
bool utf8_valid(const char *s, size_t len);

/* Parses text[0..len) as exactly one JSON value. Also refuses what cJSON would let pass: invalid
 * UTF-8, \u0000 (it would cut a string short), control characters, numbers such as 01 and 1e999,
 * duplicate keys in one object, bytes after the value, nesting deeper than 64. `what` names the
 * source in messages ("models/x/config.json", "prompts.jsonl line 7"). Returns NULL and fills err;
 * else cJSON_Delete it. */
cJSON *json_parse(const char *text, size_t len, const char *what, Error *err);
/* The same, of a value that is an object. */
cJSON *json_object(const char *text, size_t len, const char *what, Error *err);
/* The object in a file of at most max_bytes. */
cJSON *json_read(const char *path, size_t max_bytes, Error *err);
/* The shortest text that is read back to the same bits; cJSON's own printing is content with nearly
 * the same. */
const char *json_number(char text[100], double number);
const cJSON *json_get(const cJSON *object, const char *key); /* or NULL */
/* What a value is, as a message shows it: "an object", 7, "a text"; NULL is "nothing". */
const char *json_describe(char text[100], const cJSON *value);
/* Fills err (EXIT_FAILED) with "WHERE: NAME is VALUE; expected ..." and returns -1. */
__attribute__((format(printf, 5, 6))) int json_refuse(Error *err, const char *where,
                                                      const char *name, const cJSON *value,
                                                      const char *expected, ...);
/* Writes the tree for people, with an end of line. */
void json_print(FILE *out, const cJSON *tree);
/* Whether a value is a whole number from 0 to 2^53, and which. */
bool json_whole(const cJSON *value, size_t *number);
/* Sorts them and returns one that is there twice, or NULL. */
const char *sort_strings(const char **strings, size_t n);
/* Writes s[0..len) as a JSON string; bytes that are not UTF-8 become question marks. */
void json_write_string(FILE *out, const char *s, size_t len);

// -------------------------------------------------------------------------------------------------
// unicode.c: what kind of character a code point is
// -------------------------------------------------------------------------------------------------

/* 'L' a letter, 'N' a number, 'S' a blank, 'O' any other: \p{L}, \p{N} and \s as Hugging Face
 * `tokenizers` knows them. */
char char_kind(uint32_t c);

// -------------------------------------------------------------------------------------------------
// tokenizer.c: byte-level BPE
// -------------------------------------------------------------------------------------------------

typedef struct Tokenizer Tokenizer;

/* Opens dir/vocab.json and dir/merges.txt. vocab is the model's: every id must be below it; gaps
 * are allowed. Refuses two pieces with one id, merges of unknown pieces, a missing byte symbol, a
 * missing </s>, and no merges where there are pieces of several bytes. */
Tokenizer *tokenizer_open(const char *dir, int vocab, Error *err);
/* The end of the word that begins at text[start], start < len; words are encoded one by one. The
 * text is valid UTF-8. */
size_t tokenizer_word_end(const char *text, size_t len, size_t start);
/* Ids of text[0..len) (valid UTF-8), without </s>; the caller frees *ids. Returns their number, or
 * -1 and err. */
int tokenizer_encode(const Tokenizer *tokenizer, const char *text, size_t len, int32_t **ids,
                     Error *err);
/* The bytes of ids[0..n), 0-terminated, malloc'ed; *len their number. Special pieces (<s> <pad>
 * </s> <unk>) and ids without a piece give nothing. Invalid UTF-8 at the very end (a character
 * whose bytes are not all there) or inside becomes U+FFFD, so that the result is always valid
 * UTF-8. */
char *tokenizer_decode(const Tokenizer *tokenizer, const int32_t *ids, int n, size_t *len);
/* How many bytes of text the pieces of ids[0..n) stand for; special pieces stand for none. */
size_t tokenizer_bytes(const Tokenizer *tokenizer, const int32_t *ids, int n);
size_t tokenizer_longest(const Tokenizer *tokenizer); /* bytes that a piece stands for at most */
void tokenizer_close(Tokenizer *tokenizer);

// -------------------------------------------------------------------------------------------------
// checkpoint.c: which model it is; its sizes and shapes are declared in flexgen.h
// -------------------------------------------------------------------------------------------------

enum { MAX_JSON = 100 << 20 }; /* bytes of a JSON file or header of a model */

/* Reads dir/config.json: the sizes, the last component of dir as the name, and *tied, its
 * tie_word_embeddings. -1 and err if it is no OPT. */
int config_read(OptConfig *config, bool *tied, const char *dir, Error *err);
/* Reads dir/name as a JSON object, and puts its path into `path`. NULL and err if it is none. */
cJSON *config_object(char path[MAX_PATH], const char *dir, const char *name, Error *err);

// -------------------------------------------------------------------------------------------------
// checkpoint.c: the tensors of a Hugging Face directory
// -------------------------------------------------------------------------------------------------

/* A safetensors file, open for reading. */
typedef struct {
    char *path;
    int fd;
    size_t size;
    struct timespec changed; /* the last time, when it was opened */
} TensorFile;

struct Checkpoint {
    OptConfig config;
    TensorFile *files; /* the safetensors files; Tensor.file == 1 + index */
    int nfiles;
    bool packed; /* the matrices of the layers are */
    Tensor (
        *layer)[NROLES]; /* [l], tier DISK, type F16, BF16 or F32, dense; a packed matrix (n, k) is
                            U8, (rows of groups, bytes of one) = (n / GROUP, k GROUP_BYTES) */
    Tensor global[NGLOBALS]; /* rows 0 when absent */
    bool untied; /* there is a head that differs from the token table, though config.json says they
                    are one */
    bool dummy;  /* a named size without files: tensors are F16 with file 0, see checkpoint_fill */
    uint64_t seed; /* of a dummy */
};

/* What may be studied: bits of a number, numbers of a group. */
enum { LEAST_BITS = 2, MOST_BITS = 8, LEAST_GROUP = 16, MOST_GROUP = 1024 };
#define PACKED_FORMAT "flexgen-packed-1"

/* Opens dir/config.json and dir/model.safetensors, or the shards of
 * dir/model.safetensors.index.json. Every tensor that OptConfig asks for is present with its shape
 * and a float type (or packed, if __metadata__ says so), lies inside its file, and overlaps no
 * other. NULL and err otherwise. Names are accepted with and without "model." in front. The head is
 * separate with tie_word_embeddings false, and where lm_head.weight differs from the token table.
 */
Checkpoint *checkpoint_open(const char *dir, Error *err);
/* A model of a known size with random weights that depend on seed, tensor and element only. */
Checkpoint *checkpoint_dummy(const OptConfig *config, uint64_t seed);
/* Writes elements [first, first+count) of a checkpoint's tensor to dst as F16 (U8: as they are).
 * They are read (not through a mapping, so that a file that shrank is an error and not a SIGBUS)
 * and converted, or generated for a dummy. Fails on a read error, and if a BF16 or F32 value is not
 * finite in F16. Thread safe. */
int checkpoint_fill(const Checkpoint *checkpoint, void *dst, const Tensor *tensor, size_t first,
                    size_t count, Error *err);
/* Reads a whole tensor as floats and unpacks it if it is packed. The caller frees them. NULL and
 * err if it cannot be read. */
float *checkpoint_floats(const Checkpoint *checkpoint, const Tensor *tensor, Error *err);
/* Whether the matrices of the layers can be packed, in whole groups; -1 and err (EXIT_USAGE) if
 * not. */
int checkpoint_packs(const Checkpoint *checkpoint, Error *err);
/* Writes one row of groups of a matrix, tensor->cols * GROUP_BYTES bytes, to `to`: what
 * quant_pack_rows makes of rows [row * GROUP, (row + 1) * GROUP). The bytes of a U8 tensor are
 * copied. scratch: GROUP * cols numbers; not for U8. -1 and err, which names the tensor, if it
 * cannot be read or a number is not finite. Thread safe. */
int checkpoint_pack(const Checkpoint *checkpoint, uint8_t *to, f16 *scratch, const Tensor *tensor,
                    int row, Error *err);
/* -1 and err, which names the tensor, if one of x[count], its elements from `first` on, is not
 * finite. */
int checkpoint_finite(const Checkpoint *checkpoint, const f16 *x, const Tensor *tensor,
                      size_t first, size_t count, Error *err);
/* One of a checkpoint's tensors. */
typedef struct {
    Tensor *tensor;      /* rows 0: it is absent */
    int layer, role;     /* layer -1: it is outside of the layers, and role is a Global */
    bool vector, matrix; /* it has one dimension; it is a layer's matrix, which may be packed */
} Part;
/* How many there are, with the absent ones, and number t of them: those outside of the layers come
 * first. */
static inline int part_count(const OptConfig *config) { return NGLOBALS + config->l * NROLES; }
Part checkpoint_part(const Checkpoint *checkpoint, int t);
/* The name of the tensor that a view belongs to, "model.decoder.layers.3.fc1.weight". */
const char *checkpoint_name(char name[100], const Checkpoint *checkpoint, const Tensor *view);
/* The part of an open checkpoint that is a stage of a pipeline: layers first .. first+layers-1,
 * with the embedding if it is the first and the head if it is the last. It owns nothing. */
Checkpoint checkpoint_stage(const Checkpoint *whole, int stage, int stages, int first, int layers);
/* A number that two models share only if they are copies of each other, wherever they lie: made of
 * the sizes and of the last bytes of every tensor. */
uint64_t checkpoint_digest(const Checkpoint *checkpoint);
/* -1 and err, which names the file, if one has another size or another time of change than when it
 * was opened. A new file that was put in its place is no change: the old one stays open. Thread
 * safe. */
int checkpoint_unchanged(const Checkpoint *checkpoint, Error *err);
void checkpoint_close(Checkpoint *checkpoint);

#ifdef __cplusplus
}
#endif
#endif
