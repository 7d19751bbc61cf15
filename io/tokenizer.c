/* tokenizer.c: OPT's byte-level BPE (GPT-2's): turns text into token ids and back.
 *
 * Encoding splits a text into words by GPT-2's pattern, and each word into its bytes, where each
 * byte is a token. Then it repeats one step: of all pairs of neighbouring tokens, it joins the pair
 * that comes first in merges.txt, the leftmost one if there are several, until no pair is in
 * merges.txt. vocab.json has the id of every token. (Messages to the user call a token a piece.)
 * Both files write a byte as a printable "byte symbol" (a space is U+0120). Every byte has a token,
 * so `<unk>` never appears. Ids equal those of Hugging Face `tokenizers`. Encoding changes nothing
 * in the tokenizer, may run on several threads at once, and takes O(n log n) even for one very long
 * word. Decoding concatenates the bytes of all ids first, so that a character split between tokens
 * comes out whole.
 *
 * DIFFERS from Hugging Face's OPT tokenizer: `</s>` written in a text is four ordinary characters,
 * never the special token, so that a prompt cannot forge an end. The caller puts </s> in front.
 * Read next: unicode.c. */
#include <cjson/cJSON.h>
#include <limits.h>

#include "io/io.h"

/* Bytes of a file at most (published ones have less than 1 MB); the last code point of a byte
 * symbol; bytes of a text in a message. */
enum { MAX_FILE = 64 << 20, LAST_SYMBOL = 323, SHOWN = 60 };

/* One entry of the vocabulary. */
typedef struct {
    char *bytes;  /* its bytes, NULL if no token has this id; during reading, as in vocab.json */
    int len;      /* number of bytes */
    bool special; /* gives nothing when decoded */
} Token;

/* An entry of a hash table. */
typedef struct {
    uint64_t key;
    int32_t value;  /* -1 in empty places */
    int32_t joined; /* of a line of merges.txt: the id of the token that its pair is joined to */
} Place;
typedef struct {
    Place *places;
    size_t mask; /* number of places - 1; the number is a power of two */
} Table;

struct Tokenizer {
    int vocab;
    Token *tokens;        /* (vocab), by id */
    cJSON *tree;          /* vocab.json, which owns the bytes of all tokens */
    int32_t byte_id[256]; /* the token of each byte */
    int longest;          /* bytes of the longest token that is not special */
    Table ranks;          /* from pairs of ids to ranks, which are the lines of merges.txt */
    int nmerges;          /* number of ranks; rank 0 is joined first */
    uint64_t digest;      /* a hash of all tokens with their ids, and of the merges in order */
    /* While the two files are read: */
    char path[MAX_PATH];              /* the file that is being read */
    Table names;                      /* from hashes of tokens' texts to ids */
    int16_t byte_of[LAST_SYMBOL + 1]; /* the byte for which a code point stands, or -1 */
};

// -------------------------------------------------------------------------------------------------
// Tables
// -------------------------------------------------------------------------------------------------

/* Makes a table for n keys, of at least twice as many places. */
static Table table_new(size_t n) {
    size_t size = 16;
    while (size < 2 * n)
        size *= 2;
    Place *places = xcalloc(size, sizeof *places);
    return (Table){memset(places, 0xFF, size * sizeof *places), size - 1};
}

/* Returns the place of a key, or the empty one where it would be. */
static Place *table_find(Table table, uint64_t key) {
    uint64_t hash = key * 0x9E3779B97F4A7C15u;
    for (size_t slot = hash ^ hash >> 32;; slot++) {
        Place *place = &table.places[slot & table.mask];
        if (place->value < 0 || place->key == key)
            return place;
    }
}

static uint64_t text_key(const char *text) { return hash_bytes(HASH_START, text, strlen(text)); }
static uint64_t pair_key(int32_t left, int32_t right) { return (uint64_t)left << 32 | right; }

/* Returns the id of the token with this text, or -1. */
static int32_t find_token(const Tokenizer *tokenizer, const char *text) {
    int32_t id = table_find(tokenizer->names, text_key(text))->value;
    return id >= 0 && !strcmp(tokenizer->tokens[id].bytes, text) ? id : -1;
}

// -------------------------------------------------------------------------------------------------
// vocab.json
// -------------------------------------------------------------------------------------------------

