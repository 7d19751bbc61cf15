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

/* One entry of the vocabulary. */
typedef struct {
    char *bytes; /* its bytes, NULL if no token has this id; during reading, as in the file */
    int len;     /* number of bytes */
    bool added, special; /* an added token; one that gives nothing when decoded */
} Token;

/* An added token as it is found in texts. */
typedef struct {
    char *text;
    size_t len;
    int32_t id;
    bool lstrip, rstrip; /* takes the white space before or after it along */
    bool normalized;     /* is found after those that are not */
} Added;

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
    cJSON *tree;          /* an array of all files, which own the bytes of all tokens */
    int32_t byte_id[256]; /* the token of each byte */
    Added *added;         /* (nadded) */
    int nadded;
    bool begins[256]; /* true for a byte with which an added token begins */
    int32_t bos;      /* the token in front of a prompt, or -1 */
    int longest;      /* bytes of a text for which one token stands at most */
    Table ranks;      /* from pairs of ids to ranks, which are the lines of merges.txt */
    int nmerges;      /* number of ranks; rank 0 is joined first */
    uint64_t digest;  /* a hash of all that decides which ids a text has, and which text ids */
    /* While the files are read: */
    const char *dir;
    char path[MAX_PATH];              /* the file that is being read */
    int count;                        /* number of tokens */
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

/* Adds a token. An id that is NAN is none. */
static int add_token(Tokenizer *tokenizer, char *text, double id, Error *err) {
    char found[100];
    if (!(id >= 0 && id < tokenizer->vocab && id == floor(id)))
        return fail(err, EXIT_FAILED,
                    "%s: the id of \"%.*s\" is %s, expected a whole number from 0 to %d (the "
                    "model's vocabulary); take config.json and all files of the tokenizer from the "
                    "same model",
                    tokenizer->path, shown(text), text,
                    isnan(id) ? "missing" : json_number(found, id), tokenizer->vocab - 1);
    Token *token = &tokenizer->tokens[(int)id];
    if (token->bytes)
        return fail(err, EXIT_FAILED,
                    "%s: \"%.*s\" and \"%.*s\" both have id %.0f, expected one piece for an id; "
                    "take the file from the model's download again",
                    tokenizer->path, shown(token->bytes), token->bytes, shown(text), text, id);
    token->bytes = text;
    tokenizer->count++;
    uint64_t key = text_key(text);
    const uint64_t entry[] = {id, key};
    tokenizer->digest = hash_bytes(tokenizer->digest, entry, sizeof entry);
    *table_find(tokenizer->names, key) = (Place){key, id, -1};
    const char *at = text;
    int byte = next_byte(tokenizer, &at);
    if (byte >= 0 && !*at)
        tokenizer->byte_id[byte] = id;
    return 0;
}

static int read_vocab(Tokenizer *tokenizer, const cJSON *vocab, Error *err) {
    tokenizer->names = table_new(tokenizer->vocab);
    byte_symbols(tokenizer);
    memset(tokenizer->byte_id, 0xFF, sizeof tokenizer->byte_id);
    for (const cJSON *item = vocab ? vocab->child : NULL; item; item = item->next)
        if (add_token(tokenizer, item->string, cJSON_GetNumberValue(item), err))
            return -1;
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
// The merges
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
        return fail(err, EXIT_FAILED,
                    "\"%.*s\" is no piece of the vocabulary, expected two that are", shown(unknown),
                    unknown);
    }
    memmove(blank, right, strlen(right) + 1);
    int32_t joined = find_token(tokenizer, line);
    if (joined < 0)
        return fail(err, EXIT_FAILED,
                    "makes \"%.*s\", which is no piece of the vocabulary, expected one",
                    shown(line), line);
    uint64_t key = pair_key(first, second);
    Place *place = table_find(tokenizer->ranks, key);
    if (place->value >= 0)
        return fail(err, EXIT_FAILED,
                    "the pair that makes \"%.*s\" stood before, expected each pair once",
                    shown(line), line);
    *place = (Place){key, tokenizer->nmerges++, joined};
    tokenizer->digest = hash_bytes(tokenizer->digest, &key, sizeof key);
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
                        "%s line %d: %s; take all files of the tokenizer from the same model",
                        tokenizer->path, number, inner.text);
    }
    return 0;
}

/* Writes the merges of tokenizer.json, "left right" or ["left", "right"], as a merges.txt. */
static void write_merges(FILE *out, const cJSON *merges) {
    fputs("#version\n", out);
    for (const cJSON *merge = merges ? merges->child : NULL; merge; merge = merge->next) {
        const cJSON *left = merge->child ? merge->child : merge;
        fputs(text_of(left), out);
        if (merge->child)
            fprintf(out, " %s", text_of(left->next));
        putc('\n', out);
    }
}

