/* tokenizer.c: OPT's byte-level BPE (GPT-2's): turns text into token ids and back.
 *
 * Encoding splits a text into words by GPT-2's pattern, and each word into its bytes, where each
 * byte is a token. Then it repeats one step: of all pairs of neighbouring tokens, it joins the pair
 * that comes first in merges.txt, the leftmost one if there are several, until no pair is in
 * merges.txt. vocab.json has the id of every token. (Messages to the user call a token a piece.)
 * Both files write a byte as a printable "byte symbol" (a space is U+0120). Every byte has a token,
 * so `<unk>` never appears. Encoding changes nothing in the tokenizer, may run on several threads
 * at once, and takes O(n log n) even for one very long word. Decoding concatenates the bytes of all
 * ids first, so that a character split between tokens comes out whole.
 *
 * Added tokens, </s> among them, are found in a text before it is split into words; other files of
 * the directory list them. Where there is a tokenizer.json, it takes the place of vocab.json and
 * merges.txt. Ids and texts are those of Hugging Face's AutoTokenizer in transformers 4.57
 * and 5.24, which read a directory alike; one with a tokenizer of another kind is refused. (In one
 * thing the two differ: if a file names a special token by its bare text, version 4 finds it after
 * those that are not normalized. Here it is one of these, as in version 5.)
 *
 * DIFFERS: without tokenizer_config.json and tokenizer.json the directory is read as if it had the
 * tokenizer_config.json of the published OPTs. Hugging Face would put no </s> in front of a prompt.
 * Read next: unicode.c. */
#include <cjson/cJSON.h>
#include <fnmatch.h>
#include <limits.h>
#include <math.h>

#include "io/io.h"

/* Bytes of a file at most (published ones have less than 4 MB); the last code point of a byte
 * symbol; bytes of a text in a message; tokens of a vocabulary of bytes, <s>, <pad>, </s> and
 * <unk>. */
enum { MAX_FILE = 64 << 20, LAST_SYMBOL = 323, SHOWN = 60, SMALLEST = 256 + 4 };

/* One entry of the vocabulary, or an added token. */
typedef struct {
    char *text; /* as in the file; NULL if no token has this id */
    int flags;  /* of an added token; 0 for the others */
} Token;

/* How an added token is found and decoded. The first five have the names of flag_names in files. */
enum {
    SPECIAL = 1,      /* gives nothing when decoded */
    LSTRIP = 2,       /* takes the white space before it along ... */
    RSTRIP = 4,       /* ... or after it */
    NORMALIZED = 8,   /* is found after those that are not */
    SINGLE_WORD = 16, /* is found between words only, which is refused */
    DESCRIBED = 32,   /* is more than a text and an id in added_tokens.json */
};
static const char *const flag_names[] = {"special", "lstrip", "rstrip", "normalized",
                                         "single_word"};

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
    Token *tokens;                    /* (vocab), by id */
    cJSON *tree;                      /* an array of all files, which own the texts of all tokens */
    int16_t byte_of[LAST_SYMBOL + 1]; /* the byte for which a code point stands, or -1 */
    int32_t byte_id[256];             /* the token of each byte */
    int reach[256];                   /* bytes of the longest added token that begins with a byte */
    int32_t bos;                      /* the token in front of a prompt, or -1 */
    int longest;                      /* bytes of a text for which one token stands at most */
    Table names;                      /* from hashes of tokens' texts to ids */
    Table ranks;     /* from pairs of ids to ranks, which are the lines of merges.txt */
    int nmerges;     /* number of ranks; rank 0 is joined first */
    uint64_t digest; /* a hash of all that decides which ids a text has, and which text ids */
    /* While the files are read: */
    const char *dir;
    char path[MAX_PATH]; /* the file that is being read */
    int count;           /* number of tokens */
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
    return id >= 0 && !strcmp(tokenizer->tokens[id].text, text) ? id : -1;
}

// -------------------------------------------------------------------------------------------------
// The vocabulary
// -------------------------------------------------------------------------------------------------

/* Returns the text of a token, which the files write as a string or as an object; "" for others. */
static char *text_of(const cJSON *token) {
    const cJSON *text = cJSON_IsObject(token) ? json_get(token, "content") : token;
    return cJSON_IsString(text) ? text->valuestring : "";
}

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

/* Writes the bytes for which a token stands. As in Hugging Face, a token with a character that is
 * no byte symbol stands for its own text. */
