/* test_tokenizer.c: the tokenizer against golden ids of Hugging Face, against itself (round trips), and against bad files.
 * scripts/make_tokenizer_golden.py made tests/golden/tokenizer* and tests/golden/forms; with TOKENIZER_GOLDEN=BASE in the
 * environment the golden test reads BASE.jsonl and BASE/ instead, which is how a large comparison is run. What is no JSON
 * is test_json.c's. */

#include <limits.h>
#include <time.h>
#include <unistd.h>

#include "app/app.h"
#include "tests.h"
#include "written.h"

#define GOLDEN "tests/golden/tokenizer"
#define VOCAB_FILE "vocab.json"
#define MERGES_FILE "merges.txt"
enum { VOCAB = 1024, GAP = 310, SMALL = 800, LARGE = 1 << 20 };

static Error err;

static Tokenizer *tokenizer; /* the newest that has been opened */

/* Opens a tokenizer, and closes the one before. */
static void open_in(const char *dir, int vocab) {
    tokenizer_close(tokenizer);
    tokenizer = tokenizer_open(dir, vocab, &err);
    ASSERT_OK(!tokenizer);
}

static int encode(const char *text, size_t len, int32_t **ids) {
    const int n = tokenizer_encode(tokenizer, text, len, ids, &err);
    CU_ASSERT_FATAL(n >= 0);
    return n;
}

/* Returns true if a text is the same when it has been encoded and decoded. */
static bool comes_back(const char *text, size_t len) {
    int32_t *ids;
    size_t back_len;
    const int n = encode(text, len, &ids);
    char *back = tokenizer_decode(tokenizer, ids, n, &back_len);
    const bool same = back_len == len && !memcmp(back, text, len) && !back[len];
    free(back), free(ids);
    return same;
}

static void decodes(const int32_t *ids, int n, const char *expected) {
    size_t len = 9;
    char *text = tokenizer_decode(tokenizer, ids, n, &len);
    CU_ASSERT_STRING_EQUAL(text, expected);
    CU_ASSERT_EQUAL(len, strlen(expected));
    free(text);
}

// ---- A small vocabulary ---------------------------------------------------------------------------------------------

#define PIECES ",\"ab\":300,\"abc\":301,\"he\":302,\"in\":303,\"on\":304"

/* The specials, byte b as id 4 + b, and more pieces. */
static const char *write_small(const char *more, const char *merges) {
    const char *dir = temp_dir();
    FILE *f = fopen(in_dir(dir, VOCAB_FILE), "w");
    fprintf(f, "{\"<s>\":0,\"<pad>\":1,\"</s>\":2,\"<unk>\":3%s", more);
    for (int b = 0, next = 256; b < 256; b++) {
        const bool printable = (b > 32 && b < 127) || (b > 160 && b != 173);
        fprintf(f, ",\"\\u%04x\":%d", (unsigned)(printable ? b : next++), 4 + b);
    }
    fputs("}", f);
    CHECK(fclose(f) == 0);
    write_file(dir, MERGES_FILE, merges, strlen(merges));
    return dir;
}

static void open_small(const char *more, const char *merges) { open_in(write_small(more, merges), LARGE); }

// ---- Good input -----------------------------------------------------------------------------------------------------

/* And the words, which are all of a text, have the bytes of the golden ones. A NUL cannot stand in our JSON, so texts with
 * one are in hex. */
