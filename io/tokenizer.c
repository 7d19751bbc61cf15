/* tokenizer.c: OPT's byte-level BPE (the one of GPT-2), text to ids and back.
 *
 * A text is split into words by GPT-2's pattern, a word into its bytes, and each byte becomes a piece; then the pair of
 * neighbours that stands first in merges.txt is joined, leftmost first, until no pair stands there. vocab.json has every
 * piece's id. Both files write a byte as a printable "byte symbol" (a blank is U+0120); every byte has a piece, so `<unk>`
 * never appears. Ids equal those of Hugging Face `tokenizers`. Encoding is const, safe from several threads, and
 * O(n log n) even for a word without end. Decoding puts the bytes of all ids together first, so that a character split
 * between pieces comes out whole.
 *
 * DIFFERS from Hugging Face's OPT tokenizer: `</s>` written in a text is four ordinary characters, never the special
 * piece, so that a prompt cannot forge an end; the caller puts </s> in front. And PCRE2 says what a letter is: a character
 * younger than the Unicode version it was built with (14 in Debian 12) may be split otherwise.
 * Read next: config.c, which model it is. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <cjson/cJSON.h>
#include <limits.h>
#include <math.h>
#include <pcre2.h>

#include "io/text.h"

enum { MAX_FILE = 1 << 28, LAST_SYMBOL = 323, SHOWN = 60 };

typedef struct {
    char *bytes; /* NULL: no piece has this id */
    int len;
    bool special; /* gives nothing when decoded */
} Piece;

typedef struct {
    int32_t left, right, joined;
} Merge;

struct Tokenizer {
    int vocab;
    Piece *pieces;        // (vocab)
    char *pool;           /* owns the bytes of all pieces */
    int32_t byte_id[256]; /* the piece of one byte */
    Merge *merges;        // (nmerges), the rank is the index
    int nmerges;
    int32_t *ranks; /* hash table of pairs, rank or -1 */
    size_t mask;    /* its size - 1, a power of two - 1 */
    pcre2_code *split;
};

static size_t table_size(size_t entries) {
    size_t size = 16;
    while (size < 2 * entries) size *= 2;
    return size;
}

// ---------------------------------------------------------------------------------------------------------------
// Byte symbols
// ---------------------------------------------------------------------------------------------------------------

/* How many bytes of s a message shows. */
static int shown(const char *s, size_t len) {
    if (len <= SHOWN) return (int)len;
    len = SHOWN;
    while (len > 0 && ((unsigned char)s[len] & 0xC0) == 0x80) len--;
    return (int)len;
}

/* GPT-2's bytes_to_unicode: printable Latin-1 stands for itself, the others are numbered from 256 on. */
static void byte_symbols(uint16_t symbol[256]) {
    uint16_t next = 256;
    for (int b = 0; b < 256; b++) {
        bool printable = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
        symbol[b] = printable ? (uint16_t)b : next++;
    }
    CHECK(next == LAST_SYMBOL + 1);
}

/* The bytes that a piece of vocab.json stands for. As in Hugging Face, a piece with a character that is no byte symbol
 * stands for its own text. out has room for strlen(text); text is valid UTF-8. */
static int piece_bytes(char *out, const char *text, const int16_t byte_of[LAST_SYMBOL + 1]) {
    int n = 0;
    for (const unsigned char *c = (const unsigned char *)text; *c; n++) {
        int symbol = *c < 0x80 ? c[0] : *c < 0xE0 ? (c[0] & 0x1F) << 6 | (c[1] & 0x3F) : LAST_SYMBOL + 1;
        if (symbol > LAST_SYMBOL || byte_of[symbol] < 0) {
            memcpy(out, text, strlen(text));
            return (int)strlen(text);
        }
        out[n] = (char)byte_of[symbol];
        c += *c < 0x80 ? 1 : 2;
    }
    return n;
}

// ---------------------------------------------------------------------------------------------------------------
// vocab.json
// ---------------------------------------------------------------------------------------------------------------

