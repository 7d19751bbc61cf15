/* test_tokenizer.c: the tokenizer against golden ids of Hugging Face, against itself (round trips), and against bad files.
 * scripts/make_tokenizer_golden.py made tests/golden/tokenizer*; with TOKENIZER_GOLDEN=BASE in the environment the golden
 * test reads BASE.jsonl and BASE/ instead, which is how a large comparison is run. */
#include <cjson/cJSON.h>

#include "tests.h"

#define GOLDEN "tests/golden/tokenizer"
enum { VOCAB = 1024, GAP = 310, SMALL = 800, MAX = 1 << 28 };

static Error err;

static Tokenizer *open_golden(void) {
    Tokenizer *tokenizer = tokenizer_open(GOLDEN, VOCAB, &err);
    if (!tokenizer) CU_FAIL_FATAL(err.text);
    return tokenizer;
}

static int encode(const Tokenizer *tokenizer, const char *text, size_t len, int32_t **ids) {
    int n = tokenizer_encode(tokenizer, text, len, ids, &err);
    if (n < 0) CU_FAIL_FATAL(err.text);
    return n;
}

/* One line for a person: no second line, and each of the words is in it. */
static void assert_message(const char *const *words) {
    CU_ASSERT_EQUAL(err.code, EXIT_FAILED);
    CU_ASSERT_PTR_NULL(strchr(err.text, '\n'));
    CU_ASSERT(utf8_valid(err.text, strlen(err.text)));
    for (; *words; words++) {
        if (!strstr(err.text, *words)) fprintf(stderr, "\n    no \"%s\" in: %s\n", *words, err.text);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.text, *words));
    }
}
#define ASSERT_MESSAGE(...) assert_message((const char *const[]){__VA_ARGS__, NULL})

// ---------------------------------------------------------------------------------------------------------------
// Good input
// ---------------------------------------------------------------------------------------------------------------

/* The text of a golden line; a NUL cannot stand in our JSON, so such texts are in hex. */
static char *golden_text(const cJSON *line, size_t *len) {
    const cJSON *text = cJSON_GetObjectItemCaseSensitive(line, "text"),
                *hex = cJSON_GetObjectItemCaseSensitive(line, "hex");
    if (text) {
        *len = strlen(text->valuestring);
        return xstrdup(text->valuestring);
    }
    *len = strlen(hex->valuestring) / 2;
    char *bytes = (char *)xcalloc(*len + 1, 1);
    for (size_t i = 0; i < *len; i++) {
        unsigned value;
        CU_ASSERT_EQUAL_FATAL(sscanf(hex->valuestring + 2 * i, "%2x", &value), 1);
        bytes[i] = (char)value;
    }
    return bytes;
}

/* Whether text is split into words of so many bytes, which are all of it. */
static bool split_equal(const char *text, size_t len, const cJSON *words) {
    size_t at = 0, end;
    for (const cJSON *word = words->child; word; word = word->next, at = end) {
        end = at + (size_t)word->valueint;
        if (end > len || tokenizer_word_end(text, len, at) != end) return false;
    }
    return at == len;
}

static bool golden_line_equal(const Tokenizer *tokenizer, const cJSON *line) {
    size_t len, back_len;
    char *text = golden_text(line, &len);
    int32_t *ids;
    int n = encode(tokenizer, text, len, &ids);
    const cJSON *golden = cJSON_GetObjectItemCaseSensitive(line, "ids");
    bool same = n == cJSON_GetArraySize(golden) && split_equal(text, len, cJSON_GetObjectItemCaseSensitive(line, "words"));
    const cJSON *id = golden->child;
    for (int i = 0; same && i < n; i++, id = id->next) same = ids[i] == id->valueint;
    char *back = tokenizer_decode(tokenizer, ids, n, &back_len);
    same = same && back_len == len && memcmp(back, text, len) == 0;
    if (!same) fprintf(stderr, "\n    differs: \"%.*s\"\n", (int)len, text);
    free(back);
    free(ids);
    free(text);
    return same;
}