/* Reads the merges of tokenizer.json, or merges.txt if there is no such file. */
static int open_merges(Tokenizer *tokenizer, cJSON *model, Error *err) {
    Text text = {0};
    if (file_path(tokenizer->path, tokenizer->dir, model ? "tokenizer.json: merges" : "merges.txt",
                  err))
        return -1;
    if (model) {
        FILE *out = text_stream(&text);
        write_merges(out, json_get(model, "merges"));
        fclose(out);
        cJSON_DeleteItemFromObjectCaseSensitive(model, "merges"); /* the largest part of the tree */
    } else
        text.text = file_read(tokenizer->path, MAX_FILE, &text.len, err);
    int status = text.text ? read_merges(tokenizer, text.text, text.len, err) : -1;
    free(text.text);
    return status;
}

// -------------------------------------------------------------------------------------------------
// Added tokens
// -------------------------------------------------------------------------------------------------

/* Adds an added token, which `how` describes. `id` matters only if the vocabulary and earlier files
 * do not have the token; NAN is none. What an earlier file had may only become special. */
static int add_added(Tokenizer *tokenizer, char *text, double id, const cJSON *how, bool special,
                     Error *err) {
    if (!*text || cJSON_IsTrue(json_get(how, "single_word")))
        return fail(err, EXIT_FAILED,
                    "%s: the added piece \"%.*s\" has %s, expected a text that may also be found "
                    "inside of words",
                    tokenizer->path, shown(text), text, *text ? "single_word true" : "no content");
    if (find_token(tokenizer, text) < 0 && add_token(tokenizer, text, id, err))
        return -1;
    int32_t known = find_token(tokenizer, text);
    Token *token = &tokenizer->tokens[known];
    bool bare = cJSON_IsNumber(how), twice = token->added;
    token->added = true;
    token->special |= special || cJSON_IsTrue(json_get(how, "special"));
    if (twice)
        return 0;
    tokenizer->begins[(uint8_t)*text] = true;
    tokenizer->added = with_room(tokenizer->added, tokenizer->nadded, sizeof *tokenizer->added);
    tokenizer->added[tokenizer->nadded++] = (Added){
        .text = xstrdup(text),
        .len = strlen(text),
        .id = known,
        .lstrip = cJSON_IsTrue(json_get(how, "lstrip")),
        .rstrip = cJSON_IsTrue(json_get(how, "rstrip")),
        .normalized = bare || cJSON_IsTrue(json_get(how, "normalized")),
    };
    return 0;
}

/* Adds the tokens of a list: that of tokenizer.json; added_tokens_decoder, whose keys are ids; or
 * added_tokens.json, whose keys are texts. */
static int add_list(Tokenizer *tokenizer, const cJSON *list, Error *err) {
    for (const cJSON *item = list ? list->child : NULL; item; item = item->next) {
        const cJSON *id = cJSON_IsNumber(item) ? item : json_get(item, "id");
        double number = id || !item->string ? cJSON_GetNumberValue(id) : strtod(item->string, NULL);
        if (add_added(tokenizer, id == item ? item->string : text_of(item), number, item, false,
                      err))
            return -1;
    }
    return 0;
}

/* Adds the special tokens of tokenizer_config.json: "..._token" is one, "..._tokens" are several.
 * Some have their ids in added_tokens.json. */
static int add_special(Tokenizer *tokenizer, const cJSON *config, const cJSON *older, Error *err) {
    for (const cJSON *item = config->child; item; item = item->next) {
        bool one = !fnmatch("*_token", item->string, 0),
             several = !fnmatch("*_tokens", item->string, 0);
        const cJSON *token = one ? item : several ? item->child : NULL;
        for (; token; token = several ? token->next : NULL) {
            char *text = text_of(token);
            double id = cJSON_GetNumberValue(json_get(older, text));
            if (*text && add_added(tokenizer, text, id, token, true, err))
                return -1;
        }
    }
    return 0;
}

// -------------------------------------------------------------------------------------------------
// Opening
// -------------------------------------------------------------------------------------------------

/* The fields in which a tokenizer may differ from OPT's, and what they may be. The last three are
 * those of tokenizer_config.json, the others may lie in an object of tokenizer.json. */
enum { NEEDS = 13, OF_CONFIG = 10 };
static const char *const needs[NEEDS][3] = {
    {"", "normalizer", "null or nothing"},
    {"pre_tokenizer", "type", "\"ByteLevel\""},
    {"pre_tokenizer", "use_regex", "true or nothing"},
    {"decoder", "type", "\"ByteLevel\""},
    {"post_processor", "type", "\"TemplateProcessing\", \"ByteLevel\" or nothing"},
    {"model", "type", "\"BPE\""},
    {"model", "dropout", "null or nothing"},
    {"model", "continuing_subword_prefix", "\"\", null or nothing"},
    {"model", "end_of_word_suffix", "\"\", null or nothing"},
    {"model", "ignore_merges", "false, null or nothing"},
    {"", "add_prefix_space", "false, null or nothing"},
    {"", "add_eos_token", "false, null or nothing"},
    {"", "split_special_tokens", "false, null or nothing"},
};