/* Finds ids by the text of pieces while the files are read. */
typedef struct {
    const char **text;  // (vocab), owned by the JSON tree, NULL in gaps
    int32_t *ids;       /* hash table, id or -1 */
    size_t mask;
    char vocab_path[MAX_PATH], merges_path[MAX_PATH];
} Names;

static size_t text_slot(const Names *names, const char *text, size_t len) {
    uint64_t hash = 0xCBF29CE484222325u; /* FNV-1a */
    for (size_t i = 0; i < len; i++) hash = (hash ^ (unsigned char)text[i]) * 0x100000001B3u;
    size_t slot = (hash ^ hash >> 32) & names->mask;
    for (; names->ids[slot] >= 0; slot = (slot + 1) & names->mask) {
        const char *other = names->text[names->ids[slot]];
        if (strlen(other) == len && memcmp(other, text, len) == 0) break;
    }
    return slot;
}

static int32_t find_piece(const Names *names, const char *text, size_t len) {
    return names->ids[text_slot(names, text, len)];
}

static int add_piece(const Tokenizer *tokenizer, Names *names, const cJSON *item, Error *err) {
    const char *path = names->vocab_path, *text = item->string;
    double id = item->valuedouble;
    int n = shown(text, strlen(text));
    if (!cJSON_IsNumber(item))
        return fail(err, EXIT_FAILED,
                    "%s: the id of \"%.*s\" is not a number; take vocab.json from the model's download again", path, n,
                    text);
    if (!(id >= 0 && id < tokenizer->vocab && id == floor(id)))
        return fail(
            err, EXIT_FAILED,
            "%s: the id of \"%.*s\" is %g, expected a whole number from 0 to %d (the model's vocabulary); take vocab.json "
            "and config.json from the same model",
            path, n, text, id, tokenizer->vocab - 1);
    const char *other = names->text[(int)id];
    if (other)
        return fail(
            err, EXIT_FAILED,
            "%s: \"%.*s\" and \"%.*s\" both have id %d, expected one piece for an id; take vocab.json from the model's "
            "download again",
            path, shown(other, strlen(other)), other, n, text, (int)id);
    names->text[(int)id] = text;
    names->ids[text_slot(names, text, strlen(text))] = (int32_t)id;
    return 0;
}

static int need_pieces(Tokenizer *tokenizer, const Names *names, const uint16_t symbol[256], Error *err) {
    if (find_piece(names, "</s>", 4) < 0)
        return fail(err, EXIT_FAILED,
                    "%s: no piece \"</s>\", expected it among the pieces because every OPT prompt begins with it; is this "
                    "an OPT model?",
                    names->vocab_path);
    for (int b = 0; b < 256; b++) {
        char text[2] = {(char)symbol[b], 0};
        size_t len = 1;
        if (symbol[b] >= 0x80) {
            text[0] = (char)(0xC0 | symbol[b] >> 6);
            text[1] = (char)(0x80 | (symbol[b] & 0x3F));
            len = 2;
        }
        tokenizer->byte_id[b] = find_piece(names, text, len);
        if (tokenizer->byte_id[b] < 0)
            return fail(err, EXIT_FAILED,
                        "%s: no piece \"%.*s\" for byte 0x%02X, expected a piece for each of the 256 bytes; is this a "
                        "byte-level BPE?",
                        names->vocab_path, (int)len, text, b);
    }
    return 0;
}

static void keep_bytes(Tokenizer *tokenizer, const Names *names, const uint16_t symbol[256]) {
    static const char *specials[] = {"<s>", "<pad>", "</s>", "<unk>"};
    int16_t byte_of[LAST_SYMBOL + 1];
    for (int i = 0; i <= LAST_SYMBOL; i++) byte_of[i] = -1;
    for (int b = 0; b < 256; b++) byte_of[symbol[b]] = (int16_t)b;
    size_t size = 0;
    for (int id = 0; id < tokenizer->vocab; id++) size += names->text[id] ? strlen(names->text[id]) : 0;
    char *next = tokenizer->pool = xcalloc(size, 1); /* a piece's bytes are never more than its text */
    for (int id = 0; id < tokenizer->vocab; id++) {
        const char *text = names->text[id];
        if (!text) continue;
        Piece *piece = &tokenizer->pieces[id];
        piece->bytes = next;
        piece->len = piece_bytes(next, text, byte_of);
        for (size_t i = 0; i < sizeof specials / sizeof *specials; i++) piece->special |= strcmp(text, specials[i]) == 0;
        next += piece->len;
    }
}