static void ids_equal_hugging_face(void) {
    const char *base = getenv("TOKENIZER_GOLDEN");
    char path[500];
    size_t len;
    Tokenizer *tokenizer = tokenizer_open(base ? base : GOLDEN, base ? 50272 : VOCAB, &err);
    if (!tokenizer) CU_FAIL_FATAL(err.text);
    snprintf(path, sizeof path, "%s.jsonl", base ? base : GOLDEN);
    char *text = file_read(path, MAX, &len, &err);
    if (!text) CU_FAIL_FATAL(err.text);
    int lines = 0, different = 0;
    for (char *line = text, *end; (end = memchr(line, '\n', (size_t)(text + len - line))); line = end + 1, lines++) {
        cJSON *golden = json_parse(line, (size_t)(end - line), &err);
        if (!golden) CU_FAIL_FATAL(err.text);
        different += !golden_line_equal(tokenizer, golden);
        cJSON_Delete(golden);
    }
    if (base) fprintf(stderr, "%d of %d lines differ ... ", different, lines);
    CU_ASSERT_EQUAL(different, 0);
    CU_ASSERT(lines >= 300);
    free(text);
    tokenizer_close(tokenizer);
}

static int put_utf8(char *out, uint32_t c) {
    if (c < 0x80) return out[0] = (char)c, 1;
    int n = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (int i = n - 1; i > 0; i--, c >>= 6) out[i] = (char)(0x80 | (c & 0x3F));
    out[0] = (char)(0xF00 >> n | c);
    return n;
}

static uint32_t random_below(uint64_t *state, uint32_t n) { return (uint32_t)((test_random(state) + 1.0) / 2 * n); }

static void decoding_undoes_encoding_on_random_text(void) {
    static const uint32_t below[] = {0x80, 0x80, 0x300, 0x3100, 0x10000, 0x110000};
    Tokenizer *tokenizer = open_golden();
    uint64_t state = 7;
    for (int round = 0; round < 3000; round++) {
        char text[4 * 64];
        size_t len = 0, back_len;
        for (uint32_t i = 0, n = random_below(&state, 64), kind = random_below(&state, 6); i < n; i++) {
            uint32_t c = random_below(&state, below[kind]);
            len += (size_t)put_utf8(text + len, c >= 0xD800 && c < 0xE000 ? ' ' : c);
        }
        CU_ASSERT_FATAL(utf8_valid(text, len));
        int32_t *ids;
        int n = encode(tokenizer, text, len, &ids);
        char *back = tokenizer_decode(tokenizer, ids, n, &back_len);
        CU_ASSERT(back_len == len && memcmp(back, text, len) == 0 && back[back_len] == 0);
        free(back);
        free(ids);
    }
    tokenizer_close(tokenizer);
}

static void words_end_where_gpt2s_pattern_ends_them(void) {
    static const char *const cases[][8] = {
        {" \n", " x"},
        {"\n", "x"},
        {"  ", " x"},
        {"\n", "\n", "x"},
        {"x", "  "},
        {" "},
        {" \t\xC2\x85", "\u00a0", "1"},
        {"\u3000", "\u3000", "x"},
        {"a", "\r", "\n", "b", "\t\r\n"},
        {" \u180e", "x", "\u200b", "y"}, /* neither is a blank */
        {" 12", "ab", "!?", "½Ⅷ", "狐", " 狐"},
        {"it", "'s", "we", "'re", "I", "'ve", " I"},
        {"'t", "'m", "'ll", "'d", "'", "la"},
        {"IT", "'", "S"}, /* contractions are of small letters */
        {" '", "s", " '"},
        {"!'", "s", "'", "r"},
        {"'s", "s"},
        {"a", "\u0301", "a"},          /* a combining mark is no letter */
        {"\u1c89\U000105c0", "!"},     /* letters since Unicode 16 */
        {"a", "\U000323b0\U000323b0"}, /* letters since Unicode 17: not yet */
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        char text[100] = "";
        for (int p = 0; p < 8 && cases[c][p]; p++) strcat(text, cases[c][p]);
        size_t at = 0;
        for (int p = 0; p < 8 && cases[c][p]; p++) {
            size_t end = tokenizer_word_end(text, strlen(text), at);
            if (end - at != strlen(cases[c][p])) fprintf(stderr, "\n    %.*s ", (int)(end - at), text + at);
            CU_ASSERT_EQUAL(end - at, strlen(cases[c][p]));
            at = end;
        }
        CU_ASSERT_EQUAL(at, strlen(text));
    }
}