static int check_needs(const Tokenizer *tokenizer, const cJSON *file, int first, int end,
                       Error *err) {
    for (int i = first; file && i < end; i++) {
        const cJSON *object = *needs[i][0] ? json_get(file, needs[i][0]) : file;
        const cJSON *value = json_get(object, needs[i][1]);
        char found[100];
        if (strstr(needs[i][2], json_describe(found, value)))
            continue;
        json_refuse(err, needs[i][1], value, "%s, as in OPT's tokenizer", needs[i][2]);
        return fail_at(err, tokenizer->path);
    }
    return 0;
}

/* Reads a file, if it is there; otherwise *json is NULL. */
static int read_if(cJSON **json, Tokenizer *tokenizer, const char *name, Error *err) {
    if (file_path(tokenizer->path, tokenizer->dir, name, err) ||
        json_read_if(json, tokenizer->path, MAX_FILE, err))
        return -1;
    cJSON_AddItemToArray(tokenizer->tree, *json);
    return 0;
}

/* Reads the vocabulary of tokenizer.json, or vocab.json if there is no such file. */
static int open_vocab(cJSON **whole, Tokenizer *tokenizer, Error *err) {
    if (read_if(whole, tokenizer, "tokenizer.json", err) ||
        check_needs(tokenizer, *whole, 0, OF_CONFIG, err))
        return -1;
    cJSON *file = *whole;
    if (!file && read_if(&file, tokenizer, "vocab.json", err))
        return -1;
    if (!file)
        return fail(err, EXIT_FAILED,
                    "%s: there is no such file, and no tokenizer.json, expected one of them; take "
                    "the tokenizer's files from the model's download",
                    tokenizer->path);
    const cJSON *vocab = *whole ? json_get(json_get(file, "model"), "vocab") : file;
    if (read_vocab(tokenizer, vocab, err))
        return -1;
    return *whole ? add_list(tokenizer, json_get(file, "added_tokens"), err) : 0;
}

/* Reads the files that say which tokens are added. A list in tokenizer_config.json makes the two
 * older files superfluous. *config becomes tokenizer_config.json, with what the map says instead.
 */
static int open_added(cJSON **config, Tokenizer *tokenizer, bool whole, Error *err) {
    static const char published[] =
        "{\"add_bos_token\":true,\"bos_token\":\"</s>\",\"pad_token\":\"<pad>\"}";
    cJSON *map = NULL, *older = NULL;
    if (read_if(config, tokenizer, "tokenizer_config.json", err) ||
        check_needs(tokenizer, *config, OF_CONFIG, NEEDS, err))
        return -1;
    if (!*config) {
        *config = whole ? cJSON_CreateObject() : cJSON_Parse(published);
        cJSON_AddItemToArray(tokenizer->tree, *config);
    }
    const cJSON *list = json_get(*config, "added_tokens_decoder");
    if (!list && (read_if(&map, tokenizer, "special_tokens_map.json", err) ||
                  read_if(&older, tokenizer, "added_tokens.json", err)))
        return -1;
    for (cJSON *item; map && (item = map->child);) {
        cJSON_DeleteItemFromObjectCaseSensitive(*config, item->string);
        cJSON_AddItemToObject(*config, item->string, cJSON_DetachItemViaPointer(map, item));
    }
    return add_list(tokenizer, list, err) || add_special(tokenizer, *config, older, err) ||
                   add_list(tokenizer, older, err)
               ? -1
               : 0;
}

/* Finds the token in front of a prompt. If there is a tokenizer.json, only that says it. */
static int find_bos(Tokenizer *tokenizer, const cJSON *whole, const cJSON *config, Error *err) {
    const cJSON *single = json_get(json_get(whole, "post_processor"), "single");
    const cJSON *first = json_get(cJSON_GetArrayItem(single, 0), "SpecialToken");
    bool adds = cJSON_IsTrue(json_get(config, "add_bos_token"));
    const cJSON *bos = whole ? json_get(first, "id") : json_get(config, "bos_token");
    tokenizer->bos = whole || adds ? find_token(tokenizer, text_of(bos)) : -1;
    if (!single || cJSON_GetArraySize(single) == 1 + (tokenizer->bos >= 0))
        return 0;
    return fail(err, EXIT_FAILED,
                "%s/tokenizer.json: post_processor adds other pieces to a text than one in front, "
                "expected that or none: is this an OPT model?",
                tokenizer->dir);
}