static void write_token(FILE *out, const Tokenizer *tokenizer, const Token *token) {
    bool symbols = true;
    for (const char *at = token->text; *at;)
        symbols &= next_byte(tokenizer, &at) >= 0;
    for (const char *at = token->text; *at;)
        putc_unlocked(symbols ? next_byte(tokenizer, &at) : *at++, out);
}

/* Adds a token. An id that is NAN is none. Returns the id, or -1. */
static int32_t add_token(Tokenizer *tokenizer, char *text, double id, Error *err) {
    char found[100];
    if (!(id >= 0 && id < tokenizer->vocab && id == floor(id)))
        return fail(err, EXIT_FAILED,
                    "%s: the id of \"%.*s\" is %s, expected a whole number from 0 to %d (the "
                    "model's vocabulary); take config.json and all files of the tokenizer from the "
                    "same model",
                    tokenizer->path, shown(text), text,
                    isnan(id) ? "missing" : json_number(found, id), tokenizer->vocab - 1);
    Token *token = &tokenizer->tokens[(int)id];
    if (token->text)
        return fail(err, EXIT_FAILED,
                    "%s: \"%.*s\" and \"%.*s\" both have id %.0f, expected one piece for an id; "
                    "take the file from the model's download again",
                    tokenizer->path, shown(token->text), token->text, shown(text), text, id);
    token->text = text;
    tokenizer->count++;
    uint64_t key = text_key(text);
    *table_find(tokenizer->names, key) = (Place){key, id, -1};
    const char *at = text;
    int byte = next_byte(tokenizer, &at);
    if (byte >= 0 && !*at)
        tokenizer->byte_id[byte] = id;
    return id;
}

static int read_vocab(Tokenizer *tokenizer, const cJSON *vocab, Error *err) {
    tokenizer->names = table_new(tokenizer->vocab);
    byte_symbols(tokenizer);
    memset(tokenizer->byte_id, 0xFF, sizeof tokenizer->byte_id);
    for (const cJSON *item = cJSON_IsObject(vocab) ? vocab->child : NULL; item; item = item->next)
        if (add_token(tokenizer, item->string, cJSON_GetNumberValue(item), err) < 0)
            return -1;
    for (int b = 0; b < 256; b++)
        if (tokenizer->byte_id[b] < 0)
            return fail(err, EXIT_FAILED,
                        "%s: no piece for byte 0x%02X, expected a piece for each of the 256 bytes; "
                        "is this a byte-level BPE?",
                        tokenizer->path, b);
    return 0;
}

// -------------------------------------------------------------------------------------------------
// The merges
// -------------------------------------------------------------------------------------------------

/* Adds the merge in a line "left right" of len bytes, with a 0 after it. Removes the space from the
 * line to look up the joined token. Returns NULL, or a message about the text *about, in which
 * "%.*s" stands for it. */
static const char *add_merge(Tokenizer *tokenizer, char *line, size_t len, const char **about) {
    char *blank = strchr(line, ' '), *right = blank ? blank + 1 : line;
    *about = line;
    if (!utf8_valid(line, len))
        return "found \"%.*s\" and later invalid UTF-8, expected two pieces";
    if (right == line || blank == line || !*right || strchr(right, ' ') || strlen(line) < len)
        return "found \"%.*s\", expected two pieces with one blank between them";
    *blank = 0;
    int32_t first = find_token(tokenizer, line), second = find_token(tokenizer, right);
    if (first >= 0)
        *about = right;
    if (first < 0 || second < 0)
        return "\"%.*s\" is no piece of the vocabulary, expected two that are";
    memmove(blank, right, strlen(right) + 1);
    *about = line;
    int32_t joined = find_token(tokenizer, line);
    if (joined < 0)
        return "makes \"%.*s\", which is no piece of the vocabulary, expected one";
    uint64_t key = pair_key(first, second);
    Place *place = table_find(tokenizer->ranks, key);
    if (place->value >= 0)
        return "the pair that makes \"%.*s\" stood before, expected each pair once";
    *place = (Place){key, tokenizer->nmerges++, joined};
    tokenizer->digest = splitmix64(tokenizer->digest ^ key, 1);
    return NULL;
}