/* A character makes one word with what is of its own kind. The digest is scripts/make_unicode.py's, which splits the same
 * texts with Hugging Face `tokenizers`. */
static void every_character_is_of_the_kind_that_hugging_face_knows(void) {
    static const char kinds[] = "LNSO", examples[] = "a1\n!";
    uint64_t digest = 0xCBF29CE484222325u;
    int unclear = 0;
    for (uint32_t c = 0; c < 0x110000; c++) {
        if (c == 0xD800) c = 0xE000; /* surrogates are no characters */
        char text[5], kind = 0;
        size_t len = 1 + (size_t)put_utf8(text + 1, c);
        for (int i = 0; i < 4; i++) {
            text[0] = examples[i];
            if (tokenizer_word_end(text, len, 0) < len) continue;
            unclear += kind != 0;
            kind = kinds[i];
        }
        unclear += kind == 0 || kind != char_kind(c);
        digest = (digest ^ (unsigned char)kind) * 0x100000001B3u;
    }
    CU_ASSERT_EQUAL(unclear, 0);
    CU_ASSERT_EQUAL(digest, 0x32D2DD0AB9AC2C0Au);
}

static void a_special_piece_written_as_text_is_ordinary_text(void) {
    static const char text[] = "a</s><s><pad><unk>";
    Tokenizer *tokenizer = open_golden();
    int32_t *ids;
    int n = encode(tokenizer, text, strlen(text), &ids);
    for (int i = 0; i < n; i++) CU_ASSERT(ids[i] > 3);
    size_t len;
    char *back = tokenizer_decode(tokenizer, ids, n, &len);
    CU_ASSERT_STRING_EQUAL(back, text);
    free(back);
    free(ids);
    tokenizer_close(tokenizer);
}

static void nothing_in_gives_nothing_out(void) {
    Tokenizer *tokenizer = open_golden();
    int32_t *ids;
    size_t len = 9;
    CU_ASSERT_EQUAL(encode(tokenizer, "", 0, &ids), 0);
    CU_ASSERT_PTR_NOT_NULL(ids);
    char *text = tokenizer_decode(tokenizer, ids, 0, &len);
    CU_ASSERT(len == 0 && text[0] == 0);
    free(text);
    free(ids);
    tokenizer_close(tokenizer);
}

static void specials_gaps_and_foreign_ids_decode_to_nothing(void) {
    Tokenizer *tokenizer = open_golden();
    int32_t *word, ids[] = {2, 0, -1, GAP, 0 /* the word */, VOCAB, INT32_MAX, INT32_MIN, 1, 3, 2};
    CU_ASSERT_EQUAL_FATAL(encode(tokenizer, "a", 1, &word), 1);
    ids[4] = word[0];
    size_t len;
    char *text = tokenizer_decode(tokenizer, ids, (int)(sizeof ids / sizeof *ids), &len);
    CU_ASSERT_STRING_EQUAL(text, "a");
    CU_ASSERT_EQUAL(len, 1);
    free(text);
    free(word);
    tokenizer_close(tokenizer);
}

/* Ids of single bytes, as a model may give them: the pieces of one byte are found by encoding in a vocabulary without
 * merges. */
static Tokenizer *open_bytes_only(void);

