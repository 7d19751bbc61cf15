/* text.h: files, memory, JSON and tokens: the part of io that knows nothing of models. */
#ifndef TEXT_H
#define TEXT_H
#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>

#include "check.h"

typedef struct cJSON cJSON;

#ifdef __cplusplus
extern "C" {
#endif

// ---------------------------------------------------------------------------------------------------------------
// file.c: whole files in, results out
// ---------------------------------------------------------------------------------------------------------------

enum { MAX_PATH = 4096 };

/* What is wrong with a path that is to be a directory's; NULL: nothing. */
const char *directory_fault(const char *path);
/* Puts dir/name into path. -1 and err if that is too long. */
int file_path(char path[MAX_PATH], const char *dir, const char *name, Error *err);
/* The path of this program with a suffix behind it, where its libraries lie. */
void program_file(char path[MAX_PATH], const char *suffix);
/* Reads bytes [offset, offset + size) of an open file. Returns NULL, or for a message what went wrong. Thread safe. */
const char *file_read_at(int fd, void *to, size_t size, size_t offset);
/* The same, malloc'ed and with a 0 after them; NULL and err, where `name` is for the message. */
char *file_read_part(int fd, const char *name, size_t size, size_t offset, Error *err);
/* Writes them, in the same way. */
const char *file_write_at(int fd, const void *from, size_t size, size_t offset);
/* Opens a regular file for reading: its descriptor, or -1 and err. */
int file_open(const char *path, struct stat *st, Error *err);
/* Reads a whole regular file of at most max_bytes into a malloc'ed buffer with a 0 after it; NULL and err when it is
 * missing, a directory, too large or unreadable. */
char *file_read(const char *path, size_t max_bytes, size_t *len, Error *err);

/* The whole of a file or pipe ("-": standard input), with a 0 after it. NULL and err. */
char *input_read(const char *path, size_t *len, Error *err);
const char *input_name(const char *path); /* for messages */

/* The lines of a text that are not blank, one by one; it begins with text, len and name. Ends of lines, CR LF too, and a
 * byte order mark are not part of a line. */
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
/* Whether two paths lead to one file, there or still to be made. NULL is no file, and neither is "-". */
bool same_file(const char *a, const char *b);
/* The name of a file beside the one that a path leads to: a link stays a link, and all links to a file have one beside it.
 * -1 and err. */
int file_beside(char name[MAX_PATH], const char *path, const char *suffix, Error *err);
/* Bytes of a file; 0: there is none. -1 and err if that cannot be told. */
int file_size(size_t *size, const char *path, Error *err);
/* Locks an open file until it is closed. Whoever has the lock is waited for, so many seconds. If it cannot be had, errno
 * says why (EWOULDBLOCK). */
bool file_lock(int fd, double patience);
/* What is to become the file or the directory PATH is made as PATH.tmp-PID, one at a time, and goes by unfinished_remove or
 * at the end of the process; what a killed process has left goes now. Its descriptor, or -1 and err. A file's is the
 * caller's. */
int unfinished_begin(const char *path, bool directory, Error *err);
const char *unfinished_name(void);
/* It is whole, and takes the name of PATH. -1 and err. */
int unfinished_end(const char *path, Error *err);
void unfinished_remove(void);
/* Before an hour of work: whether results could be written there. flag names the path in messages. -1 and err. */
int output_check(const char *flag, const char *path, Error *err);
/* Opens a file for results. What is there stays until output_close puts the new file in its place. NULL and err. */
FILE *output_open(const char *flag, const char *path, Error *err);
/* Closes it. -1 and err if not everything could be written; then what was there is still there. */
int output_close(FILE *out, const char *flag, const char *path, Error *err);

/* A text that grows; it begins as {0}. */
typedef struct {
    char *text; /* malloc'ed */
    size_t len, room;
} Text;
/* A stream that writes to its end. A memory stream of the C library would drop what it has no memory for, and its fclose
 * would not say so; here that is the end, as everywhere. */
FILE *text_stream(Text *text);

// ---------------------------------------------------------------------------------------------------------------
// stop.c: SIGINT, SIGTERM and SIGHUP
// ---------------------------------------------------------------------------------------------------------------

/* From now on the first of them is noted, and a second one ends the program at once. */
void stop_catch(void);
/* Where the number of the noted one is, or 0. To be read atomically. */
const int *stop_signal(void);
/* -1 and err (EXIT_SIGNAL and more): "stopped by SIGINT", and what there is to say about it. */
int stop_fail(Error *err, const char *what);

// ---------------------------------------------------------------------------------------------------------------
// memory.c: what this process may have
// ---------------------------------------------------------------------------------------------------------------

/* What the machine, the control groups and the limits of this process leave it: whichever is least. */
typedef struct {
    size_t memory;  /* bytes that it may still take */
    size_t address; /* bytes of address space alone, to which mapped files count too; SIZE_MAX: there is no limit */
    int processors; /* whole processors that the quotas of CPU come to, at least one; INT_MAX: there is no quota */
} Allowance;
/* Asks for it, when so many threads are still to be started. root: where /proc and /sys are, "" but in tests. */
Allowance process_allowance(const char *root, int threads);
/* Whether files in the directory are memory (tmpfs), which they take from their process's control groups. */
bool memory_holds(const char *dir);
/* The most bytes of memory that this process has had at once, since memory_restart if that is possible. */
size_t memory_peak(void);
void memory_restart(void);

// ---------------------------------------------------------------------------------------------------------------
// json.c: JSON by cJSON, but stricter, and UTF-8
// ---------------------------------------------------------------------------------------------------------------

/* Bytes of the first character in s[0..len), len > 0; or, with *valid false, of the longest start of a character there
 * ("maximal subpart", Unicode 3.9), for which one U+FFFD stands, as in Python's errors="replace". */
size_t utf8_step(const char *s, size_t len, bool *valid);
/* Where the first bytes of s[0..len) are that are not UTF-8 (overlong forms and surrogates are not); len: nowhere. */
size_t utf8_invalid_at(const char *s, size_t len);
bool utf8_valid(const char *s, size_t len);

/* Parses text[0..len) as exactly one JSON value. Also refuses what cJSON would let pass: invalid UTF-8, \u0000 (it would
 * cut a string short), control characters, numbers such as 01 and 1e999, duplicate keys in one object, bytes after the
 * value, nesting deeper than 64. `what` names the source in messages ("models/x/config.json", "prompts.jsonl line 7").
 * Returns NULL and fills err; else cJSON_Delete it. */
cJSON *json_parse(const char *text, size_t len, const char *what, Error *err);
/* The same, of a value that is an object. */
cJSON *json_object(const char *text, size_t len, const char *what, Error *err);
/* The object in a file of at most max_bytes. */
cJSON *json_read(const char *path, size_t max_bytes, Error *err);
/* The shortest text that is read back to the same bits; cJSON's own printing is content with nearly the same. */
const char *json_number(char text[100], double number);
const cJSON *json_get(const cJSON *object, const char *key); /* or NULL */
/* What a value is, as a message shows it: "an object", 7, "a text"; NULL is "nothing". */
const char *json_describe(char text[100], const cJSON *value);
/* Fills err (EXIT_FAILED) with "WHERE: NAME is VALUE; expected ..." and returns -1. */
__attribute__((format(printf, 5, 6))) int json_refuse(Error *err, const char *where, const char *name, const cJSON *value,
                                                      const char *expected, ...);
/* Writes the tree for people, with an end of line. */
void json_print(FILE *out, const cJSON *tree);
/* Whether a value is a whole number from 0 to 2^53, and which. */
bool json_whole(const cJSON *value, size_t *number);
/* Sorts them and returns one that is there twice, or NULL. */
const char *sort_strings(const char **strings, size_t n);
/* Writes s[0..len) as a JSON string; bytes that are not UTF-8 become question marks. */
void json_write_string(FILE *out, const char *s, size_t len);

// ---------------------------------------------------------------------------------------------------------------
// unicode.c: what kind of character a code point is
// ---------------------------------------------------------------------------------------------------------------

/* 'L' a letter, 'N' a number, 'S' a blank, 'O' any other: \p{L}, \p{N} and \s as Hugging Face `tokenizers` knows them. */
char char_kind(uint32_t c);

// ---------------------------------------------------------------------------------------------------------------
// tokenizer.c: byte-level BPE
// ---------------------------------------------------------------------------------------------------------------

typedef struct Tokenizer Tokenizer;

/* Opens dir/vocab.json and dir/merges.txt. vocab is the model's: every id must be below it; gaps are allowed. Refuses two
 * pieces with one id, merges of unknown pieces, a missing byte symbol, a missing </s>, and no merges where there are pieces
 * of several bytes. */
Tokenizer *tokenizer_open(const char *dir, int vocab, Error *err);
/* The end of the word that begins at text[start], start < len; words are encoded one by one. The text is valid UTF-8. */
size_t tokenizer_word_end(const char *text, size_t len, size_t start);
/* Ids of text[0..len) (valid UTF-8), without </s>; the caller frees *ids. Returns their number, or -1 and err. */
int tokenizer_encode(const Tokenizer *tokenizer, const char *text, size_t len, int32_t **ids, Error *err);
/* The bytes of ids[0..n), 0-terminated, malloc'ed; *len their number. Special pieces (<s> <pad> </s> <unk>) and ids without
 * a piece give nothing. Invalid UTF-8 at the very end (a character whose bytes are not all there) or inside becomes U+FFFD,
 * so that the result is always valid UTF-8. */
char *tokenizer_decode(const Tokenizer *tokenizer, const int32_t *ids, int n, size_t *len);
/* How many bytes of text the pieces of ids[0..n) stand for; special pieces stand for none. */
size_t tokenizer_bytes(const Tokenizer *tokenizer, const int32_t *ids, int n);
size_t tokenizer_longest(const Tokenizer *tokenizer); /* bytes that a piece stands for at most */
void tokenizer_close(Tokenizer *tokenizer);

#ifdef __cplusplus
}
#endif
#endif
