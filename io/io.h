/* io.h: files, JSON, tokens and checkpoints: the floor that meets the outside world. */
#ifndef IO_H
#define IO_H
#include "flexgen.h"

typedef struct cJSON cJSON;

// -------------------------------------------------------------------------------------------------
// file.c: reads input files, whole or line by line, and writes result files safely
// -------------------------------------------------------------------------------------------------

/* Returns NULL if path is a directory, else what is wrong with it, for a message. */
const char *directory_fault(const char *path);
/* Writes "dir/name" to path. Returns -1 and fills err if that is too long. */
int file_path(char path[MAX_PATH], const char *dir, const char *name, Error *err);
/* Writes the path of this program, followed by suffix, to path. Our libraries lie beside it. */
void program_file(char path[MAX_PATH], const char *suffix);
/* Reads bytes [offset, offset + size) of an open file. Returns NULL, or what went wrong, for a
 * message. Thread safe. */
const char *file_read_at(int fd, void *to, size_t size, size_t offset);
/* Returns the same bytes in a malloc'ed buffer with a 0 after them. On failure returns NULL and
 * fills err, which calls the file `name`. */
char *file_read_part(int fd, const char *name, size_t size, size_t offset, Error *err);
/* Writes bytes [offset, offset + size) of an open file. Returns as file_read_at does. */
const char *file_write_at(int fd, const void *from, size_t size, size_t offset);
/* Opens a regular file for reading. Returns its descriptor, or -1 and fills err; so it does if the
 * file is a pointer of Git-LFS, or a link to nothing. */
int file_open(const char *path, struct stat *st, Error *err);
/* Reads a whole regular file of at most max_bytes into a malloc'ed buffer with a 0 after it.
 * Returns NULL and fills err if the file is missing, a directory, too large or unreadable. */
char *file_read(const char *path, size_t max_bytes, size_t *len, Error *err);

/* Checks that an input whose reading takes so many bytes of memory fits what this process may have.
 * Returns -1 and fills err (EXIT_USAGE) if not. */
int input_fits(const char *name, size_t bytes, Error *err);
/* Returns the name of an input for messages: path, or "standard input" for "-". */
const char *input_name(const char *path);

enum { MAX_LINE = 16 << 20 }; /* bytes of a line at most */
/* An iterator over the lines of an input that are not blank. It holds one line at a time. A line
 * excludes its line ending (LF or CR LF); the first also excludes a byte order mark. */
typedef struct {
    const char *path; /* the input's name for messages */
    FILE *in;
    Text text;        /* the memory of the current line */
    const char *line; /* the current line, of `size` bytes, with a 0 after it or after its CR */
    size_t size;      /* more than MAX_LINE: the line is longer than that, and was cut */
    size_t taken;     /* bytes read since memory was checked */
    int number;       /* the current line's number, counted from 1 */
    char where[32];   /* its place in messages: "line 7" */
} Lines;
/* Opens a file or pipe ("-" is standard input). Returns -1 and fills err on failure. */
int lines_open(Lines *lines, const char *path, Error *err);
/* Goes to the next line. Returns 1, or 0 if there is none, or -1 and fills err if the input cannot
 * be read, or is in UTF-16, or if the process may not have the memory that lines like those so far
 * take. */
int line_next(Lines *lines, Error *err);
/* Makes all of an input one line. What will be made of it takes `factor` times as much memory.
 * Returns -1 and fills err if the input cannot be read, or is in UTF-16, or if the process may not
 * have that. */
int lines_whole(Lines *lines, size_t factor, Error *err);
void lines_close(Lines *lines);

/* Returns true if a path is standard output ("-"), a device or a pipe: no file that could be
 * replaced. */
bool output_is_special(const char *path);
/* Returns a number that two paths share if they lead to one file, directory, device or pipe, or if
 * they would make one file that is not there yet. "-" is standard input. Returns 0 for NULL and for
 * a path into no directory. */