static void assert_decodes(const Tokenizer *tokenizer, const char *bytes, size_t n, const char *expected) {
    int32_t ids[64];
    size_t len;
    for (size_t i = 0; i < n; i++) ids[i] = 4 + (unsigned char)bytes[i];
    char *text = tokenizer_decode(tokenizer, ids, (int)n, &len);
    CU_ASSERT_STRING_EQUAL(text, expected);
    CU_ASSERT_EQUAL(len, strlen(expected));
    CU_ASSERT(utf8_valid(text, len));
    free(text);
}
#define ASSERT_DECODES(bytes, expected) assert_decodes(tokenizer, bytes, sizeof bytes - 1, expected)

static void a_character_split_between_pieces_decodes_whole(void) {
    Tokenizer *tokenizer = open_bytes_only();
    int32_t *ids;
    int n = encode(tokenizer, "é狐🦊", 9, &ids);
    CU_ASSERT_EQUAL(n, 9);
    for (int i = 0; i < n; i++) CU_ASSERT_EQUAL(ids[i], 4 + (unsigned char)"é狐🦊"[i]);
    free(ids);
    ASSERT_DECODES("é狐🦊", "é狐🦊");
    ASSERT_DECODES("🦊\xF0\x9F\xA6", "🦊\uFFFD"); /* the end has not come yet */
    tokenizer_close(tokenizer);
}

static void invalid_bytes_decode_as_python_replaces_them(void) {
    Tokenizer *tokenizer = open_bytes_only();
    ASSERT_DECODES("a\x80z", "a\uFFFDz");
    ASSERT_DECODES("\xC0\xAF", "\uFFFD\uFFFD");           /* overlong */
    ASSERT_DECODES("\xE0\x80\xAF", "\uFFFD\uFFFD\uFFFD"); /* overlong: E0 alone starts nothing */
    ASSERT_DECODES("\xED\xA0\x80", "\uFFFD\uFFFD\uFFFD"); /* a surrogate */
    ASSERT_DECODES("\xF4\x90\x80\x80", "\uFFFD\uFFFD\uFFFD\uFFFD");
    ASSERT_DECODES("\xF0\x80\x80\x80", "\uFFFD\uFFFD\uFFFD\uFFFD");
    ASSERT_DECODES("\xF5\xFF", "\uFFFD\uFFFD");
    ASSERT_DECODES(
        "\xE7\x8B"
        "x\xF0\x9F"
        "y",
        "\uFFFDx\uFFFDy"); /* one for each start that is broken off */
    ASSERT_DECODES("\xE7\x8B\xE7\x8B\x90", "\uFFFD狐");
    tokenizer_close(tokenizer);
}

/* With a quadratic encoder this test does not end in reasonable time, and with a pattern that backtracks it fails. */
static void a_word_of_a_megabyte_is_encoded(void) {
    static const char *fills[] = {"a", " ", "the", "9", "!?", "狐", "\u0301", "\n"};
    enum { LEN = 1 << 20 };
    Tokenizer *tokenizer = open_golden();
    char *text = (char *)xcalloc(LEN + 8, 1);
    for (size_t f = 0; f < sizeof fills / sizeof *fills; f++) {
        size_t len = 0, step = strlen(fills[f]), back_len;
        for (; len + step <= LEN; len += step) memcpy(text + len, fills[f], step);
        text[len++] = 'x';
        int32_t *ids;
        int n = encode(tokenizer, text, len, &ids);
        char *back = tokenizer_decode(tokenizer, ids, n, &back_len);
        CU_ASSERT(back_len == len && memcmp(back, text, len) == 0);
        free(back);
        free(ids);
    }
    free(text);
    tokenizer_close(tokenizer);
}