TEST(ids_equal_hugging_face) {
    const char *given = getenv("TOKENIZER_GOLDEN"), *base = given ? given : GOLDEN;
    char path[500];
    int different = 0;
    open_in(base, given ? 50272 : VOCAB);
    snprintf(path, sizeof path, "%s.jsonl", base);
    Lines lines;
    ASSERT_OK(lines_open(&lines, path, &err));
    while (line_next(&lines, &err) > 0) {
        cJSON *line = line_parse(&lines, "\"ids\" \"text\" \"hex\" \"words\"", &err);
        const cJSON *golden = json_get(line, "ids"), *id = golden->child, *hex = json_get(line, "hex");
        char *text = xstrdup((hex ? hex : json_get(line, "text"))->valuestring);
        const size_t len = strlen(text) / (hex ? 2 : 1);
        for (size_t i = 0; hex && i < len; i++) sscanf(hex->valuestring + 2 * i, "%2hhx", (unsigned char *)text + i);
        size_t at = 0;
        int32_t *ids;
        const int n = encode(text, len, &ids);
        bool special = strstr(text, "</s>") || strstr(text, "<pad>"); /* they do not come back */
        bool same = n == cJSON_GetArraySize(golden) && (special || comes_back(text, len));
        for (int i = 0; same && i < n; i++, id = id->next) same = ids[i] == id->valueint;
        for (const cJSON *word = json_get(line, "words")->child; word && same; word = word->next) {
            const size_t end = at + (size_t)word->valueint;
            same = end <= len && tokenizer_word_end(text, len, at) == end;
            at = end;
        }
        same = same && at == len;
        if (!same) fprintf(stderr, "\n    differs: \"%.*s\"\n", (int)len, text);
        different += !same;
        free(ids), free(text), cJSON_Delete(line);
    }
    if (given) fprintf(stderr, "%d of %d lines differ ... ", different, lines.number);
    CU_ASSERT_EQUAL(different, 0);
    CU_ASSERT(lines.number >= 300);
    lines_close(&lines);
}

/* Returns true if `list` has these ids. */
static bool has_ids(const cJSON *list, const int32_t *ids, int n) {
    bool same = cJSON_GetArraySize(list) == n;
    for (int i = 0; same && i < n; i++) same = cJSON_GetArrayItem(list, i)->valueint == ids[i];
    return same;
}

/* Directories that transformers 4 and 5 have saved, older ones, and such as the user has changed: with more tokens, with
 * another token in front or none, with several tokens that end a text or an ordinary one. */
TEST(directories_are_read_as_hugging_face_reads_them) {
    static const char *const forms[] = {"published",       "saved-4", "saved-5", "grown-4", "grown-5",  "slow-4",
                                        "legacy",          "bos-4",   "bos-5",   "no-bos",  "no-bos-5", "merges-as-strings",
                                        "two-vocabularies"};
    int prompts = 0;
    for (size_t i = 0; i < COUNT(forms); i++) {
        char dir[100], path[120];
        OptConfig c;
        bool tied;
        snprintf(dir, sizeof dir, "tests/golden/forms/%s", forms[i]);
        snprintf(path, sizeof path, "%s/golden.jsonl", dir);
        ASSERT_OK(config_read(&c, &tied, dir, &err));
        open_in(dir, c.vocab);
        Lines lines;
        ASSERT_OK(lines_open(&lines, path, &err));
        for (; line_next(&lines, &err) > 0; prompts++) {
            cJSON *line = json_parse(lines.line, lines.size, &err);
            const cJSON *text = json_get(line, "text"), *eos = json_get(line, "eos");
            if (eos) {
                int32_t ends[8] = {c.eos};
                memcpy(ends + 1, c.more_eos, sizeof c.more_eos);
                CU_ASSERT(has_ids(eos, ends, 1 + c.nmore));
                cJSON_Delete(line);
                continue;
            }
            int32_t *ids;
            const int n = text_encode(&ids, text->valuestring, strlen(text->valuestring), tokenizer, &err);
            const bool same = has_ids(json_get(line, "ids"), ids, n);
            if (!same) fprintf(stderr, "\n    %s differs: \"%s\"\n", dir, text->valuestring);
            CU_ASSERT(same);
            decodes(ids, n, json_get(line, "back")->valuestring);
            free(ids), cJSON_Delete(line);
        }
        lines_close(&lines);
    }
    CU_ASSERT_EQUAL(prompts, 31 * (int)COUNT(forms));
}

static size_t put_utf8(char *out, uint32_t c) {
    const int n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (int i = n - 1; i > 0; i--, c >>= 6) out[i] = (char)(0x80 | (c & 0x3F));
    out[0] = (char)((n > 1 ? 0xF00 >> n : 0) | c);
    return (size_t)n;
}