uint64_t file_identity(const char *path);
/* Writes to `name` the real path of a file, followed by suffix. Links are resolved first, so that
 * all links to one file get the same name. Returns -1 and fills err if that fails. */
int file_beside(char name[MAX_PATH], const char *path, const char *suffix, Error *err);
/* Locks an open file until it is closed. If another process holds the lock, waits for it up to
 * `patience` seconds. Returns false and sets errno on failure (EWOULDBLOCK: the lock is still
 * held). */
bool file_lock(int fd, double patience);
/* Begins a new file or directory under a temporary name beside PATH, which messages call by its
 * flag; there is at most one at a time. unfinished_end gives it its name; unfinished_remove, or the
 * end of the process, removes it. If there is something at PATH, the new one has its mode, and its
 * owner as far as that is allowed. Also removes what killed processes have left beside it. Returns
 * its descriptor (a file's belongs to the caller), or -1 and fills err.
 *
 * The name is PATH.tmp-RANDOM-PROOF, where RANDOM are 64 bits that nobody can guess and PROOF is a
 * hash of them, of the user and of the inode. So a name proves nothing about another file, and only
 * a file that this program made is ever taken for its own. It is locked as long as it is being
 * made. */
int unfinished_begin(const char *flag, const char *path, bool directory, Error *err);
/* Renames an open file or directory from NAME-RANDOM to NAME-RANDOM-PROOF. Returns -1
 * and sets errno if that fails. */
int file_prove(char name[MAX_PATH], int fd);
/* Returns true if the open file or directory was made under this name, by a process of the same
 * user that has ended: its proof is right, and nobody has locked it. Locks it. */
bool file_is_dead(int fd, const char *name);
/* Returns the temporary name; "" if nothing is unfinished. */
const char *unfinished_name(void);
/* Renames the complete file or directory to PATH, and syncs that name. Returns -1 and sets errno if
 * that fails. */
int unfinished_end(void);
void unfinished_remove(void);
/* Syncs the directory in which a file has this name. Returns -1 and sets errno if that fails. */
int name_sync(const char *path);
/* Checks, before an hour of work, that results could be written to path: that a new file can be
 * made beside it, and that no other process has locked the old one. Returns -1 and fills err if
 * not; the message calls the path by its flag. */
int output_check(const char *flag, const char *path, Error *err);
/* Opens a file for results. An existing file stays as it is until output_close replaces it. Returns
 * NULL and fills err on failure. */
FILE *output_open(const char *flag, const char *path, Error *err);
/* Closes a file of results and puts it in its place. Returns -1 and fills err if not everything
 * could be written; then the earlier file is still there. */
int output_close(FILE *out, const char *flag, const char *path, Error *err);

// -------------------------------------------------------------------------------------------------
// json.c: JSON by cJSON, with stricter checks, and UTF-8
// -------------------------------------------------------------------------------------------------

enum { NO_CHARACTER = 0x110000 }; /* above the last code point */
/* Writes the code point of the first character of s[0..len), len > 0. Returns its length in bytes.
 * If it is no valid character, *code is NO_CHARACTER and the length is that of its longest valid
 * beginning ("maximal subpart", Unicode 3.9), at least 1. One U+FFFD replaces these bytes, as in
 * Python's errors="replace". */
size_t utf8_step(uint32_t *code, const char *s, size_t len);
/* Returns the index of the first byte of s[0..len) that is not UTF-8, or len if all are. Overlong
 * forms and surrogates are not UTF-8. */
size_t utf8_invalid_at(const char *s, size_t len);
bool utf8_valid(const char *s, size_t len);

/* Parses text[0..len) as exactly one JSON value. Also refuses what cJSON would accept: invalid
 * UTF-8, \u0000 (it would cut a string short), control characters, numbers such as 01 and 1e999,
 * duplicate keys in one object, bytes after the value, and nesting deeper than 64. Returns a tree
 * that the caller frees by cJSON_Delete, or NULL and fills err; the caller, who knows where the
 * text is from, puts this in front (fail_at). */