static void invalid_text_is_refused(void) {
    Tokenizer *tokenizer = open_golden();
    int32_t *ids = (int32_t *)tokenizer;
    CU_ASSERT_EQUAL(tokenizer_encode(tokenizer, "ab\xC3", 3, &ids, &err), -1);
    CU_ASSERT_PTR_NULL(ids);
    ASSERT_MESSAGE("byte 2", "0xC3", "UTF-8");
    CU_ASSERT_EQUAL(tokenizer_encode(tokenizer, "\xED\xA0\x80", 3, &ids, &err), -1);
    ASSERT_MESSAGE("byte 0", "0xED");
    tokenizer_close(tokenizer);
}

// ---------------------------------------------------------------------------------------------------------------
// Bad files
// ---------------------------------------------------------------------------------------------------------------

/* A small vocabulary as text: the specials, byte b as id 4 + b, "ab" and "abc"; `more` goes before the closing brace, and
 * the entry of byte `without` is left out. */
static char *small_vocab(const char *more, int without) {
    char *json = (char *)xcalloc(16384, 1), *at = json;
    at += sprintf(at, "{\"<s>\":0,\"<pad>\":1,\"</s>\":2,\"<unk>\":3,\"ab\":300,\"abc\":301");
    for (int b = 0, next = 256; b < 256; b++) {
        bool printable = (b > 32 && b < 127) || (b > 160 && b != 173);
        int symbol = printable ? b : next++;
        if (b != without) at += sprintf(at, ",\"\\u%04x\":%d", (unsigned)symbol, 4 + b);
    }
    sprintf(at, "%s}\n", more);
    return json;
}

/* The same without "ab" and "abc". */
static char *bytes_vocab(void) {
    static const char several[] = ",\"ab\":300,\"abc\":301";
    char *vocab = small_vocab("", -1);
    memset(strstr(vocab, several), ' ', sizeof several - 1);
    return vocab;
}

static Tokenizer *open_text(const char *vocab, const char *merges, size_t merges_len) {
    const char *dir = temp_dir();
    memset(&err, 0, sizeof err);
    if (vocab) write_file(dir, "vocab.json", vocab, strlen(vocab));
    if (merges) write_file(dir, "merges.txt", merges, merges_len);
    return tokenizer_open(dir, SMALL, &err);
}

static Tokenizer *open_bytes_only(void) {
    char *vocab = bytes_vocab();
    Tokenizer *tokenizer = open_text(vocab, "#version: 0.2\n", 14);
    if (!tokenizer) CU_FAIL_FATAL(err.text);
    free(vocab);
    return tokenizer;
}

static void refuse_vocab(const char *vocab) {
    Tokenizer *tokenizer = open_text(vocab, "a b\n", 4);
    CU_ASSERT_PTR_NULL(tokenizer);
    tokenizer_close(tokenizer);
}

static void refuse_entry(const char *more) {
    char *vocab = small_vocab(more, -1);
    refuse_vocab(vocab);
    free(vocab);
}

static void refuse_merges_bytes(const char *merges, size_t len) {
    char *vocab = small_vocab("", -1);
    Tokenizer *tokenizer = open_text(vocab, merges, len);
    CU_ASSERT_PTR_NULL(tokenizer);
    tokenizer_close(tokenizer);
    free(vocab);
}
#define REFUSE_MERGES(merges) refuse_merges_bytes(merges, sizeof merges - 1)

static void a_missing_file_is_named(void) {
    refuse_vocab(NULL);
    ASSERT_MESSAGE("vocab.json");
    refuse_merges_bytes(NULL, 0);
    ASSERT_MESSAGE("merges.txt");
}

static void a_vocabulary_that_is_no_json_object_is_refused(void) {
    static const char *bad[] = {"", "[1]", "3", "null", "{\"<s>\":0,\"<pa", "{} {}", "{\"a\":1,\"a\":2}", "{\"\xC3\":1}"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        refuse_vocab(bad[i]);
        ASSERT_MESSAGE("vocab.json");
    }
}