/* Returns how many bytes of s a message shows: at most SHOWN, and whole characters only. */
static int shown(const char *s) { return utf8_invalid_at(s, strnlen(s, SHOWN)); }

/* Fills in byte_of, as GPT-2's bytes_to_unicode does: a printable byte of Latin-1 stands for
 * itself, and the other bytes are numbered from 256 on. */
static void byte_symbols(Tokenizer *tokenizer) {
    int next = 256;
    memset(tokenizer->byte_of, 0xFF, sizeof tokenizer->byte_of);
    for (int b = 0; b < 256; b++) {
        bool printable = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
        tokenizer->byte_of[printable ? b : next++] = b;
    }
    CHECK(next == LAST_SYMBOL + 1);
}

/* Returns the byte for which the character at *at stands, or -1, and moves *at to the next one. */
static int next_byte(const Tokenizer *tokenizer, const char **at) {
    uint32_t code;
    *at += utf8_step(&code, *at, strnlen(*at, 4));
    return code <= LAST_SYMBOL ? tokenizer->byte_of[code] : -1;
}

static int add_token(Tokenizer *tokenizer, const cJSON *item, Error *err) {
    static const char *const specials[] = {"<s>", "<pad>", "</s>", "<unk>"};
    char *text = item->string, found[100];
    size_t id;
    if (!json_whole(item, &id) || id >= (size_t)tokenizer->vocab)
        return fail(err, EXIT_FAILED,
                    "%s: the id of \"%.*s\" is %s, expected a whole number from 0 to %d (the "
                    "model's vocabulary); take vocab.json and config.json from the same model",
                    tokenizer->path, shown(text), text, json_describe(found, item),
                    tokenizer->vocab - 1);
    Token *token = &tokenizer->tokens[id];
    if (token->bytes)
        return fail(err, EXIT_FAILED,
                    "%s: \"%.*s\" and \"%.*s\" both have id %zu, expected one piece for an id; "
                    "take vocab.json from the model's download again",
                    tokenizer->path, shown(token->bytes), token->bytes, shown(text), text, id);
    token->bytes = text;
    uint64_t key = text_key(text);
    tokenizer->digest = splitmix64(tokenizer->digest ^ key, id);
    for (size_t i = 0; i < sizeof specials / sizeof *specials; i++)
        token->special |= !strcmp(text, specials[i]);
    *table_find(tokenizer->names, key) = (Place){key, id, -1};
    const char *at = text;
    int byte = next_byte(tokenizer, &at);
    if (byte >= 0 && !*at)
        tokenizer->byte_id[byte] = id;
    return 0;
}

static int read_vocab(Tokenizer *tokenizer, Error *err) {
    const cJSON *root = tokenizer->tree = json_read(tokenizer->path, MAX_FILE, err);
    if (!root)
        return -1;
    tokenizer->names = table_new(cJSON_GetArraySize(root));
    byte_symbols(tokenizer);
    memset(tokenizer->byte_id, 0xFF, sizeof tokenizer->byte_id);
    for (const cJSON *item = root->child; item; item = item->next)
        if (add_token(tokenizer, item, err))
            return -1;
    if (find_token(tokenizer, "</s>") < 0)
        return fail(err, EXIT_FAILED,
                    "%s: no piece \"</s>\", expected it among the pieces because every OPT prompt "
                    "begins with it; is this an OPT model?",
                    tokenizer->path);
    for (int b = 0; b < 256; b++)
        if (tokenizer->byte_id[b] < 0)
            return fail(err, EXIT_FAILED,
                        "%s: no piece for byte 0x%02X, expected a piece for each of the 256 bytes; "
                        "is this a byte-level BPE?",
                        tokenizer->path, b);
    return 0;
}

/* Replaces a token's text, in place, by the bytes that it stands for; these are never more. As in
 * Hugging Face, a token with a character that is no byte symbol stands for its own text. */
static void decode_token(const Tokenizer *tokenizer, Token *token) {
    char *text = xstrdup(token->bytes), *to = token->bytes;
    for (const char *at = text; *at;) {
        int byte = next_byte(tokenizer, &at);
        if (byte < 0) {
            to = stpcpy(token->bytes, text);
            break;
        }
        *to++ = byte;
    }
    token->len = to - token->bytes;
    free(text);
}

// -------------------------------------------------------------------------------------------------
// merges.txt
// -------------------------------------------------------------------------------------------------