cJSON *json_parse(const char *text, size_t len, Error *err);
/* Like json_parse, but also refuses a value that is not an object. */
cJSON *json_object(const char *text, size_t len, Error *err);
/* Returns the first byte of the one JSON value that a text is, or 0 if it is none. Nothing is
 * built, and equal keys and numbers beyond 1.7e308 are not noticed. */
char json_kind(const char *text, size_t len);
/* Like json_object, for the current line of an input. The value of a member becomes 0, also in the
 * line, unless its key is among those that are wanted, which stand in quotes in one text. It is
 * checked and not built, so that its size costs no memory; equal keys within it are not noticed. */
cJSON *line_parse(const Lines *lines, const char *wanted, Error *err);
/* Reads the JSON object in a file of at most max_bytes. */
cJSON *json_read(const char *path, size_t max_bytes, Error *err);
/* Reads the JSON object in a file that may be missing; then *tree is NULL. Returns -1 and fills err
 * if the file cannot be read. */
int json_read_if(cJSON **tree, const char *path, size_t max_bytes, Error *err);
/* Writes the shortest text that reads back as exactly this number. (cJSON's own text may read back
 * as a neighbour of it.) */
const char *json_number(char text[100], double number);
/* Returns a member of an object, or NULL if there is none. */
const cJSON *json_get(const cJSON *object, const char *key);
/* Describes a value for a message: "an object", 7, "a text"; NULL is "nothing". */
const char *json_describe(char text[100], const cJSON *value);
/* Fills err (EXIT_FAILED) with "NAME is VALUE; expected ..." and returns -1. */
__attribute__((format(printf, 4, 5))) int json_refuse(Error *err, const char *name,
                                                      const cJSON *value, const char *expected,
                                                      ...);
/* Writes the tree for people to read, with a newline after it. */
void json_print(FILE *out, const cJSON *tree);
/* Returns true if a value is a whole number from 0 to 2^53, and writes it to *number. */
bool json_whole(const cJSON *value, size_t *number);
/* Sorts strings. Returns one that occurs twice, or NULL. */
const char *sort_strings(const char **strings, size_t n);
/* Writes s[0..len) as a JSON string. Bytes that are not UTF-8 become question marks. */
void json_write_string(FILE *out, const char *s, size_t len);

// -------------------------------------------------------------------------------------------------
// unicode.c: kinds of characters
// -------------------------------------------------------------------------------------------------

/* Returns the kind of a code point: 'L' for a letter, 'N' for a number, 'S' for white space, 'O'
 * for any other. These are \p{L}, \p{N} and \s of Hugging Face `tokenizers`. */
char char_kind(uint32_t c);

// -------------------------------------------------------------------------------------------------
// tokenizer.c: byte-level BPE
// -------------------------------------------------------------------------------------------------

typedef struct Tokenizer Tokenizer;

/* Opens dir/tokenizer.json, or else dir/vocab.json and dir/merges.txt, and what the directory has
 * of tokenizer_config.json, special_tokens_map.json and added_tokens.json. vocab is the model's
 * vocabulary size: every id must be below it; gaps are allowed. Refuses two tokens with one id,
 * merges of unknown tokens, a missing byte symbol, special tokens without ids, no merges if there
 * are tokens of several bytes, and all that is not as in OPT's tokenizer. Returns NULL and fills
 * err on failure. */
Tokenizer *tokenizer_open(const char *dir, int vocab, Error *err);
/* Returns the end of the word that begins at text[start], start < len. Words are encoded one by
 * one. The text must be valid UTF-8. */
size_t tokenizer_word_end(const char *text, size_t len, size_t start);
/* Returns the token in front of each prompt, </s> in most models; -1 if there is none. */
int32_t tokenizer_bos(const Tokenizer *tokenizer);
/* Encodes text[0..len) (valid UTF-8) without that token. Added tokens in the text are found,
 * special ones too. Returns the number of ids, which the caller frees, or -1 and fills err. */
int tokenizer_encode(const Tokenizer *tokenizer, const char *text, size_t len, int32_t **ids,
                     Error *err);