static void a_bad_id_is_refused(void) {
    static const char *bad[] = {"-1", "2.5", "800", "1e30", "-1e300"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char entry[64];
        snprintf(entry, sizeof entry, ",\"abcd\":%s", bad[i]);
        refuse_entry(entry);
        ASSERT_MESSAGE("vocab.json", "\"abcd\"", "0 to 799");
    }
    refuse_entry(",\"abcd\":\"7\"");
    ASSERT_MESSAGE("vocab.json", "\"abcd\"", "is \"7\", expected a whole number from 0 to 799");
    refuse_entry(",\"abcd\":null");
    ASSERT_MESSAGE("vocab.json", "\"abcd\"", "is null, expected a whole number from 0 to 799");
}

static void two_pieces_with_one_id_are_refused(void) {
    refuse_entry(",\"abcd\":301");
    ASSERT_MESSAGE("vocab.json", "\"abc\"", "\"abcd\"", "301");
}

static void a_missing_byte_is_refused(void) {
    static const int bytes[] = {0, ' ', 'A', 173, 255};
    for (size_t i = 0; i < sizeof bytes / sizeof *bytes; i++) {
        char hex[8], *vocab = small_vocab("", bytes[i]);
        snprintf(hex, sizeof hex, "0x%02X", (unsigned)bytes[i]);
        refuse_vocab(vocab);
        ASSERT_MESSAGE("vocab.json", hex);
        free(vocab);
    }
}

static void a_vocabulary_without_the_end_piece_is_refused(void) {
    char *vocab = small_vocab("", -1);
    memcpy(strstr(vocab, "</s>"), "<#s>", 4);
    refuse_vocab(vocab);
    ASSERT_MESSAGE("vocab.json", "</s>");
    free(vocab);
}

static void merges_of_unknown_pieces_are_refused(void) {
    REFUSE_MERGES("#version: 0.2\na b\nqq c\n");
    ASSERT_MESSAGE("merges.txt line 3", "\"qq\"", "vocab.json");
    REFUSE_MERGES("a b\nc qq\n");
    ASSERT_MESSAGE("merges.txt line 2", "\"qq\"", "vocab.json");
    REFUSE_MERGES("a b\nab d");
    ASSERT_MESSAGE("merges.txt line 2", "\"abd\"", "vocab.json");
}

static void merges_lines_without_two_pieces_are_refused(void) {
    static const char *bad[] = {"ab\n", " b\n", "a \n", "a b c\n", "a  b\n", "\n", "\na b\n", " \n"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        refuse_merges_bytes(bad[i], strlen(bad[i]));
        ASSERT_MESSAGE("merges.txt line 1", "two pieces");
    }
    REFUSE_MERGES("a b\nab\0 c\n");
    ASSERT_MESSAGE("merges.txt line 2");
    REFUSE_MERGES("a b\n#version\n"); /* which only the first line may be */
    ASSERT_MESSAGE("merges.txt line 2", "#version", "two pieces");
}

static void a_merge_that_stands_twice_is_refused(void) {
    REFUSE_MERGES("a b\nab c\na b\n");
    ASSERT_MESSAGE("merges.txt line 3", "\"ab\"", "once");
}

static void a_merge_that_makes_a_special_piece_is_refused(void) {
    char *vocab = small_vocab(",\"<s\":302", -1);
    CU_ASSERT_PTR_NULL(open_text(vocab, "< s\n<s >\n", 9));
    ASSERT_MESSAGE("merges.txt line 2", "\"<s>\"", "special");
    free(vocab);
}

/* Without merges every text would fall into bytes. Where all pieces are bytes, that is right. */
static void no_merges_are_refused_unless_all_pieces_are_bytes(void) {
    static const char *const none[] = {"", "#version: 0.2\n", "#version: 0.2"};
    char *several = small_vocab("", -1), *bytes = bytes_vocab();
    for (int i = 0; i < 3; i++) {
        CU_ASSERT_PTR_NULL(open_text(several, none[i], strlen(none[i])));
        ASSERT_MESSAGE("merges.txt", "no merges", "vocab.json");
        Tokenizer *tokenizer = open_text(bytes, none[i], strlen(none[i]));
        CU_ASSERT_PTR_NOT_NULL(tokenizer);
        tokenizer_close(tokenizer);
    }
    free(several), free(bytes);
}