/* Adds the merge in a line "left right" of len bytes, with a 0 after it. Removes the space from the
 * line to look up the joined token. */
static int add_merge(Tokenizer *tokenizer, char *line, size_t len, Error *err) {
    size_t invalid = utf8_invalid_at(line, len);
    if (invalid < len)
        return fail(err, EXIT_FAILED, "invalid UTF-8 at byte %zu of the line, expected two pieces",
                    invalid);
    char *blank = strchr(line, ' '), *right = blank ? blank + 1 : line;
    if (right == line || blank == line || !*right || strchr(right, ' ') || strlen(line) < len)
        return fail(err, EXIT_FAILED,
                    "found \"%.*s\", expected two pieces with one blank between them", shown(line),
                    line);
    *blank = 0;
    int32_t first = find_token(tokenizer, line), second = find_token(tokenizer, right);
    if (first < 0 || second < 0) {
        const char *unknown = first < 0 ? line : right;
        return fail(err, EXIT_FAILED, "\"%.*s\" is no piece of vocab.json, expected two that are",
                    shown(unknown), unknown);
    }
    memmove(blank, right, strlen(right) + 1);
    int32_t joined = find_token(tokenizer, line);
    if (joined < 0 || tokenizer->tokens[joined].special)
        return fail(err, EXIT_FAILED, "makes \"%.*s\", which is %s, expected an ordinary piece",
                    shown(line), line, joined < 0 ? "no piece of vocab.json" : "a special piece");
    uint64_t key = pair_key(first, second);
    Place *place = table_find(tokenizer->ranks, key);
    if (place->value >= 0)
        return fail(err, EXIT_FAILED,
                    "the pair that makes \"%.*s\" stood before, expected each pair once",
                    shown(line), line);
    *place = (Place){key, tokenizer->nmerges++, joined};
    tokenizer->digest = splitmix64(tokenizer->digest ^ key, 1);
    return 0;
}

static int read_merges(Tokenizer *tokenizer, char *text, size_t len, Error *err) {
    size_t lines = 1;
    for (size_t i = 0; i < len; i++)
        lines += text[i] == '\n';
    tokenizer->ranks = table_new(lines);
    char *end = text + len, *next;
    for (int number = 1; text < end; number++, text = next) {
        char *newline = memchr(text, '\n', end - text), *stop = newline ? newline : end;
        next = stop + 1;
        if (newline && stop > text && stop[-1] == '\r')
            stop--; /* git on Windows writes CR LF */
        *stop = 0;
        Error inner;
        if (number == 1 && !strncmp(text, "#version", 8))
            continue;
        if (add_merge(tokenizer, text, stop - text, &inner))
            return fail(err, EXIT_FAILED,
                        "%s line %d: %s; take merges.txt and vocab.json from the same model",
                        tokenizer->path, number, inner.text);
    }
    return 0;
}

// -------------------------------------------------------------------------------------------------
// Opening
// -------------------------------------------------------------------------------------------------

static int open_files(Tokenizer *tokenizer, const char *dir, Error *err) {
    size_t len;
    if (file_path(tokenizer->path, dir, "vocab.json", err) || read_vocab(tokenizer, err) ||
        file_path(tokenizer->path, dir, "merges.txt", err))
        return -1;
    char *merges = file_read(tokenizer->path, MAX_FILE, &len, err);
    int status = merges ? read_merges(tokenizer, merges, len, err) : -1;
    free(merges);
    for (Token *token = tokenizer->tokens; token < tokenizer->tokens + tokenizer->vocab; token++) {
        if (token->bytes)
            decode_token(tokenizer, token);
        if (!token->special)
            tokenizer->longest = imax(tokenizer->longest, token->len);
    }
    if (status || tokenizer->nmerges || tokenizer->longest == 1)
        return status; /* a vocabulary of bytes has nothing to merge */
    return fail(err, EXIT_FAILED,
                "%s: has no merges, but vocab.json has pieces of several bytes, which merges make; "
                "take both from the same model",
                tokenizer->path);
}

Tokenizer *tokenizer_open(const char *dir, int vocab, Error *err) {
    Tokenizer *tokenizer = xcalloc(1, sizeof *tokenizer);
    tokenizer->vocab = vocab;
    tokenizer->tokens = xcalloc(vocab, sizeof *tokenizer->tokens);
    if (!open_files(tokenizer, dir, err))
        return tokenizer;
    tokenizer_close(tokenizer);
    return NULL;
}