/* Returns the text of ids[0..n), malloc'ed and 0-terminated; *len becomes its bytes. Special tokens
 * (such as </s>) and ids without a token give nothing. Invalid UTF-8, inside or at the end
 * (an incomplete character), becomes U+FFFD, so that the result is always valid UTF-8. */
char *tokenizer_decode(const Tokenizer *tokenizer, const int32_t *ids, int n, size_t *len);
/* Returns how many bytes of text ids[0..n) stand for. Special tokens count as none. */
size_t tokenizer_bytes(const Tokenizer *tokenizer, const int32_t *ids, int n);
/* Returns a hash of all tokens, their ids, all merges in their order, how added tokens are matched,
 * and the token in front; 0 of NULL. */
uint64_t tokenizer_digest(const Tokenizer *tokenizer);
/* Returns how many bytes of a text a token stands for at most; INT_MAX if an added token takes
 * white space along. */
size_t tokenizer_longest(const Tokenizer *tokenizer);
void tokenizer_close(Tokenizer *tokenizer);

// -------------------------------------------------------------------------------------------------
// checkpoint.c: config.json and the tensors of a Hugging Face directory
// (flexgen.h declares its functions about the sizes and shapes of OPT models)
// -------------------------------------------------------------------------------------------------

/* Bytes of config.json or an index, and of a safetensors header, at most. Published models have
 * less than 100 KB and 200 KB of them. */
enum { MAX_JSON = 16 << 20, MAX_HEADER = 100 << 20 };

/* Reads dir/config.json: fills config, with the last component of dir as the name, and sets *tied
 * to its tie_word_embeddings. The tokens that end a text are those of dir/generation_config.json if
 * it has any. Returns -1 and fills err if it is not an OPT model's. */
int config_read(OptConfig *config, bool *tied, const char *dir, Error *err);

/* Returns true if a model's file of this name decides, besides its tensors, what the model
 * generates: its configuration and its tokenizer. */
bool is_model_text(const char *name);
/* Writes a line that names the fields of dir/generation_config.json that change what Hugging Face
 * generates and are not used here; nothing if there are none. */
void generation_notice(FILE *out, const char *dir);

/* A safetensors file that is open for reading. */
typedef struct {
    char *path;
    int fd;
    size_t size;
    struct timespec changed; /* its modification time when it was opened */
    uint64_t touched;        /* file_touched of it, when its data was last known to be the same */
} TensorFile;

struct Checkpoint {
    OptConfig config;
    TensorFile *files; /* the safetensors files; Tensor.file is 1 + the index here */
    int nfiles;
    bool packed; /* the files hold the matrices of the layers packed, and perhaps the tables */
    /* (l). Each tensor has tier DISK and type F16, BF16 or F32, and is dense. A packed matrix
     * (n, k) has type U8 and shape (n / GROUP, k * GROUP_BYTES), one row of groups in a row. */
    Tensor (*layer)[NROLES];
    Tensor global[NGLOBALS]; /* rows 0 if absent */
    bool untied;     /* the head differs from the token table, against what config.json says */
    bool dummy;      /* a known size without files: tensors have type F16 and file 0 */
    uint64_t seed;   /* seed of a dummy's random weights */
    uint64_t digest; /* checkpoint_digest, once it is taken: checkpoint_unchanged needs it */
};

/* Limits for studying quantization with eval: bits of a number, and numbers in a group. */
enum { LEAST_BITS = 2, MOST_BITS = 8, LEAST_GROUP = 16, MOST_GROUP = 1024 };
#define PACKED_FORMAT "flexgen-packed-1"

/* Opens dir/config.json and dir/model.safetensors, or the shards of
 * dir/model.safetensors.index.json. On success every tensor that OptConfig asks for is present with
 * its shape and a float type (or packed, if __metadata__ says so), lies inside its file, and
 * overlaps no other. Returns NULL and fills err otherwise. Names may have anything in front of
 * "decoder.", which may be missing. The head is a tensor of its own if
 * tie_word_embeddings is false, or if lm_head.weight differs from the token table. */