static void merges_that_are_no_utf8_are_refused(void) {
    REFUSE_MERGES("a b\na \xE7\x8B\n");
    ASSERT_MESSAGE("merges.txt line 2", "byte 2", "UTF-8");
}

static void a_long_name_does_not_spoil_the_message(void) {
    char line[5000] = "a x"; /* the cut must not fall inside an é */
    for (size_t i = 3; i < 4903; i += 2) memcpy(line + i, "é", 2);
    refuse_merges_bytes(line, 4903);
    ASSERT_MESSAGE("merges.txt line 1", "é", "same model");
    CU_ASSERT(strlen(err.text) < 600);
}

static int count_ids(const Tokenizer *tokenizer, const char *text) {
    int32_t *ids;
    int n = encode(tokenizer, text, strlen(text), &ids);
    free(ids);
    return n;
}

/* Each join of a and b makes two new pairs that can be joined, the most there can be, and the word before makes the room
 * for this one exactly as large as it must be. */
static void the_heap_has_room_for_the_pairs_that_joins_make(void) {
    static const char merges[] = "a b\nb a\nab a\nab ab\n";
    char *vocab = small_vocab(",\"ba\":302,\"aba\":303,\"abab\":304", -1);
    Tokenizer *tokenizer = open_text(vocab, merges, strlen(merges));
    if (!tokenizer) CU_FAIL_FATAL(err.text);
    CU_ASSERT_EQUAL(count_ids(tokenizer, "12345678abababababababab"), 8 + 4);
    tokenizer_close(tokenizer);
    free(vocab);
}

/* Where the hash of a piece is of its first characters only, this test does not end in reasonable time. */
static void many_pieces_that_begin_alike_are_found_fast(void) {
    enum { MANY = 200000 };
    const char *dir = temp_dir();
    char *vocab = small_vocab("", -1), *json = (char *)xcalloc(MANY, 32), *at = json + strlen(vocab) - 2; /* its "}\n" */
    strcpy(json, vocab);
    for (int i = 0; i < MANY; i++) at += sprintf(at, ",\"a_long_prefix%d\":%d", i, SMALL + i);
    strcpy(at, "}");
    write_file(dir, "vocab.json", json, strlen(json));
    write_file(dir, "merges.txt", "a b\n", 4);
    Tokenizer *tokenizer = tokenizer_open(dir, SMALL + MANY, &err);
    if (!tokenizer) CU_FAIL_FATAL(err.text);
    CU_ASSERT_EQUAL(count_ids(tokenizer, "cab"), 2);
    tokenizer_close(tokenizer);
    free(json);
    free(vocab);
}

/* Of three equal pieces the first two are joined: GPT-2 looks for the best pair from the left. */
static void equal_pairs_are_joined_from_the_left(void) {
    static const struct {
        const char *text, *pieces[3];
    } cases[] = {{"ooo", {"oo", "o"}}, {"///", {"//", "/"}}, {"ooooo", {"oo", "oo", "o"}}};
    Tokenizer *tokenizer = open_golden();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int32_t *ids;
        int n = encode(tokenizer, cases[i].text, strlen(cases[i].text), &ids);
        for (int p = 0; p < n && p < 3; p++) {
            size_t len;
            char *piece = tokenizer_decode(tokenizer, ids + p, 1, &len);
            CU_ASSERT_STRING_EQUAL(piece, cases[i].pieces[p] ? cases[i].pieces[p] : "no more");
            free(piece);
        }
        CU_ASSERT_EQUAL(n, cases[i].pieces[2] ? 3 : 2);
        free(ids);
    }
    tokenizer_close(tokenizer);
}