void tokenizer_close(Tokenizer *tokenizer) {
    if (!tokenizer)
        return;
    cJSON_Delete(tokenizer->tree);
    free(tokenizer->tokens);
    free(tokenizer->ranks.places);
    free(tokenizer->names.places);
    free(tokenizer);
}

// -------------------------------------------------------------------------------------------------
// Splitting
// -------------------------------------------------------------------------------------------------

/* Returns the kind of the character at text[*at] (valid UTF-8), and moves *at to the next one. */
static char next_kind(const char *text, size_t len, size_t *at) {
    uint32_t code;
    *at += utf8_step(&code, text + *at, len - *at);
    return char_kind(code);
}

/* GPT-2's pattern is
 *
 *     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
 *
 * So a word is one of these: a contraction; characters of one kind, with or without a space
 * (U+0020) in front; or white space. The last character of the white space is left to the word
 * that follows, unless no word follows or it is the only character. */
size_t tokenizer_word_end(const char *text, size_t len, size_t start) {
    static const char *const contractions[] = {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"};
    for (size_t i = 0; text[start] == '\'' && i < sizeof contractions / sizeof *contractions; i++) {
        size_t n = strlen(contractions[i]);
        if (len - start >= n && !memcmp(text + start, contractions[i], n))
            return start + n;
    }
    /* last: where the word's last character begins; end: where the word ends so far. */
    size_t last = start + (text[start] == ' '), end = last;
    if (last == len)
        return len;
    char kind = next_kind(text, len, &end);
    for (size_t next = end; next < len; last = end, end = next)
        if (next_kind(text, len, &next) != kind)
            return kind == 'S' && last > start ? last : end;
    return end;
}

// -------------------------------------------------------------------------------------------------
// Encoding
// -------------------------------------------------------------------------------------------------

/* One token of a word: a node of a linked list. */
typedef struct {
    int32_t id;         /* -1: it has been joined to the token before it */
    int32_t prev, next; /* indices, -1 at the ends */
} Symbol;

/* A word while its pairs are joined: a linked list of tokens, and a min-heap of the pairs that may
 * be joined, lowest rank first and then leftmost. A pair whose tokens have changed stays in the
 * heap and is skipped when it comes up. */
typedef struct {
    Symbol *links;  /* (room), one for each byte at first */
    uint64_t *heap; /* (2 * room), rank << 32 | index of the left token; a join removes one pair and
                       adds at most two */
    size_t room, nheap;
} Word;

/* Removes and returns the least key of the heap. */
static uint64_t pop_pair(Word *word) {
    uint64_t top = word->heap[0], last = word->heap[--word->nheap];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < word->nheap; i = child) {
        if (child + 1 < word->nheap && word->heap[child + 1] < word->heap[child])
            child++;
        if (word->heap[child] >= last)
            break;
        word->heap[i] = word->heap[child];
    }
    word->heap[i] = last;
    return top;
}

/* Returns the entry of the pair of token `at` and the token after it. Its value is the pair's rank,
 * or -1 if merges.txt does not have it. */
static Place find_pair(const Tokenizer *tokenizer, const Symbol *links, int32_t at) {
    int32_t next = at < 0 ? -1 : links[at].next;
    if (next < 0)
        return (Place){.value = -1};
    return *table_find(tokenizer->ranks, pair_key(links[at].id, links[next].id));
}

/* Adds the pair of token `at` and the token after it to the heap, if merges.txt has this pair. */
static void push_pair(const Tokenizer *tokenizer, Word *word, int32_t at) {
    int32_t rank = find_pair(tokenizer, word->links, at).value;
    if (rank < 0)
        return;
    uint64_t key = (uint64_t)rank << 32 | at;
    size_t i = word->nheap++;
    for (; i > 0 && word->heap[(i - 1) / 2] > key; i = (i - 1) / 2)
        word->heap[i] = word->heap[(i - 1) / 2];
    word->heap[i] = key;
}