static int read_merges(Tokenizer *tokenizer, char *text, size_t len, Error *err) {
    tokenizer->ranks = table_new(1 + len / strlen("a b\n"));
    char *end = text + len, *next;
    for (int number = 1; text < end; number++, text = next) {
        char *newline = memchr(text, '\n', end - text), *stop = newline ? newline : end;
        next = stop + 1;
        if (newline && stop > text && stop[-1] == '\r')
            stop--; /* git on Windows writes CR LF */
        *stop = 0;
        if (number == 1 && !strncmp(text, "#version", 8))
            continue;
        const char *about, *why = add_merge(tokenizer, text, stop - text, &about);
        if (!why)
            continue;
        Error inner;
        fail(&inner, EXIT_FAILED, why, shown(about), about);
        return fail(err, EXIT_FAILED,
                    "%s line %d: %s; take all files of the tokenizer from the same model",
                    tokenizer->path, number, inner.text);
    }
    return 0;
}

/* Writes the merges of tokenizer.json, "left right" or ["left", "right"], as a merges.txt. */
static void write_merges(FILE *out, const cJSON *merges) {
    fputs("#version\n", out);
    for (const cJSON *merge = merges ? merges->child : NULL; merge; merge = merge->next) {
        const cJSON *left = merge->child;
        fprintf(out, "%s%s%s\n", text_of(left ? left : merge), left ? " " : "",
                text_of(left ? left->next : NULL));
    }
}

/* Reads the merges of tokenizer.json, or merges.txt if there is no such file. */
static int open_merges(Tokenizer *tokenizer, const cJSON *whole, Error *err) {
    Text text = {0};
    if (file_path(tokenizer->path, tokenizer->dir, whole ? "tokenizer.json: merges" : "merges.txt",
                  err))
        return -1;
    if (whole) {
        FILE *out = text_stream(&text);
        write_merges(out, json_get(json_get(whole, "model"), "merges"));
        fclose(out);
    } else
        text.text = file_read(tokenizer->path, MAX_FILE, &text.len, err);
    int status = text.text ? read_merges(tokenizer, text.text, text.len, err) : -1;
    free(text.text);
    if (status || tokenizer->nmerges || tokenizer->count <= SMALLEST)
        return status;
    return fail(err, EXIT_FAILED,
                "%s: has no merges, but the vocabulary has pieces of several bytes, which merges "
                "make; take all files of the tokenizer from the same model",
                tokenizer->path);
}

// -------------------------------------------------------------------------------------------------
// Added tokens
// -------------------------------------------------------------------------------------------------

/* Adds an added token. It is an object that describes it, with "id" or with the id as its key; or
 * "text": id, in added_tokens.json. A special token may be a bare text, and then another file has
 * its id. Later files make a token special, and describe one that none has described. */
static int add_added(Tokenizer *tokenizer, const cJSON *item, bool special, Error *err) {
    bool bare = cJSON_IsNumber(item) && item->string;
    const cJSON *number = bare ? item : json_get(item, "id");
    bool keyed = !number && !special && item->string;
    double id = keyed ? strtod(item->string, NULL) : cJSON_GetNumberValue(number);
    char *text = bare ? item->string : text_of(item);
    int flags = bare ? NORMALIZED : DESCRIBED | special;
    for (size_t i = 0; i < sizeof flag_names / sizeof *flag_names; i++)
        flags |= cJSON_IsTrue(json_get(item, flag_names[i])) << i;
    if (!*text && special)
        return 0;
    if (!*text || flags & SINGLE_WORD)
        return fail(err, EXIT_FAILED,
                    "%s: the added piece \"%.*s\" has %s, expected a text that may also be found "
                    "inside of words",
                    tokenizer->path, shown(text), text, *text ? "single_word true" : "no content");
    int32_t known = find_token(tokenizer, text);
    if (known < 0)
        known = add_token(tokenizer, text, id, err);
    if (known < 0)
        return -1;
    Token *token = &tokenizer->tokens[known];
    int *reach = &tokenizer->reach[(uint8_t)*text];
    *reach = imax(*reach, strlen(text));
    token->flags = token->flags & DESCRIBED ? token->flags | (flags & SPECIAL) : flags;
    return 0;
}

/* Adds the tokens of a list, which may be NULL. */
static int add_list(Tokenizer *tokenizer, const cJSON *list, bool special, Error *err) {
    for (const cJSON *item = list ? list->child : NULL; item; item = item->next)
        if (add_added(tokenizer, item, special, err))
            return -1;
    return 0;
}

/* Adds the special tokens of tokenizer_config.json: "..._token" is one, "..._tokens" are several.
 */