static void windows_line_ends_and_a_missing_last_one_are_accepted(void) {
    static const char *good[] = {"#version: 0.2\r\na b\r\nab c\r\n", "a b\nab c", "#version: 0.2\na b\nab c\n"};
    char *vocab = small_vocab("", -1);
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        Tokenizer *tokenizer = open_text(vocab, good[i], strlen(good[i]));
        if (!tokenizer) CU_FAIL_FATAL(err.text);
        int32_t *ids;
        CU_ASSERT_EQUAL(encode(tokenizer, "abcab", 5, &ids), 2);
        CU_ASSERT(ids[0] == 301 && ids[1] == 300);
        free(ids);
        tokenizer_close(tokenizer);
    }
    free(vocab);
}

static void a_piece_that_is_no_byte_symbols_decodes_to_its_text(void) {
    char *vocab = small_vocab(",\"狐 \":302,\"\":303", -1);
    Tokenizer *tokenizer = open_text(vocab, "a b\n", 4);
    if (!tokenizer) CU_FAIL_FATAL(err.text);
    size_t len;
    char *text = tokenizer_decode(tokenizer, (int32_t[]){302, 303, 300}, 3, &len);
    CU_ASSERT_STRING_EQUAL(text, "狐 ab");
    free(text);
    tokenizer_close(tokenizer);
    free(vocab);
}

CU_TestInfo tests[] = {
    {"ids equal Hugging Face", ids_equal_hugging_face},
    {"decoding undoes encoding on random text", decoding_undoes_encoding_on_random_text},
    {"words end where GPT-2's pattern ends them", words_end_where_gpt2s_pattern_ends_them},
    {"every character is of the kind that Hugging Face knows", every_character_is_of_the_kind_that_hugging_face_knows},
    {"a special piece written as text is ordinary text", a_special_piece_written_as_text_is_ordinary_text},
    {"nothing in gives nothing out", nothing_in_gives_nothing_out},
    {"specials, gaps and foreign ids decode to nothing", specials_gaps_and_foreign_ids_decode_to_nothing},
    {"a character split between pieces decodes whole", a_character_split_between_pieces_decodes_whole},
    {"invalid bytes decode as Python replaces them", invalid_bytes_decode_as_python_replaces_them},
    {"a word of a megabyte is encoded", a_word_of_a_megabyte_is_encoded},
    {"invalid text is refused", invalid_text_is_refused},
    {"a missing file is named", a_missing_file_is_named},
    {"a vocabulary that is no JSON object is refused", a_vocabulary_that_is_no_json_object_is_refused},
    {"a bad id is refused", a_bad_id_is_refused},
    {"two pieces with one id are refused", two_pieces_with_one_id_are_refused},
    {"a missing byte is refused", a_missing_byte_is_refused},
    {"a vocabulary without the end piece is refused", a_vocabulary_without_the_end_piece_is_refused},
    {"merges of unknown pieces are refused", merges_of_unknown_pieces_are_refused},
    {"merges lines without two pieces are refused", merges_lines_without_two_pieces_are_refused},
    {"a merge that stands twice is refused", a_merge_that_stands_twice_is_refused},
    {"a merge that makes a special piece is refused", a_merge_that_makes_a_special_piece_is_refused},
    {"no merges are refused, unless all pieces are bytes", no_merges_are_refused_unless_all_pieces_are_bytes},
    {"merges that are no UTF-8 are refused", merges_that_are_no_utf8_are_refused},
    {"a long name does not spoil the message", a_long_name_does_not_spoil_the_message},
    {"Windows line ends and a missing last one are accepted", windows_line_ends_and_a_missing_last_one_are_accepted},
    {"a piece that is no byte symbols decodes to its text", a_piece_that_is_no_byte_symbols_decodes_to_its_text},
    {"many pieces that begin alike are found fast", many_pieces_that_begin_alike_are_found_fast},
    {"the heap has room for the pairs that joins make", the_heap_has_room_for_the_pairs_that_joins_make},
    {"equal pairs are joined from the left", equal_pairs_are_joined_from_the_left},
    CU_TEST_INFO_NULL,
};