/* Makes a list node for every byte, and adds the pairs of neighbours to the heap. */
static void word_begin(const Tokenizer *tokenizer, Word *word, const char *text, int len) {
    if (word->room < (size_t)len) {
        word->room = 2 * (size_t)len;
        word->links = xrealloc(word->links, word->room, sizeof *word->links);
        word->heap = xrealloc(word->heap, word->room, 2 * sizeof *word->heap);
    }
    for (int i = 0; i < len; i++)
        word->links[i] = (Symbol){tokenizer->byte_id[(uint8_t)text[i]], i - 1, i + 1};
    word->links[len - 1].next = -1;
    for (int i = 0; i < len; i++)
        push_pair(tokenizer, word, i);
}

/* Writes the ids of one word, at most len of them, and returns their number. */
static int encode_word(const Tokenizer *tokenizer, Word *word, const char *text, int len,
                       int32_t *ids) {
    word_begin(tokenizer, word, text, len);
    Symbol *links = word->links;
    while (word->nheap > 0) {
        uint64_t key = pop_pair(word);
        int32_t rank = key >> 32, at = key, next = links[at].next;
        Place pair = find_pair(tokenizer, links, at);
        if (pair.value != rank)
            continue;
        links[at].id = pair.joined;
        links[at].next = links[next].next;
        links[next].id = -1;
        if (links[at].next >= 0)
            links[links[at].next].prev = at;
        push_pair(tokenizer, word, links[at].prev);
        push_pair(tokenizer, word, at);
    }
    int n = 0;
    for (int32_t i = 0; i >= 0; i = links[i].next)
        ids[n++] = links[i].id;
    return n;
}

int tokenizer_encode(const Tokenizer *tokenizer, const char *text, size_t len, int32_t **ids,
                     Error *err) {
    *ids = NULL;
    if (len >= INT_MAX)
        return fail(err, EXIT_FAILED, "text: %zu bytes, expected less than %d; split it", len,
                    INT_MAX);
    size_t invalid = utf8_invalid_at(text, len);
    if (invalid < len)
        return fail(
            err, EXIT_FAILED,
            "text: invalid UTF-8 at byte %zu (0x%02X), expected UTF-8; convert it (iconv -t UTF-8)",
            invalid, (unsigned char)text[invalid]);
    Word word = {0};
    int32_t *out = xcalloc(len, sizeof *out); /* an id stands for at least one byte */
    int n = 0;
    for (size_t start = 0, end; start < len; start = end) {
        end = tokenizer_word_end(text, len, start);
        n += encode_word(tokenizer, &word, text + start, end - start, out + n);
    }
    free(word.links);
    free(word.heap);
    *ids = xrealloc(out, n, sizeof *out);
    return n;
}

// -------------------------------------------------------------------------------------------------
// Decoding
// -------------------------------------------------------------------------------------------------

/* Writes the concatenated bytes of ids[0..n) to `to`, unless it is NULL. Returns their number. */
static size_t join_tokens(char *to, const Tokenizer *tokenizer, const int32_t *ids, int n) {
    size_t bytes = 0;
    for (int i = 0; i < n; i++) {
        if (ids[i] < 0 || ids[i] >= tokenizer->vocab)
            continue;
        const Token *token = &tokenizer->tokens[ids[i]];
        if (!token->bytes || token->special)
            continue;
        if (to)
            memcpy(to + bytes, token->bytes, token->len);
        bytes += token->len;
    }
    return bytes;
}

uint64_t tokenizer_digest(const Tokenizer *tokenizer) { return tokenizer ? tokenizer->digest : 0; }

size_t tokenizer_longest(const Tokenizer *tokenizer) { return tokenizer->longest; }

size_t tokenizer_bytes(const Tokenizer *tokenizer, const int32_t *ids, int n) {
    return join_tokens(NULL, tokenizer, ids, n);
}

char *tokenizer_decode(const Tokenizer *tokenizer, const int32_t *ids, int n, size_t *len) {
    size_t total = tokenizer_bytes(tokenizer, ids, n);
    char *bytes = xcalloc(total, 1);
    char *out = xcalloc(total + 1, 3); /* a byte may become a U+FFFD, which has three */
    join_tokens(bytes, tokenizer, ids, n);
    *len = 0;
    for (size_t at = 0, step; at < total; at += step) {
        uint32_t code;
        step = utf8_step(&code, bytes + at, total - at);
        bool valid = code != NO_CHARACTER;
        size_t size = valid ? step : 3;
        memcpy(out + *len, valid ? bytes + at : "\xEF\xBF\xBD", size);
        *len += size;
    }
    free(bytes);
    return out;
}