/* Prepares the tokens for decoding, and finds out how much a token stands for. */
static int finish_tokens(Tokenizer *tokenizer, Error *err) {
    for (Token *token = tokenizer->tokens; token < tokenizer->tokens + tokenizer->vocab; token++) {
        if (token->bytes)
            decode_token(tokenizer, token);
        if (!token->added)
            tokenizer->longest = imax(tokenizer->longest, token->len);
    }
    if (!tokenizer->nmerges && tokenizer->count - tokenizer->nadded > SMALLEST)
        return fail(
            err, EXIT_FAILED,
            "%s: has no merges, but the vocabulary has pieces of several bytes, which merges "
            "make; take all files of the tokenizer from the same model",
            tokenizer->path);
    for (const Added *a = tokenizer->added; a < tokenizer->added + tokenizer->nadded; a++) {
        const int32_t entry[] = {
            a->id,         a->lstrip, a->rstrip, a->normalized, tokenizer->tokens[a->id].special,
            tokenizer->bos};
        tokenizer->digest = hash_bytes(tokenizer->digest, entry, sizeof entry);
        tokenizer->longest = a->lstrip || a->rstrip ? INT_MAX : imax(tokenizer->longest, a->len);
        if (a->id >= tokenizer->count)
            return fail(err, EXIT_FAILED,
                        "%s: the added piece \"%.*s\" has id %d, expected one below the number of "
                        "pieces, %d, since Hugging Face numbers added pieces without gaps",
                        tokenizer->dir, shown(a->text), a->text, a->id, tokenizer->count);
    }
    return 0;
}

static int open_files(Tokenizer *tokenizer, Error *err) {
    cJSON *whole, *config;
    return open_vocab(&whole, tokenizer, err) || open_added(&config, tokenizer, whole, err) ||
                   find_bos(tokenizer, whole, config, err) ||
                   open_merges(tokenizer, cJSON_GetObjectItemCaseSensitive(whole, "model"), err) ||
                   finish_tokens(tokenizer, err)
               ? -1
               : 0;
}

Tokenizer *tokenizer_open(const char *dir, int vocab, Error *err) {
    Tokenizer *tokenizer = xcalloc(1, sizeof *tokenizer);
    tokenizer->vocab = vocab;
    tokenizer->dir = dir;
    tokenizer->tree = cJSON_CreateArray();
    tokenizer->digest = HASH_START;
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
    for (int i = 0; i < tokenizer->nadded; i++)
        free(tokenizer->added[i].text);
    free(tokenizer->added);
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
static const Added *find_added(const Tokenizer *tokenizer, const char *text, size_t len,
                               bool normalized) {
    const Added *best = NULL, *end = tokenizer->added + tokenizer->nadded;
    if (!tokenizer->begins[(uint8_t)*text])
        return NULL;
    for (const Added *a = tokenizer->added; a < end; a++)
        if (a->normalized == normalized && a->len <= len && (!best || a->len > best->len) &&
            !memcmp(text, a->text, a->len))
            best = a;
    return best;
}

/* Returns the kind of the character before text[*at], and moves *at to where it begins. */
static char last_kind(const char *text, size_t *at) {
    size_t end = *at;
    while ((text[--*at] & 0xC0) == 0x80)
        continue;
    return next_kind(text, end, &(size_t){*at});
}

static void encode_words(const Tokenizer *tokenizer, Word *word, const char *text, size_t len) {
    for (size_t at = 0, end; at < len; at = end) {
        end = tokenizer_word_end(text, len, at);
        encode_word(tokenizer, word, text + at, end - at);
    }
}

/* Appends the ids of a text. Step 0 cuts out the added tokens that are not normalized, and step 1
 * the others from the rest; the rest of this is split into words. */
static void encode_part(const Tokenizer *tokenizer, Word *word, const char *text, size_t len,
                        int step) {
    size_t done = 0;
    if (step == 2) {
        encode_words(tokenizer, word, text, len);
        return;
    }
    for (size_t at = 0, next; at < len; at = next) {
        const Added *added = find_added(tokenizer, text + at, len - at, step);
        next = at + (added ? added->len : 1);
        if (!added)
            continue;
        size_t from = at, to = next;
        for (size_t more = from; added->lstrip && more > done && last_kind(text, &more) == 'S';)
            from = more;
        for (size_t more = to; added->rstrip && more < len && next_kind(text, len, &more) == 'S';)
            to = more;
        if (from > done)
            encode_part(tokenizer, word, text + done, from - done, step + 1);
        if (!added->lstrip || to > done) /* its text may have been taken along by the one before */
            word->ids[word->n++] = added->id;
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

int32_t tokenizer_bos(const Tokenizer *tokenizer) { return tokenizer->bos; }

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