TEST(decoding_undoes_encoding_on_random_text) {
    static const int below[] = {0x80, 0x80, 0x300, 0x3100, 0x10000, 0x110000};
    open_in(GOLDEN, VOCAB);
    uint64_t state = 7;
    for (int round = 0; round < 3000; round++) {
        char text[4 * 64];
        size_t len = 0;
        for (int n = test_below(&state, 64), kind = test_below(&state, 6); n > 0; n--) {
            const uint32_t c = (uint32_t)test_below(&state, below[kind]);
            len += put_utf8(text + len, c >= 0xD800 && c < 0xE000 ? ' ' : c);
        }
        CU_ASSERT(utf8_valid(text, len) && comes_back(text, len));
    }
}

/* Each word with a bar behind it. */
TEST(words_end_where_gpt2s_pattern_ends_them) {
    static const char *const cases[] = {
        " \n| x|",
        "\n|x|",
        "  | x|",
        "\n|\n|x|",
        "x|  |",
        " |",
        " \t\xC2\x85|\u00a0|1|",
        "\u3000|\u3000|x|",
        "a|\r|\n|b|\t\r\n|",
        " \u180e|x|\u200b|y|", /* neither is a blank */
        " 12|ab|!?|½Ⅷ|狐| 狐|",
        "it|'s|we|'re|I|'ve| I|",
        "'t|'m|'ll|'d|'|la|",
        "IT|'|S|", /* contractions are of small letters */
        " '|s| '|",
        "!'|s|'|r|",
        "'s|s|",
        "a|\u0301|a|",             /* a combining mark is no letter */
        "\u1c89\U000105c0|!|",     /* letters since Unicode 16 */
        "a|\U000323b0\U000323b0|", /* letters since Unicode 17: not yet */
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        char text[100] = "", split[100] = "", *to = text;
        for (const char *c = cases[i]; *c; c++)
            if (*c != '|') *to++ = *c;
        for (size_t at = 0, end, len = strlen(text); at < len; at = end) {
            end = tokenizer_word_end(text, len, at);
            sprintf(split + strlen(split), "%.*s|", (int)(end - at), text + at);
        }
        CU_ASSERT_STRING_EQUAL(split, cases[i]);
    }
}

/* A character makes one word with what is of its own kind. The digest is scripts/make_unicode.py's, which splits the same
 * texts with Hugging Face `tokenizers`. */