static int add_special(Tokenizer *tokenizer, const cJSON *config, Error *err) {
    for (const cJSON *item = config->child; item; item = item->next)
        if ((!fnmatch("*_token", item->string, 0) && add_added(tokenizer, item, true, err)) ||
            (!fnmatch("*_tokens", item->string, 0) && add_list(tokenizer, item, true, err)))
            return -1;
    return 0;
}

// -------------------------------------------------------------------------------------------------
// Opening
// -------------------------------------------------------------------------------------------------

/* The fields in which a tokenizer may differ from OPT's: the file, the object in it, the name, and
 * what the field may be. Of those that are not looked at, clean_up_tokenization_spaces does nothing
 * in transformers 5 either; version 4 removed blanks before some marks from a decoded text if it
 * was true. */
static const char *const needs[][4] = {
    {"tokenizer.json", "", "normalizer", "null or nothing"},
    {"tokenizer.json", "pre_tokenizer", "type", "\"ByteLevel\""},
    {"tokenizer.json", "pre_tokenizer", "use_regex", "true or nothing"},
    {"tokenizer.json", "decoder", "type", "\"ByteLevel\""},
    {"tokenizer.json", "post_processor", "type",
     "\"TemplateProcessing\", \"ByteLevel\" or nothing"},
    {"tokenizer.json", "model", "type", "\"BPE\""},
    {"tokenizer.json", "model", "dropout", "null or nothing"},
    {"tokenizer.json", "model", "continuing_subword_prefix", "\"\", null or nothing"},
    {"tokenizer.json", "model", "end_of_word_suffix", "\"\", null or nothing"},
    {"tokenizer.json", "model", "ignore_merges", "false, null or nothing"},
    {"tokenizer_config.json", "", "tokenizer_class",
     "\"GPT2Tokenizer\", \"GPT2TokenizerFast\", \"PreTrainedTokenizerFast\", "
     "\"TokenizersBackend\", null or nothing"},
    {"tokenizer_config.json", "", "add_prefix_space", "false, null or nothing"},
    {"tokenizer_config.json", "", "add_eos_token", "false, null or nothing"},
    {"tokenizer_config.json", "", "split_special_tokens", "false, null or nothing"},
};

/* Reads a file that may be missing, and checks its fields. If it is missing, *json is NULL. */
static int read_if(cJSON **json, Tokenizer *tokenizer, const char *name, Error *err) {
    char found[100];
    if (file_path(tokenizer->path, tokenizer->dir, name, err) ||
        json_read_if(json, tokenizer->path, MAX_FILE, err))
        return -1;
    cJSON_AddItemToArray(tokenizer->tree, *json);
    for (size_t i = 0; *json && i < sizeof needs / sizeof *needs; i++) {
        const char *object = needs[i][1], *key = needs[i][2], *may = needs[i][3];
        const cJSON *value = json_get(*object ? json_get(*json, object) : *json, key);
        if (strcmp(needs[i][0], name) || strstr(may, json_describe(found, value)))
            continue;
        json_refuse(err, key, value, "%s, as in OPT's tokenizer", may);
        return fail_at(err, tokenizer->path);
    }
    return 0;
}

/* Reads the vocabulary of tokenizer.json, or vocab.json if there is no such file. */
static int open_vocab(Tokenizer *tokenizer, const cJSON *whole, Error *err) {
    cJSON *file;
    if (whole)
        return read_vocab(tokenizer, json_get(json_get(whole, "model"), "vocab"), err);
    if (read_if(&file, tokenizer, "vocab.json", err))
        return -1;
    if (file)
        return read_vocab(tokenizer, file, err);
    return fail(err, EXIT_FAILED,
                "%s: there is no such file, and no tokenizer.json, expected one of them; take the "
                "tokenizer's files from the model's download",
                tokenizer->path);
}

/* Reads the files that say which tokens are added. A list in tokenizer_config.json makes the two
 * older files superfluous. *config becomes tokenizer_config.json, with what the map says instead.
 */