static int read_vocab(Tokenizer *tokenizer, Names *names, const cJSON *root, Error *err) {
    if (!cJSON_IsObject(root))
        return fail(err, EXIT_FAILED,
                    "%s: not a JSON object, expected {\"piece\": id, ...}; take it from the model's download again",
                    names->vocab_path);
    names->mask = table_size((size_t)cJSON_GetArraySize(root)) - 1;
    names->ids = xcalloc(names->mask + 1, sizeof *names->ids);
    memset(names->ids, 0xFF, (names->mask + 1) * sizeof *names->ids);
    const cJSON *item;
    cJSON_ArrayForEach(item, root) {
        if (add_piece(tokenizer, names, item, err) != 0) return -1;
    }
    uint16_t symbol[256];
    byte_symbols(symbol);
    if (need_pieces(tokenizer, names, symbol, err) != 0) return -1;
    keep_bytes(tokenizer, names, symbol);
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------
// merges.txt
// ---------------------------------------------------------------------------------------------------------------

/* Where the rank of a pair is, or would go, in tokenizer->ranks. */
static size_t pair_slot(const Tokenizer *tokenizer, int32_t left, int32_t right) {
    uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    key *= 0x9E3779B97F4A7C15u;
    size_t slot = (key ^ key >> 32) & tokenizer->mask;
    for (; tokenizer->ranks[slot] >= 0; slot = (slot + 1) & tokenizer->mask) {
        const Merge *merge = &tokenizer->merges[tokenizer->ranks[slot]];
        if (merge->left == left && merge->right == right) break;
    }
    return slot;
}

/* Reads "left right". The line is writable: the blank is closed up to look for the joined piece. */
static int add_merge(Tokenizer *tokenizer, const Names *names, char *line, size_t len, int number, Error *err) {
    const char *path = names->merges_path, *advice = "take merges.txt and vocab.json from the same model";
    if (!utf8_valid(line, len))
        return fail(err, EXIT_FAILED, "%s line %d: invalid UTF-8 at byte %zu of the line, expected two pieces; %s", path,
                    number, utf8_invalid_at(line, len), advice);
    char *blank = memchr(line, ' ', len);
    size_t left_len = blank ? (size_t)(blank - line) : 0, right_len = blank ? len - left_len - 1 : 0;
    if (left_len == 0 || right_len == 0 || memchr(blank + 1, ' ', right_len))
        return fail(err, EXIT_FAILED, "%s line %d: found \"%.*s\", expected two pieces with one blank between them; %s",
                    path, number, shown(line, len), line, advice);
    Merge merge = {find_piece(names, line, left_len), find_piece(names, blank + 1, right_len), -1};
    if (merge.left < 0 || merge.right < 0) {
        const char *unknown = merge.left < 0 ? line : blank + 1;
        return fail(err, EXIT_FAILED, "%s line %d: \"%.*s\" is no piece of vocab.json, expected two that are; %s", path,
                    number, shown(unknown, merge.left < 0 ? left_len : right_len), unknown, advice);
    }
    memmove(blank, blank + 1, right_len);
    merge.joined = find_piece(names, line, len - 1);
    if (merge.joined < 0 || tokenizer->pieces[merge.joined].special)
        return fail(err, EXIT_FAILED, "%s line %d: makes \"%.*s\", which is %s, expected an ordinary piece; %s", path,
                    number, shown(line, len - 1), line, merge.joined < 0 ? "no piece of vocab.json" : "a special piece",
                    advice);
    size_t slot = pair_slot(tokenizer, merge.left, merge.right);
    if (tokenizer->ranks[slot] >= 0)
        return fail(err, EXIT_FAILED, "%s line %d: the pair that makes \"%.*s\" stood before, expected each pair once; %s",
                    path, number, shown(line, len - 1), line, advice);
    tokenizer->merges[tokenizer->nmerges] = merge;
    tokenizer->ranks[slot] = tokenizer->nmerges++;
    return 0;
}

static int read_merges(Tokenizer *tokenizer, const Names *names, char *text, size_t len, Error *err) {
    size_t lines = 1;
    for (size_t i = 0; i < len; i++) lines += text[i] == '\n';
    tokenizer->merges = xcalloc(lines, sizeof *tokenizer->merges);
    tokenizer->mask = table_size(lines) - 1;
    tokenizer->ranks = xcalloc(tokenizer->mask + 1, sizeof *tokenizer->ranks);
    memset(tokenizer->ranks, 0xFF, (tokenizer->mask + 1) * sizeof *tokenizer->ranks);
    char *end = text + len;
    for (int number = 1; text < end; number++) {
        char *newline = memchr(text, '\n', (size_t)(end - text)), *stop = newline ? newline : end;
        size_t n = (size_t)(stop - text);
        if (newline && n > 0 && text[n - 1] == '\r') n--; /* git on Windows writes these */
        bool version = number == 1 && n >= 8 && memcmp(text, "#version", 8) == 0;
        if (!version && add_merge(tokenizer, names, text, n, number, err) != 0) return -1;
        text = newline ? newline + 1 : end;
    }
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------
// Opening
// ---------------------------------------------------------------------------------------------------------------

/* GPT-2's pattern is 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ . It is rewritten so that
 * nothing backtracks, and a run of any length meets no limit of PCRE2: the repeats are possessive, and the last two
 * alternatives are one group whose last blank next_word gives back. BLANKS is Unicode's White_Space; PCRE2's \s would add
 * U+180E. */
#define BLANKS "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
#define PATTERN "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}++| ?\\p{N}++| ?[^" BLANKS "\\p{L}\\p{N}]++|([" BLANKS "]++)"

static int compile_split(Tokenizer *tokenizer, Error *err) {
    int code;
    size_t at;
    tokenizer->split =
        pcre2_compile((PCRE2_SPTR)PATTERN, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED, &code, &at, NULL);
    if (!tokenizer->split) {
        PCRE2_UCHAR message[200] = "";
        pcre2_get_error_message(code, message, sizeof message);
        return fail(err, EXIT_FAILED, "PCRE2: GPT-2's split pattern: %s; install a PCRE2 built with Unicode",
                    (const char *)message);
    }
    pcre2_jit_compile(tokenizer->split, PCRE2_JIT_COMPLETE); /* without a JIT the interpreter gives the same words */
    return 0;
}

static int open_files(Tokenizer *tokenizer, const char *dir, Error *err) {
    Names names = {.text = xcalloc((size_t)tokenizer->vocab, sizeof *names.text)};
    size_t len = 0;
    cJSON *root = NULL;
    char *merges = NULL;
    int result =
        file_path(names.vocab_path, dir, "vocab.json", err) || file_path(names.merges_path, dir, "merges.txt", err);
    if (result == 0) result = (root = json_read(names.vocab_path, MAX_FILE, err)) == NULL;
    if (result == 0) result = read_vocab(tokenizer, &names, root, err);
    if (result == 0) result = (merges = file_read(names.merges_path, MAX_FILE, &len, err)) == NULL;
    if (result == 0) result = read_merges(tokenizer, &names, merges, len, err);
    free(merges);
    cJSON_Delete(root);
    free(names.text);
    free(names.ids);
    return result ? -1 : 0;
}

Tokenizer *tokenizer_open(const char *dir, int vocab, Error *err) {
    CHECK(vocab > 0);
    Tokenizer *tokenizer = xcalloc(1, sizeof *tokenizer);
    tokenizer->vocab = vocab;
    tokenizer->pieces = xcalloc((size_t)vocab, sizeof *tokenizer->pieces);
    int result = open_files(tokenizer, dir, err);
    if (result == 0) result = compile_split(tokenizer, err);
    if (result == 0) return tokenizer;
    tokenizer_close(tokenizer);
    return NULL;
}

void tokenizer_close(Tokenizer *tokenizer) {
    if (!tokenizer) return;
    pcre2_code_free(tokenizer->split);
    free(tokenizer->pieces);
    free(tokenizer->pool);
    free(tokenizer->merges);
    free(tokenizer->ranks);
    free(tokenizer);
}

// ---------------------------------------------------------------------------------------------------------------
// Encoding
// ---------------------------------------------------------------------------------------------------------------

/* A word while its pairs are joined: a linked list of pieces, and a heap of the pairs that may be joined, lowest rank
 * first and then leftmost. A pair whose pieces have changed stays in the heap and is passed over when it comes up. */
typedef struct {
    int32_t id; /* -1: joined to the piece before it */
    int32_t prev, next;
} Link;

typedef struct {
    Link *links;     // (room)
    uint64_t *heap;  // (2 * room), rank << 32 | position of the left piece; a join takes one out and puts at most two in
    size_t room, nheap;
} Word;

static void heap_push(Word *word, uint64_t key) {
    size_t i = word->nheap++;
    for (; i > 0 && word->heap[(i - 1) / 2] > key; i = (i - 1) / 2) word->heap[i] = word->heap[(i - 1) / 2];
    word->heap[i] = key;
}

static uint64_t heap_pop(Word *word) {
    uint64_t top = word->heap[0], last = word->heap[--word->nheap];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < word->nheap; i = child) {
        if (child + 1 < word->nheap && word->heap[child + 1] < word->heap[child]) child++;
        if (word->heap[child] >= last) break;
        word->heap[i] = word->heap[child];
    }
    word->heap[i] = last;
    return top;
}

static void push_pair(const Tokenizer *tokenizer, Word *word, int32_t at) {
    int32_t next = at < 0 ? -1 : word->links[at].next;
    if (next < 0) return;
    int32_t rank = tokenizer->ranks[pair_slot(tokenizer, word->links[at].id, word->links[next].id)];
    if (rank >= 0) heap_push(word, (uint64_t)(uint32_t)rank << 32 | (uint32_t)at);
}

/* Makes a link of every byte, and puts the pairs of neighbours into the heap. */
static void word_begin(const Tokenizer *tokenizer, Word *word, const char *text, int len) {
    if (word->room < (size_t)len) {
        word->room = 2 * (size_t)len;
        word->links = xrealloc(word->links, word->room, sizeof *word->links);
        word->heap = xrealloc(word->heap, word->room, 2 * sizeof *word->heap);
    }
    for (int i = 0; i < len; i++)
        word->links[i] = (Link){tokenizer->byte_id[(unsigned char)text[i]], i - 1, i + 1 < len ? i + 1 : -1};
    for (int i = 0; i < len; i++) push_pair(tokenizer, word, i);
}

/* Writes the ids of one word, at most len, and returns their number. */
static int encode_word(const Tokenizer *tokenizer, Word *word, const char *text, int len, int32_t *ids) {
    word_begin(tokenizer, word, text, len);
    Link *links = word->links;
    while (word->nheap > 0) {
        uint64_t key = heap_pop(word);
        const Merge *merge = &tokenizer->merges[key >> 32];
        int32_t at = (int32_t)(uint32_t)key, next = links[at].next;
        if (links[at].id != merge->left || next < 0 || links[next].id != merge->right) continue;
        links[at].id = merge->joined;
        links[at].next = links[next].next;
        links[next].id = -1;
        if (links[at].next >= 0) links[links[at].next].prev = at;
        push_pair(tokenizer, word, links[at].prev);
        push_pair(tokenizer, word, at);
    }
    int n = 0;
    for (int32_t i = 0; i >= 0; i = links[i].next) ids[n++] = links[i].id;
    return n;
}

/* The end of the word that begins at start, or -1 and err. */
static long next_word(const Tokenizer *tokenizer, pcre2_match_data *match, const char *text, size_t len, size_t start,
                      Error *err) {
    int groups = pcre2_match(tokenizer->split, (PCRE2_SPTR)text, len, start, PCRE2_NO_UTF_CHECK, match, NULL);
    if (groups < 0) {
        PCRE2_UCHAR message[200] = "";
        pcre2_get_error_message(groups, message, sizeof message);
        return fail(err, EXIT_FAILED, "text: PCRE2 cannot split it at byte %zu: %s; split the text there", start,
                    (const char *)message);
    }
    size_t end = pcre2_get_ovector_pointer(match)[1];
    CHECK(end > start);
    if (groups == 2 && end < len) { /* a run of blanks: what follows takes the last one, unless it is the only one */
        size_t last = end - 1;
        while (((unsigned char)text[last] & 0xC0) == 0x80) last--;
        if (last > start) end = last;
    }
    return (long)end;
}

int tokenizer_encode(const Tokenizer *tokenizer, const char *text, size_t len, int32_t **ids, Error *err) {
    *ids = NULL;
    if (len >= INT_MAX) return fail(err, EXIT_FAILED, "text: %zu bytes, expected less than %d; split it", len, INT_MAX);
    if (!utf8_valid(text, len))
        return fail(err, EXIT_FAILED,
                    "text: invalid UTF-8 at byte %zu (0x%02X), expected UTF-8; convert it (iconv -t UTF-8)",
                    utf8_invalid_at(text, len), (unsigned char)text[utf8_invalid_at(text, len)]);
    pcre2_match_data *match = pcre2_match_data_create_from_pattern(tokenizer->split, NULL);
    CHECK(match);
    Word word = {0};
    int32_t *out = xcalloc(len, sizeof *out); /* an id is at least one byte */
    int n = 0;
    for (size_t start = 0; start < len && n >= 0;) {
        long end = next_word(tokenizer, match, text, len, start, err);
        n = end < 0 ? -1 : n + encode_word(tokenizer, &word, text + start, (int)((size_t)end - start), out + n);
        start = (size_t)end;
    }
    free(word.links);
    free(word.heap);
    pcre2_match_data_free(match);
    if (n < 0) {
        free(out);
        return -1;
    }
    *ids = xrealloc(out, (size_t)n, sizeof *out);
    return n;
}

// ---------------------------------------------------------------------------------------------------------------
// Decoding
// ---------------------------------------------------------------------------------------------------------------

/* The piece of an id that stands for text, or NULL. */
static const Piece *text_piece(const Tokenizer *tokenizer, int32_t id) {
    const Piece *piece = id >= 0 && id < tokenizer->vocab ? &tokenizer->pieces[id] : NULL;
    return piece && piece->bytes && !piece->special ? piece : NULL;
}

size_t tokenizer_bytes(const Tokenizer *tokenizer, const int32_t *ids, int n) {
    size_t bytes = 0;
    for (int i = 0; i < n; i++) {
        const Piece *piece = text_piece(tokenizer, ids[i]);
        if (piece) bytes += (size_t)piece->len;
    }
    return bytes;
}

char *tokenizer_decode(const Tokenizer *tokenizer, const int32_t *ids, int n, size_t *len) {
    const size_t total = tokenizer_bytes(tokenizer, ids, n);
    char *bytes = xcalloc(total, 1), *next = bytes, *out = xcalloc(total + 1, 3); /* a byte may become a U+FFFD of three */
    for (int i = 0; i < n; i++) {
        const Piece *piece = text_piece(tokenizer, ids[i]);
        if (!piece) continue;
        memcpy(next, piece->bytes, (size_t)piece->len);
        next += piece->len;
    }
    *len = 0;
    for (size_t at = 0, step; at < total; at += step) {
        bool valid;
        step = utf8_step(bytes + at, total - at, &valid);
        memcpy(out + *len, valid ? bytes + at : "\xEF\xBF\xBD", valid ? step : 3);
        *len += valid ? step : 3;
    }
    free(bytes);
    return out;
}