TEST(every_character_is_of_the_kind_that_hugging_face_knows) {
    static const char kinds[] = "LNSO", examples[] = "a1\n!";
    uint64_t digest = 0xCBF29CE484222325u;
    int unclear = 0;
    for (uint32_t c = 0; c < 0x110000; c++) {
        if (c == 0xD800) c = 0xE000; /* surrogates are no characters */
        char text[5], kind = 0;
        const size_t len = 1 + put_utf8(text + 1, c);
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

/* Of a directory with no more than a vocabulary the special pieces are those of the published OPTs. */
TEST(special_pieces_are_read_in_texts_and_written_as_nothing) {
    static const char text[] = "a</s><s><pad><unk>";
    static const int32_t nothing[] = {2, -1, GAP, VOCAB, INT32_MAX, INT32_MIN, 1, 2};
    open_in(GOLDEN, VOCAB);
    int32_t *ids, *unknown;
    CU_ASSERT(encode("", 0, &ids) == 0 && ids);
    free(ids);
    const int n = encode(text, strlen(text), &ids);
    const int unk = encode("<unk>", 5, &unknown);
    CU_ASSERT(ids[1] == 2 && ids[n - unk - 1] == 1);
    free(unknown);
    decodes(ids, n, "a<s><unk>");
    decodes(nothing, (int)COUNT(nothing), "");
    const int32_t among[] = {-1, GAP, VOCAB, ids[0], INT32_MAX};
    decodes(among, (int)COUNT(among), "a");
    free(ids);
}

/* As Python replaces them; ids of single bytes, as a model may give them. */
TEST(invalid_bytes_decode_as_replacements_and_characters_whole) {
    static const char *const cases[][2] = {
        {"é狐🦊", "é狐🦊"},
        {"🦊\xF0\x9F\xA6", "🦊\uFFFD"}, /* the end has not come yet */
        {"a\x80z", "a\uFFFDz"},
        {"\xC0\xAF", "\uFFFD\uFFFD"},             /* overlong */
        {"\xE0\x80\xAF", "\uFFFD\uFFFD\uFFFD"},   /* overlong: E0 alone starts nothing */
        {"\xE7\x8Bx\xF0\x9Fy", "\uFFFDx\uFFFDy"}, /* one for each start that is broken off */
        {"\xE7\x8B\xE7\x8B\x90", "\uFFFD狐"},
    };
    open_small("", "#version: 0.2\n");
    CU_ASSERT(comes_back("aé狐🦊", 10));
    for (size_t i = 0; i < COUNT(cases); i++) {
        int32_t ids[64], n = 0;
        for (const char *c = cases[i][0]; *c; c++) ids[n++] = 4 + (unsigned char)*c;
        decodes(ids, n, cases[i][1]);
    }
}

/* With a quadratic encoder this test does not end in reasonable time, and with a pattern that backtracks it fails. */
TEST(a_word_of_a_megabyte_is_encoded) {
    static const char *fills[] = {"a", " ", "the", "9", "!?", "狐", "\u0301", "\n"};
    enum { LEN = 1 << 20 };
    open_in(GOLDEN, VOCAB);
    char *text = xcalloc(LEN + 8, 1);
    for (size_t f = 0; f < COUNT(fills); f++) {
        size_t len = 0;
        for (const size_t step = strlen(fills[f]); len + step <= LEN; len += step) memcpy(text + len, fills[f], step);
        text[len++] = 'x';
        CU_ASSERT(comes_back(text, len));
    }
    free(text);
}

/* Where the hash of a piece is of its first characters only, this test does not end in reasonable time. */
TEST(many_pieces_that_begin_alike_are_found_fast) {
    enum { MANY = 200000 };
    char *more = xcalloc(MANY, 32), *at = stpcpy(more, PIECES);
    for (int i = 0; i < MANY; i++) at += sprintf(at, ",\"a_long_prefix%d\":%d", i, SMALL + i);
    open_small(more, "a b\n");
    int32_t *ids;
    CU_ASSERT_EQUAL(encode("cab", 3, &ids), 2);
    CU_ASSERT(ids[0] == 4 + 'c' && ids[1] == 300); /* c and ab */
    free(more);
    free(ids);
}

/* Each piece has a bar behind it. Line ends of Windows, and a missing last one, are accepted. Of equal pairs the left one
 * is joined. Where all pieces are bytes, there may be no merges. In the last case each join of a and b makes two new pairs
 * that can be joined, the most there can be, and the word before makes the room for this one exactly large enough. */
TEST(pieces_are_joined_as_the_merges_say) {
    static const struct {
        const char *more, *merges, *text, *pieces;
    } cases[] = {
        {PIECES, "#version: 0.2\r\na b\r\nab c\r\n", "abcab", "abc|ab|"},
        {PIECES, "a b\nab c", "abcab", "abc|ab|"},
        {PIECES, "#version: 0.2\na b\nab c\n", "abcab", "abc|ab|"},
        {",\"oo\":300", "o o\n", "ooo", "oo|o|"},
        {",\"oo\":300", "o o\n", "ooooo", "oo|oo|o|"},
        {"", "", "ab", "a|b|"},
        {"", "#version: 0.2\n", "ab", "a|b|"},
        {"", "#version: 0.2", "é", "\uFFFD|\uFFFD|"},
        {",\"ab\":300,\"ba\":303,\"aba\":304,\"abab\":305", "a b\nb a\nab a\nab ab\n", "12345678abababababababab",
         "1|2|3|4|5|6|7|8|abab|abab|abab|abab|"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        open_small(cases[i].more, cases[i].merges);
        char pieces[100] = "";
        int32_t *ids;
        const int n = encode(cases[i].text, strlen(cases[i].text), &ids);
        for (int t = 0; t < n; t++) {
            size_t len;
            char *piece = tokenizer_decode(tokenizer, ids + t, 1, &len);
            strcat(strcat(pieces, piece), "|");
            free(piece);
        }
        CU_ASSERT_STRING_EQUAL(pieces, cases[i].pieces);
        free(ids);
    }
}

TEST(a_piece_that_is_no_byte_symbols_decodes_to_its_text) {
    open_small(",\"ab\":300,\"狐 \":302,\"\":303", "a b\n");
    decodes((int32_t[]){302, 303, 300}, 3, "狐 ab");
}

// ---- Bad input ------------------------------------------------------------------------------------------------------

static const Fault bad_vocab[] = {
    {NULL, "[1]", "vocab.json: holds no JSON object"},
    {"}", ",\"abcd\":-1}", "vocab.json: the id of \"abcd\" is -1, expected a whole number from 0 to 799"},
    {"}", ",\"abcd\":800}", "the id of \"abcd\" is 800, expected a whole number from 0 to 799"},
    {"}", ",\"abcd\":301}", "vocab.json: \"abc\" and \"abcd\" both have id 301"},
    {",\"\\u0100\":4,", ",", "vocab.json: no piece for byte 0x00"},
    {",\"\\u00ff\":259", "", "vocab.json: no piece for byte 0xFF"},
    {"</s>", "<#s>", "the id of \"</s>\" is missing, expected a whole number from 0 to 799"},
};

/* Without merges every text would fall into bytes. */
static const Fault bad_merges[] = {
    {NULL, "#version: 0.2\na b\nqq c\n", "merges.txt line 3: \"qq\" is no piece of the vocabulary"},
    {NULL, "a b\nc qq\n", "merges.txt line 2: \"qq\" is no piece of the vocabulary"},
    {NULL, "a b\nab d", "merges.txt line 2: makes \"abd\", which is no piece of the vocabulary"},
    {NULL, "a b\nab c\na b\n", "merges.txt line 3: the pair that makes \"ab\" stood before, expected each pair once"},
    {NULL, "a b\na \xE7\x8B\n", "merges.txt line 2: found \"a \" and later invalid UTF-8"},
    {NULL, "a b\n#version\n", "merges.txt line 2: found \"#version\", expected two pieces"}, /* it may be line 1 only */
    {NULL, "ab\n", "merges.txt line 1: found \"ab\", expected two pieces"},
    {NULL, " b\n", "merges.txt line 1: found \" b\", expected two pieces"},
    {NULL, "a \n", "merges.txt line 1: found \"a \", expected two pieces"},
    {NULL, "a b c\n", "merges.txt line 1: found \"a b c\", expected two pieces"},
    {NULL, "\na b\n", "merges.txt line 1: found \"\", expected two pieces"},
    {NULL, "", "merges.txt: has no merges, but the vocabulary has pieces of several bytes"},
    {NULL, "#version: 0.2", "merges.txt: has no merges, but the vocabulary has pieces of several bytes"},
};

static bool small_opens(const char *dir, Error *why) {
    Tokenizer *opened = tokenizer_open(dir, SMALL, why);
    tokenizer_close(opened);
    return opened;
}

TEST(bad_files_are_refused_each_in_its_line) {
    const char *dir = write_small(PIECES, "#version: 0.2\na b\nab c\n");
    CU_ASSERT(small_opens(dir, &err));
    refuses_each(small_opens, EXIT_FAILED, dir, VOCAB_FILE, bad_vocab, COUNT(bad_vocab));
    refuses_each(small_opens, EXIT_FAILED, dir, MERGES_FILE, bad_merges, COUNT(bad_merges));
    write_file(dir, MERGES_FILE, "a b\0c\n", 6);
    refuses(small_opens, EXIT_FAILED, dir, "merges.txt line 1: found \"a b\"");
    CHECK(remove(in_dir(dir, MERGES_FILE)) == 0);
    refuses(small_opens, EXIT_FAILED, dir, "merges.txt: cannot open");
    CHECK(remove(in_dir(dir, VOCAB_FILE)) == 0);
    refuses(small_opens, EXIT_FAILED, dir, "vocab.json: there is no such file, and no tokenizer.json");
}

/* A directory of tests/golden/forms, all of whose files the faults are put into. */
static const char *copy_of_form(const char *form) {
    static const char *const files[] = {
        "tokenizer.json",          "vocab.json",       "merges.txt", "tokenizer_config.json",
        "special_tokens_map.json", "added_tokens.json"};
    const char *dir = temp_dir();
    char from[100];
    snprintf(from, sizeof from, "tests/golden/forms/%s", form);
    for (size_t i = 0; i < COUNT(files); i++)
        if (!access(in_dir(from, files[i]), F_OK)) copy_file(from, dir, files[i]);
    return dir;
}

/* What another tokenizer than OPT's would do otherwise. */
static const Fault bad_whole[] = {
    {"\"normalizer\": null", "\"normalizer\": {\"type\": \"NFC\"}", "normalizer is an object; expected null or nothing"},
    {"\"use_regex\": true", "\"use_regex\": false", "use_regex is false; expected true or nothing"},
    {"\"pre_tokenizer\": {", "\"pre_tokenizer\": {}, \"x\": {", "type is nothing; expected \"ByteLevel\""},
    {"\"type\": \"ByteLevel\"", "\"type\": \"Whitespace\"", "type is \"Whitespace\"; expected \"ByteLevel\""},
    {"\"decoder\": {", "\"decoder\": {\"type\": \"Fuse\"}, \"x\": {", "type is \"Fuse\"; expected \"ByteLevel\""},
    {"TemplateProcessing", "RobertaProcessing",
     "type is \"RobertaProcessing\"; expected \"TemplateProcessing\", \"ByteLevel\""},
    {"\"single\": [", "\"single\": [{\"SpecialToken\": {\"id\": \"</s>\", \"type_id\": 0}},",
     "post_processor adds other pieces"},
    {"\"BPE\"", "\"Unigram\"", "type is \"Unigram\"; expected \"BPE\""},
    {"\"dropout\": null", "\"dropout\": 0.1", "dropout is 0.1; expected null"},
    {"\"continuing_subword_prefix\": \"\"", "\"continuing_subword_prefix\": \"##\"", "continuing_subword_prefix is \"##\""},
    {"\"end_of_word_suffix\": \"\"", "\"end_of_word_suffix\": \"</w>\"", "end_of_word_suffix is \"</w>\""},
    {"\"ignore_merges\": false", "\"ignore_merges\": true", "ignore_merges is true"},
    {"\"merges\": [", "\"merges\": [\"a\",", "tokenizer.json: merges line 2: found \"a\", expected two pieces"},
    {"\"merges\": [", "\"merges\": [[\"a\"],", "tokenizer.json: merges line 2: found \"a \", expected two pieces"},
    {"\"merges\": [", "\"merges\": [7, [],", "tokenizer.json: merges line 2: found \"\", expected two pieces"},
    {"\"merges\": [", "\"merges\": [], \"x\": [", "tokenizer.json: merges: has no merges"},
    {"\"vocab\": {", "\"vocab\": [], \"x\": {", "tokenizer.json: no piece for byte 0x00"},
    {"\"vocab\": {", "\"vocab\": [1], \"x\": {", "tokenizer.json: no piece for byte 0x00"},
    {"\"added_tokens\": [", "\"added_tokens\": [5,", "the added piece \"\" has no content"},
    {"\"id\": 320", "\"id\": 5", "both have id 5, expected one piece for an id"},
    {"\"id\": 320", "\"id\": 799", "the added piece \" Zorgon\" has id 799, expected one below the number of pieces, 326"},
    {"\"id\": 320,", "", "the id of \" Zorgon\" is missing, expected a whole number from 0 to 799"},
    {"\"content\": \" Zorgon\"", "\"x\": 1", "the added piece \"\" has no content"},
    {"\"single_word\": false", "\"single_word\": true", "the added piece \"<pad>\" has single_word true, expected a text"},
    {NULL, "version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 644\n", "tokenizer.json: is a Git-LFS pointer"},
};
static const Fault bad_config[] = {
    {"{", "{\"add_eos_token\": true,", "add_eos_token is true; expected false, null or nothing"},
    {"{", "{\"split_special_tokens\": true,", "split_special_tokens is true"},
    {"\"add_prefix_space\": false", "\"add_prefix_space\": true", "add_prefix_space is true; expected false"},
    {"\"pad_token\": \"<pad>\"", "\"pad_token\": \"[PAD]\"", "the id of \"[PAD]\" is missing"},
    {"\"GPT2Tokenizer\"", "\"LlamaTokenizer\"", "tokenizer_class is \"LlamaTokenizer\"; expected \"GPT2Tokenizer\", "},
    {"\"GPT2Tokenizer\"", "\"GPT2\"", "tokenizer_class is \"GPT2\"; expected \"GPT2Tokenizer\", "},
    {NULL, "[1]", "tokenizer_config.json: holds no JSON object"},
};

TEST(a_tokenizer_that_is_not_opts_is_refused_by_name) {
    const char *dir = copy_of_form("grown-5");
    CU_ASSERT(small_opens(dir, &err));
    static const char *const known[] = {"\"GPT2TokenizerFast\"", "\"PreTrainedTokenizerFast\"", "\"TokenizersBackend\"",
                                        "null"};
    for (size_t k = 0; k < COUNT(known); k++) {
        spoil(dir, "tokenizer_config.json", k ? known[k - 1] : "\"GPT2Tokenizer\"", known[k]);
        CU_ASSERT(small_opens(dir, &err));
    }
    spoil(dir, "tokenizer_config.json", "null", "\"GPT2Tokenizer\"");
    refuses_each(small_opens, EXIT_FAILED, dir, "tokenizer.json", bad_whole, COUNT(bad_whole));
    refuses_each(small_opens, EXIT_FAILED, dir, "tokenizer_config.json", bad_config, COUNT(bad_config));
    CHECK(symlink("nowhere", in_dir(dir, "added_tokens.json")) == 0); /* a download that was broken off */
    refuses(small_opens, EXIT_FAILED, dir, "added_tokens.json: is a link to nowhere, which is missing");
    dir = copy_of_form("legacy");
    refuses_each(
        small_opens, EXIT_FAILED, dir, "added_tokens.json",
        &(Fault){"320", "324", "the added piece \"<img>\" has id 324, expected one below the number of pieces, 323"}, 1);
}

/* The longest piece is found first. Of two that take the same blank along the first one has it; if this was all of the
 * second, then it is not there. */
TEST(a_long_piece_is_found_before_a_short_one_and_a_blank_is_taken_along_once) {
    static const char added[] =
        "{\"added_tokens_decoder\": {\"101\": {\"content\": \"a\", \"rstrip\": true}, "
        "\"260\": {\"content\": \" \", \"lstrip\": true}, \"261\": {\"content\": \"cc\"}, "
        "\"262\": {\"content\": \"ccc\"}, \"103\": {\"content\": \"c\"}}}";
    static const struct {
        const char *text;
        int32_t ids[4];
        int n;
    } cases[] = {{"a ", {101}, 1},
                 {"a b", {101, 102}, 2},
                 {"ba", {102, 101}, 2},
                 {"b  b", {102, 260, 260, 102}, 4},
                 {"cccccb", {262, 261, 102}, 3}};
    const char *dir = write_small("", "");
    write_file(dir, "tokenizer_config.json", added, strlen(added));
    open_in(dir, LARGE);
    CU_ASSERT_EQUAL(tokenizer_bos(tokenizer), -1);
    for (size_t i = 0; i < COUNT(cases); i++) {
        int32_t *ids;
        const int n = encode(cases[i].text, strlen(cases[i].text), &ids);
        CU_ASSERT(n == cases[i].n && !memcmp(ids, cases[i].ids, (size_t)n * sizeof *ids));
        free(ids);
    }
}

/* The time grows with the text, neither with the number of added pieces nor with the square of the white space that one of
 * them takes along. The limit is for a sanitizer on a busy machine; without one this takes 0.1 s. */
TEST(many_added_pieces_and_long_white_space_take_no_longer) {
    enum { ADDED = 1000, TEXT = 1 << 19, SECONDS = 5 };
    const char *dir = write_small("", "");
    char *text = xcalloc(TEXT, 1);
    FILE *f = fopen(in_dir(dir, "tokenizer_config.json"), "w");
    fputs("{\"added_tokens_decoder\": {\"260\": {\"content\": \" \", \"rstrip\": true}", f);
    for (int i = 1; i < ADDED; i++) fprintf(f, ", \"%d\": {\"content\": \"<%d>\"}", 260 + i, i);
    fputs("}}", f);
    CHECK(fclose(f) == 0);
    open_in(dir, LARGE);
    for (const char *c = "< "; *c; c++) {
        int32_t *ids;
        memset(text, *c, TEXT);
        const clock_t start = clock();
        CU_ASSERT_EQUAL(encode(text, TEXT, &ids), TEXT);
        CU_ASSERT(clock() - start < SECONDS * CLOCKS_PER_SEC);
        free(ids);
    }
    free(text);
}

/* By the token in front, by what is added, and by how. */
TEST(a_digest_tells_two_tokenizers_apart) {
    static const char *const forms[] = {"published", "no-bos", "bos-4", "legacy", "grown-4", "spoilt"};
    uint64_t digest[COUNT(forms)];
    const char *spoilt = copy_of_form("grown-5");
    spoil(spoilt, "tokenizer.json", "\"lstrip\": false", "\"lstrip\": true");
    for (size_t i = 0; i < COUNT(forms); i++)
        for (int twice = 0; twice < 2; twice++) {
            char dir[100];
            snprintf(dir, sizeof dir, "tests/golden/forms/%s", forms[i]);
            open_in(i + 1 < COUNT(forms) ? dir : spoilt, 330);
            CU_ASSERT(!twice || tokenizer_digest(tokenizer) == digest[i]);
            digest[i] = tokenizer_digest(tokenizer);
            for (size_t before = 0; before < i; before++) CU_ASSERT_NOT_EQUAL(digest[before], digest[i]);
        }
}

/* A piece that takes white space along may stand for any number of bytes. */
TEST(the_most_bytes_of_a_token_are_known) {
    open_in("tests/golden/forms/published", 330);
    CU_ASSERT_EQUAL(tokenizer_longest(tokenizer), 5);
    open_in("tests/golden/forms/legacy", 330);
    CU_ASSERT_EQUAL(tokenizer_longest(tokenizer), 7);
    open_in("tests/golden/forms/grown-5", 330);
    CU_ASSERT_EQUAL(tokenizer_longest(tokenizer), INT_MAX);
}

TEST(a_long_name_does_not_spoil_the_message) {
    char line[5000] = "a x"; /* the cut must not fall inside an é */
    for (size_t i = 3; i < 4903; i += 2) memcpy(line + i, "é", 2);
    refuses(small_opens, EXIT_FAILED, write_small(PIECES, line),
            "line 1: \"xééééééééééééééééééééééééééééé\" is no piece of the vocabulary, expected two that are; take "
            "all files of the tokenizer from the same model");
}

TEST(invalid_text_is_refused) {
    open_in(GOLDEN, VOCAB);
    int32_t *ids = (int32_t *)tokenizer;
    CU_ASSERT(tokenizer_encode(tokenizer, "ab\xC3", 3, &ids, &err) == -1 && !ids);
    said(&err, EXIT_FAILED, "text: invalid UTF-8 at byte 2 (0xC3)");
}