static int open_added(cJSON **config, Tokenizer *tokenizer, const cJSON *whole, Error *err) {
    static const char published[] =
        "{\"add_bos_token\":true,\"bos_token\":\"</s>\",\"pad_token\":\"<pad>\"}";
    cJSON *map = NULL, *older = NULL;
    if (file_path(tokenizer->path, tokenizer->dir, "tokenizer.json", err) ||
        add_list(tokenizer, json_get(whole, "added_tokens"), false, err) ||
        read_if(config, tokenizer, "tokenizer_config.json", err))
        return -1;
    if (!*config) {
        *config = cJSON_Parse(whole ? "{}" : published);
        cJSON_AddItemToArray(tokenizer->tree, *config);
    }
    const cJSON *list = json_get(*config, "added_tokens_decoder");
    if (!list && (read_if(&map, tokenizer, "special_tokens_map.json", err) ||
                  read_if(&older, tokenizer, "added_tokens.json", err)))
        return -1;
    for (cJSON *item; map && (item = map->child);) {
        cJSON_DeleteItemFromObjectCaseSensitive(*config, item->string);
        cJSON_AddItemToArray(*config, cJSON_DetachItemViaPointer(map, item));
    }
    return add_list(tokenizer, list ? list : older, false, err) ||
                   add_special(tokenizer, *config, err)
               ? -1
               : 0;
}

/* Finds the token in front of a prompt. If there is a tokenizer.json, only that says it. */
static int find_bos(Tokenizer *tokenizer, const cJSON *whole, const cJSON *config, Error *err) {
    const cJSON *single = json_get(json_get(whole, "post_processor"), "single");
    const cJSON *first = json_get(cJSON_GetArrayItem(single, 0), "SpecialToken");
    bool adds = cJSON_IsTrue(json_get(config, "add_bos_token"));
    const cJSON *bos = whole ? json_get(first, "id") : adds ? json_get(config, "bos_token") : NULL;
    tokenizer->bos = find_token(tokenizer, text_of(bos));
    if (!single || cJSON_GetArraySize(single) == 1 + (tokenizer->bos >= 0))
        return 0;
    return fail(err, EXIT_FAILED,
                "%s/tokenizer.json: post_processor adds other pieces to a text than one in front, "
                "expected that or none: is this an OPT model?",
                tokenizer->dir);
}

/* Adds all tokens to the digest, and finds out how much of a text one stands for. */
static int measure_tokens(Tokenizer *tokenizer, Error *err) {
    for (int id = 0; id < tokenizer->vocab; id++) {
        const Token *token = &tokenizer->tokens[id];
        if (!token->text)
            continue;
        tokenizer->digest = splitmix64(tokenizer->digest ^ text_key(token->text), id);
        tokenizer->digest = splitmix64(tokenizer->digest ^ token->flags, tokenizer->bos);
        size_t most = token->flags & (LSTRIP | RSTRIP) ? INT_MAX
                      : token->flags                   ? strlen(token->text)
                                     : tokenizer_bytes(tokenizer, &(int32_t){id}, 1);
        tokenizer->longest = imax(tokenizer->longest, most);
        if (token->flags && id >= tokenizer->count)
            return fail(err, EXIT_FAILED,
                        "%s: the added piece \"%.*s\" has id %d, expected one below the number of "
                        "pieces, %d, since Hugging Face numbers added pieces without gaps",
                        tokenizer->dir, shown(token->text), token->text, id, tokenizer->count);
    }
    return 0;
}

static int open_files(Tokenizer *tokenizer, Error *err) {
    cJSON *whole, *config;
    return read_if(&whole, tokenizer, "tokenizer.json", err) || open_vocab(tokenizer, whole, err) ||
                   open_merges(tokenizer, whole, err) ||
                   open_added(&config, tokenizer, whole, err) ||
                   find_bos(tokenizer, whole, config, err) || measure_tokens(tokenizer, err)
               ? -1
               : 0;
}