Checkpoint *checkpoint_open(const char *dir, Error *err);
/* Makes a model of a known size with random weights, which depend only on the seed, the tensor and
 * the element. */
Checkpoint *checkpoint_dummy(const OptConfig *config, uint64_t seed);
/* Writes elements [first, first + count) of a tensor to dst as F16 (U8 is copied as it is): reads
 * and converts them, or generates them for a dummy. It does not read through a mapping, so that a
 * file that shrank is an error and not a SIGBUS. Returns -1 and fills err on a read error, and if a
 * BF16 or F32 value is not finite in F16. Thread safe. */
int checkpoint_fill(const Checkpoint *checkpoint, void *dst, const Tensor *tensor, size_t first,
                    size_t count, Error *err);
/* Reads a whole tensor as floats, and unpacks it if it is packed. The caller frees them. Returns
 * NULL and fills err if it cannot be read. */
float *checkpoint_floats(const Checkpoint *checkpoint, const Tensor *tensor, Error *err);
/* Checks that the matrices of the layers, and with `head` the tables, can be packed in whole
 * groups. Returns -1 and fills err (EXIT_USAGE) if not. */
int checkpoint_packs(const Checkpoint *checkpoint, bool head, Error *err);
/* Writes one row of groups of a matrix, tensor->cols * GROUP_BYTES bytes, to `to`: the result of
 * quant_pack_rows for rows [row * GROUP, (row + 1) * GROUP), where the last row stands for those
 * that do not exist. Copies the bytes of a U8 tensor.
 * scratch has room for GROUP * cols numbers; U8 does not use it. Returns -1 and fills err, which
 * names the tensor, if it cannot be read or a number is not finite. Thread safe. */
int checkpoint_pack(const Checkpoint *checkpoint, uint8_t *to, f16 *scratch, const Tensor *tensor,
                    int row, Error *err);
/* Checks that all of x[count], the tensor's elements from `first` on, are finite. Returns -1 and
 * fills err, which names the tensor, if one is not. */
int checkpoint_finite(const Checkpoint *checkpoint, const f16 *x, const Tensor *tensor,
                      size_t first, size_t count, Error *err);
/* One tensor of a checkpoint. */
typedef struct {
    Tensor *tensor;      /* rows 0: it is absent */
    int layer, role;     /* layer -1: it is outside of the layers, and role is a Global */
    bool vector, matrix; /* it has one dimension; it is a layer's matrix, which may be packed */
    bool table;          /* it is the token table or lm_head, which may be packed, too */
} Part;
/* Returns the number of tensors, absent ones included. */
static inline int part_count(const OptConfig *config) { return NGLOBALS + config->l * NROLES; }
/* Returns tensor t. Those outside of the layers come first. */
Part checkpoint_part(const Checkpoint *checkpoint, int t);
/* Writes the name of the tensor that a view belongs to, such as
 * "model.decoder.layers.3.fc1.weight". */
const char *checkpoint_name(char name[100], const Checkpoint *checkpoint, const Tensor *view);
/* Returns the part of an open checkpoint that belongs to one stage of a pipeline: layers first ..
 * first + layers - 1, with the embedding if the stage is the first and the head if it is the last.
 * The result owns nothing. */
Checkpoint checkpoint_stage(const Checkpoint *whole, int stage, int stages, int first, int layers);
/* Returns a hash of the sizes and of a sample of every tensor, which hash_tensor describes. Copies
 * of one model share it, wherever they lie. */
uint64_t checkpoint_digest(const Checkpoint *checkpoint);
/* Checks that no file has changed since it was opened: neither its size nor its modification time;
 * and if anything else was done to it, that its digest is still checkpoint->digest. Returns -1 and
 * fills err, which names the file, if one has. A new file put in its place is no change: the old
 * one stays open. Thread safe. */
int checkpoint_unchanged(const Checkpoint *checkpoint, Error *err);
void checkpoint_close(Checkpoint *checkpoint);

#endif