Tokenizer *tokenizer_open(const char *dir, int vocab, Error *err) {
    Tokenizer *tokenizer = xcalloc(1, sizeof *tokenizer);
    tokenizer->vocab = vocab;
    tokenizer->dir = dir;
    tokenizer->tree = cJSON_CreateArray();
    tokenizer->tokens = xcalloc(vocab, sizeof *tokenizer->tokens);
    if (!open_files(tokenizer, err))
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
    int32_t *ids; /* of the text so far */
    int n;        /* number of these */
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

/* Appends the ids of one word, at most len of them. */
static void encode_word(const Tokenizer *tokenizer, Word *word, const char *text, int len) {
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
    for (int32_t i = 0; i >= 0; i = links[i].next)
        word->ids[word->n++] = links[i].id;
}

/* Returns the longest added token with which text[0..len) begins, or NULL. Considers only those
 * that are normalized, or only those that are not. */
static const Token *find_added(const Tokenizer *tokenizer, const char *text, size_t len,
                               bool normalized) {
    const Token *found = NULL;
    uint64_t key = HASH_START;
    size_t most = tokenizer->reach[(uint8_t)*text];
    for (size_t n = 1; n <= most && n <= len; n++) {
        key = hash_bytes(key, text + n - 1, 1);
        int32_t id = table_find(tokenizer->names, key)->value;
        const Token *token = id < 0 ? NULL : &tokenizer->tokens[id];
        if (token && token->flags && normalized == !!(token->flags & NORMALIZED) &&
            strlen(token->text) == n && !memcmp(token->text, text, n))
            found = token;
    }
    return found;
}

/* Appends the ids of a text. Step 0 cuts out the added tokens that are not normalized, and step 1
 * the others from the rest; the rest of this is split into words. */
static void encode_part(const Tokenizer *tokenizer, Word *word, const char *text, size_t len,
                        int step) {
    size_t done = 0, blank = 0, blanks = 0; /* blank: where the white space before `at` begins;
                                               blanks: where that ends that was taken along last */
    if (step == 2) {
        for (size_t end; done < len; done = end) {
            end = tokenizer_word_end(text, len, done);
            encode_word(tokenizer, word, text + done, end - done);
        }
        return;
    }
    for (size_t at = 0, next; at < len; at = next) {
        const Token *added = find_added(tokenizer, text + at, len - at, step);
        next = at;
        if (!added) {
            if (next_kind(text, len, &next) != 'S')
                blank = next;
            continue;
        }
        next += strlen(added->text);
        size_t from = added->flags & LSTRIP ? blank : at, to = next;
        if (added->flags & RSTRIP) {
            to = size_max(blanks, next);
            for (size_t more = to; more < len && next_kind(text, len, &more) == 'S';)
                to = more;
            blanks = to;
        }
        if (from > done)
            encode_part(tokenizer, word, text + done, from - done, step + 1);
        /* Its text may have been taken along by the one before. */
        if (!(added->flags & LSTRIP) || to > done)
            word->ids[word->n++] = added - tokenizer->tokens;
        done = to;
    }
    encode_part(tokenizer, word, text + done, len - done, step + 1);
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
    Word word = {.ids = xcalloc(len, sizeof *word.ids)}; /* an id stands for at least one byte */
    encode_part(tokenizer, &word, text, len, 0);
    free(word.links);
    free(word.heap);
    *ids = xrealloc(word.ids, word.n, sizeof **ids);
    return word.n;
}

// -------------------------------------------------------------------------------------------------
// Decoding
// -------------------------------------------------------------------------------------------------

/* Returns the concatenated bytes of ids[0..n), which the caller frees. */
static Text join_tokens(const Tokenizer *tokenizer, const int32_t *ids, int n) {
    Text text = {0};
    FILE *out = text_stream(&text);
    for (int i = 0; i < n; i++) {
        bool known = ids[i] >= 0 && ids[i] < tokenizer->vocab;
        const Token *token = &tokenizer->tokens[known ? ids[i] : 0];
        if (known && token->text && !(token->flags & SPECIAL))
            write_token(out, tokenizer, token);
    }
    fclose(out);
    return text;
}

int32_t tokenizer_bos(const Tokenizer *tokenizer) { return tokenizer->bos; }

uint64_t tokenizer_digest(const Tokenizer *tokenizer) { return tokenizer ? tokenizer->digest : 0; }

size_t tokenizer_longest(const Tokenizer *tokenizer) { return tokenizer->longest; }

size_t tokenizer_bytes(const Tokenizer *tokenizer, const int32_t *ids, int n) {
    Text text = join_tokens(tokenizer, ids, n);
    free(text.text);
    return text.len;
}

char *tokenizer_decode(const Tokenizer *tokenizer, const int32_t *ids, int n, size_t *len) {
    Text bytes = join_tokens(tokenizer, ids, n), text = {0};
    FILE *out = text_stream(&text);
    for (size_t at = 0, step; at < bytes.len; at += step) {
        uint32_t code;
        step = utf8_step(&code, bytes.text + at, bytes.len - at);
        if (code == NO_CHARACTER)
            fputs("\xEF\xBF\xBD", out);
        else
            fwrite(bytes.text + at, 1, step, out);
    }
    putc(0, out);
    fclose(out);
    free(bytes.text);
    *len = text.len - 1;
    return text.text;
}
