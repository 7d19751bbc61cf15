/* test_json.c: what json_parse and file_read accept, and what they refuse and say. */
#include <cjson/cJSON.h>
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "tests.h"

static cJSON *parse(const char *text, Error *err) { return json_parse(text, strlen(text), err); }

static const char *source_dir;

/* text is refused, in one line that contains part; as a file, in one that names the file first. */
static void refused(const char *text, size_t len, const char *part) {
    Error err = {0, ""};
    if (!source_dir) source_dir = temp_dir();
    char *exact = (char *)malloc(len); /* without a 0 behind it, so that ASan sees a read too far */
    CHECK(exact || len == 0);
    if (len) memcpy(exact, text, len);
    cJSON *tree = json_parse(exact, len, &err);
    free(exact);
    CU_ASSERT_PTR_NULL(tree);
    cJSON_Delete(tree);
    CU_ASSERT_EQUAL(err.code, EXIT_FAILED);
    if (!strstr(err.text, part)) {
        fprintf(stderr, "\n    '%.60s' gave: %s\n    expected in it: %s\n", text, err.text, part);
        CU_FAIL("message");
    }
    char path[MAX_PATH], first[1024];
    snprintf(path, sizeof path, "%s/t.json", source_dir);
    snprintf(first, sizeof first, "%.900s: %.100s", path, err.text);
    write_file(source_dir, "t.json", text, len);
    CU_ASSERT_PTR_NULL(json_read(path, 1 << 20, &err));
    CU_ASSERT(strncmp(err.text, first, strlen(first)) == 0);
}
#define REFUSED(text, part) refused(text, sizeof text - 1, part)

static void json_values_come_through(void) {
    Error err = {0, ""};
    cJSON *tree = parse(
        " {\"a\": [1, -2.5e3, 0, true, false, null, {}, [], 1E-05, -0.05, 10], "
        "\"\\u00e9\\uD83D\\uDE00\\n\": \"\\\\x\", \"\\\\\": \".01]\\\"}\"}\r\n\t",
        &err);
    CU_ASSERT_PTR_NOT_NULL_FATAL(tree);
    cJSON *a = cJSON_GetObjectItemCaseSensitive(tree, "a");
    CU_ASSERT_EQUAL(cJSON_GetArraySize(a), 11);
    CU_ASSERT_EQUAL(cJSON_GetArrayItem(a, 1)->valuedouble, -2500);
    CU_ASSERT(cJSON_GetArrayItem(a, 8)->valuedouble == 1e-5 && cJSON_GetArrayItem(a, 9)->valuedouble == -.05);
    CU_ASSERT(cJSON_IsTrue(cJSON_GetArrayItem(a, 3)) && cJSON_IsNull(cJSON_GetArrayItem(a, 5)));
    cJSON *e = cJSON_GetObjectItemCaseSensitive(tree, "\xC3\xA9\xF0\x9F\x98\x80\n");
    CU_ASSERT(e && strcmp(e->valuestring, "\\x") == 0);
    e = cJSON_GetObjectItemCaseSensitive(tree, "\\");
    CU_ASSERT(e && strcmp(e->valuestring, ".01]\"}") == 0);
    cJSON_Delete(tree);
    tree = parse("3", &err);
    CU_ASSERT(tree && tree->valuedouble == 3);
    cJSON_Delete(tree);
}

static void what_is_not_json_is_refused_with_its_place(void) {
    REFUSED("", "byte 0: the text ends here");
    REFUSED("  ", "byte 2: the text ends here");
    REFUSED("{\"a\": NaN}", "byte 6: found 'NaN}'; expected JSON");
    REFUSED("[Infinity]", "byte 1: found 'Infinity]'");
    REFUSED("[-Infinity]", "byte 1");
    REFUSED("[1,]", "byte 3: found ']'");
    REFUSED("[1 2]", "byte 3");
    REFUSED("{\"a\" 1}", "byte 5: found '1}'");
    REFUSED("{a: 1}", "expected JSON here or just before");
    REFUSED("{\"a\": 1,}", "expected JSON here or just before");
    REFUSED("{'a': 1}", "expected JSON here or just before");
    REFUSED("[1}", "byte 2: found '}'");
    REFUSED("[01]", "byte 1: found '01]'; expected no leading zero");
    REFUSED("[-00.5]", "leading zero");
    REFUSED("[1.]", "byte 2: found '.]'; expected digits before and behind a point");
    REFUSED("[-.5]", "digits before and behind a point");
    REFUSED("[1.e5]", "digits before and behind a point");
    REFUSED("[.5]", "byte 1");
    REFUSED("[+1]", "byte 1");
    REFUSED("[1e]", "byte 2");
    REFUSED("[0x10]", "byte 2");
    REFUSED("[1e999]", "a number is inf; expected a number of at most 1.7e308");
    REFUSED("{\"a\": {\"b\": [0, {\"c\": -2e308}]}}", "c is -inf; expected a number of at most");
    REFUSED("tru", "byte 0");
    REFUSED("truex", "byte 4");
    REFUSED("{\"a\": 1} x", "byte 9: found 'x'; expected nothing after the value");
    REFUSED("{\"a\": 1}{}", "nothing after the value");
    REFUSED("{\"a\": 1}}", "nothing after the value");
    REFUSED("1\0", "byte 1: found byte 0x00");
    REFUSED("[1,\0 2]", "byte 3: found byte 0x00");
    REFUSED("\xEF\xBB\xBF{}", "byte order mark");
    REFUSED("[1,\v2]", "byte 3: found byte 0x0b");
    REFUSED("[\"abc", "byte 5: the text ends here; expected the closing quote");
    REFUSED("[\"abc\\", "byte 6: the text ends here");
    REFUSED("[\"\\u12", "four hex digits");
    REFUSED("[\"\\u123G\"]", "byte 2: found '\\u123G\"]'; expected four hex digits");
    REFUSED("[\"\\x\"]", "byte 2: found '\\x\"]'; expected an escape");
    REFUSED("{", "byte 1: the text ends here");
    REFUSED("{\"a\":", "byte 5: the text ends here");
    REFUSED("{\"a\": 1,", "byte 8: the text ends here"); /* some versions of cJSON read beyond it */
    REFUSED("-", "byte 0");
}

static void strings_that_would_lose_something_are_refused(void) {
    REFUSED("[\"a\\u0000b\"]", "byte 3: found '\\u0000b");
    REFUSED("{\"a\\u0000b\": 1}", "zero byte");
    REFUSED("[\"a\0b\"]", "byte 3: found byte 0x00; expected no control character");
    REFUSED("[\"a\nb\"]", "byte 3: found byte 0x0a; expected no control character");
    REFUSED("[\"\\ud800\"]", "byte 2: found '\\ud800\"]'; expected an escape of JSON, surrogates in pairs");
    REFUSED("[\"\\ud800\\u0041\"]", "surrogates in pairs");
    REFUSED("[\"\\ud800\\ud800\"]", "surrogates in pairs");
    REFUSED("[\"\\udc00\"]", "surrogates in pairs");
    REFUSED("[\"\xC0\x80\"]", "byte 2: found byte 0xc0; expected UTF-8");
    REFUSED("[\"\xED\xA0\x80\"]", "UTF-8");
    REFUSED("[\"\xE2\x82\"]", "UTF-8");
    REFUSED("\xFF", "UTF-8");
}

static void keys_must_be_unique_however_they_are_written(void) {
    REFUSED("{\"a\": 1, \"b\": 2, \"a\": 3}", "the key \"a\" occurs twice");
    REFUSED("{\"a\": 1, \"\\u0061\": 3}", "the key \"a\" occurs twice");
    REFUSED("[{\"x\": [{\"k\": 1, \"k\": 1}]}]", "the key \"k\" occurs twice");
    REFUSED("{\"\": 1, \"\": 3}", "occurs twice");
    Error err = {0, ""};
    cJSON *tree = parse("{\"a\": {\"a\": 1}, \"A\": {\"a\": 2}, \"b\": [{\"a\": 1}, {\"a\": 1}]}", &err);
    CU_ASSERT_PTR_NOT_NULL(tree);
    cJSON_Delete(tree);
}

static void nesting_stops_at_64_levels(void) {
    char text[2 * 100000 + 1];
    Error err = {0, ""};
    for (int depth = 64; depth <= 65; depth++) {
        memset(text, '[', depth);
        memset(text + depth, ']', depth);
        cJSON *tree = json_parse(text, 2 * depth, &err);
        CU_ASSERT((tree != NULL) == (depth == 64));
        cJSON_Delete(tree);
    }
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "byte 64: found '[]]"));
    memset(text, '[', sizeof text);
    refused(text, sizeof text, "64 levels");
    for (int i = 0; i < 33; i++) memcpy(text + 5 * i, "[{\"\":", 5);
    refused(text, 5 * 33, "64 levels");
}

static void a_vocabulary_is_read_in_well_under_a_second(void) {
    enum { N = 100000 };
    char *text = (char *)malloc(N * 24);
    size_t len = 0;
    CHECK(text);
    for (int i = 0; i < N; i++) len += sprintf(text + len, "%c\"key%d\":%d", i ? ',' : '{', i, i);
    text[len++] = '}';
    Error err = {0, ""};
    struct timespec from, to;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &from);
    cJSON *tree = json_parse(text, len, &err);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &to);
    CU_ASSERT_PTR_NOT_NULL(tree);
    cJSON_Delete(tree);
    free(text);
    /* comparing every pair of keys would take minutes; sorting takes 0.05 s, and sanitizers a few times that */
    CU_ASSERT((double)(to.tv_sec - from.tv_sec) < 5);
}

static void utf8_is_checked_to_the_letter(void) {
    static const char *const good[] = {"",
                                       "abc",
                                       "\xC2\x80",
                                       "\xDF\xBF",
                                       "\xE0\xA0\x80",
                                       "\xED\x9F\xBF",
                                       "\xEE\x80\x80",
                                       "\xF0\x90\x80\x80",
                                       "\xF4\x8F\xBF\xBF"};
    static const char *const bad[] = {"\x80",
                                      "\xC0\x80",
                                      "\xC1\xBF",
                                      "\xE0\x9F\xBF",
                                      "\xED\xA0\x80",
                                      "\xF0\x8F\xBF\xBF",
                                      "\xF4\x90\x80\x80",
                                      "\xF5\x80\x80\x80",
                                      "\xFF",
                                      "\xC2",
                                      "\xE1\x80",
                                      "\xF1\x80\x80",
                                      "a\xC2z"};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) CU_ASSERT(utf8_valid(good[i], strlen(good[i])));
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) CU_ASSERT(!utf8_valid(bad[i], strlen(bad[i])));
    CU_ASSERT(utf8_valid("a\0b", 3));
}

static void a_string_is_written_so_that_it_can_be_read_again(void) {
    static const struct {
        const char *text;
        size_t len;
        const char *json;
    } cases[] = {{"", 0, "\"\""},
                 {"a\"\\/\n\t\r", 7, "\"a\\\"\\\\/\\n\\t\\r\""},
                 {"\0\x01\x1f\x7f", 4, "\"\\u0000\\u0001\\u001f\\u007f\""},
                 {"\xC3\xA9 \xF0\x9F\x98\x80", 7, "\"\xC3\xA9 \xF0\x9F\x98\x80\""},
                 {"\xC2\x85 \xE2\x80\xA8 \xE2\x80\xA9", 10, "\"\\u0085 \\u2028 \\u2029\""}, /* ends of lines to many */
                 {"\xC2\x86\xE2\x80\xA7\xE2\x80\xAA", 8, "\"\xC2\x86\xE2\x80\xA7\xE2\x80\xAA\""},
                 {"\xC3(\xED\xA0\x80", 5, "\"?(???\""}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *json;
        size_t size;
        FILE *out = open_memstream(&json, &size);
        json_write_string(out, cases[i].text, cases[i].len);
        CHECK(fclose(out) == 0);
        CU_ASSERT_STRING_EQUAL(json, cases[i].json);
        free(json);
    }
}

static void files_are_read_whole_or_refused(void) {
    const char *dir = temp_dir();
    char path[600];
    size_t len = 0;
    Error err = {0, ""};
    write_file(dir, "ten", "0123456789", 10);
    snprintf(path, sizeof path, "%s/ten", dir);
    char *text = file_read(path, 10, &len, &err);
    CU_ASSERT(text && len == 10 && strcmp(text, "0123456789") == 0);
    free(text);
    CU_ASSERT_PTR_NULL(file_read(path, 9, &len, &err));
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "has 10 bytes; expected at most 9"));
    CU_ASSERT_PTR_NULL(file_read(dir, 100, &len, &err));
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "is a directory"));
    CU_ASSERT_PTR_NULL(file_read("/nonexistent/x", 100, &len, &err));
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "/nonexistent/x: cannot open: No such file"));
    snprintf(path, sizeof path, "%s/pipe", dir);
    CHECK(mkfifo(path, 0600) == 0);
    CU_ASSERT_PTR_NULL(file_read(path, 100, &len, &err)); /* and does not wait for a writer */
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "special file"));
    write_file(dir, "empty", "", 0);
    snprintf(path, sizeof path, "%s/empty", dir);
    text = file_read(path, 100, &len, &err);
    CU_ASSERT(text && len == 0 && text[0] == 0);
    free(text);
}

/* Digits before the point or behind it, or zeros of an exponent: each filled up to so many characters. Versions of cJSON
 * before 1.7.19 have room for 63. */
static void a_long_number_is_read_whole_or_refused(void) {
    static const char *const begins[] = {"1", "-1", "1.0", "-0.0", "1e-0", "12E+0"};
    for (size_t i = 0; i < sizeof begins / sizeof *begins; i++)
        for (int n = 60; n <= 80; n++) {
            char text[100] = "";
            Error err = {0, ""};
            snprintf(text, sizeof text, "%s", begins[i]);
            memset(text + strlen(begins[i]), '0', (size_t)n - strlen(begins[i]));
            cJSON *tree = parse(text, &err);
            CU_ASSERT(tree ? tree->valuedouble == strtod(text, NULL) : n > 60);
            cJSON_Delete(tree);
        }
}

/* From U+10000 to U+10FFFF: the first and the last of every high surrogate. */
static void every_pair_of_surrogates_is_a_character(void) {
    for (unsigned high = 0xD800; high <= 0xDBFF; high++)
        for (unsigned low = 0xDC00; low <= 0xDFFF; low += 0x3FF) {
            char text[20];
            Error err = {0, ""};
            const unsigned c = 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00);
            const char utf8[] = {(char)(0xF0 | c >> 18), (char)(0x80 | (c >> 12 & 0x3F)), (char)(0x80 | (c >> 6 & 0x3F)),
                                 (char)(0x80 | (c & 0x3F)), 0};
            snprintf(text, sizeof text, "\"\\u%04x\\u%04X\"", high, low);
            cJSON *tree = parse(text, &err);
            CU_ASSERT(tree && !strcmp(tree->valuestring, utf8));
            cJSON_Delete(tree);
        }
}

static void a_whole_number_is_one_from_0_to_2_to_the_53(void) {
    static const struct {
        const char *text;
        bool whole;
        size_t number;
    } cases[] = {{"0", true, 0},
                 {"-0", true, 0},
                 {"1", true, 1},
                 {"1e3", true, 1000},
                 {"2.50e1", true, 25},
                 {"9007199254740992", true, (size_t)1 << 53},
                 {"9007199254740994", false, 0},
                 {"-1", false, 0},
                 {"0.5", false, 0},
                 {"1e300", false, 0},
                 {"\"1\"", false, 0},
                 {"true", false, 0},
                 {"null", false, 0},
                 {"[1]", false, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Error err = {0, ""};
        size_t number = 0;
        cJSON *tree = parse(cases[i].text, &err);
        CU_ASSERT_EQUAL(json_whole(tree, &number), cases[i].whole);
        CU_ASSERT_EQUAL(number, cases[i].number);
        cJSON_Delete(tree);
    }
    CU_ASSERT(!json_whole(NULL, &(size_t){0}));
}

static void lines_are_counted_and_come_without_their_ends(void) {
    static const struct {
        const char *text, *name, *taken;
    } cases[] = {{"", "f", ""},
                 {"one", "f", "1 f line 1|one\n"},
                 {"one\ntwo\n", "f", "1 f line 1|one\n2 f line 2|two\n"},
                 {"one\r\ntwo\r\n\r\n", "", "1 line 1|one\n2 line 2|two\n"},
                 {"\n \t\n one\r \n\r", "f", "3 f line 3| one\r \n"},
                 {"\xEF\xBB\xBF"
                  "one\n\xEF\xBB\xBF"
                  "two",
                  "f",
                  "1 f line 1|one\n2 f line 2|\xEF\xBB\xBF"
                  "two\n"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char all[400] = ""; /* "number where|line" behind one another */
        Lines l = {.text = cases[i].text, .len = strlen(cases[i].text), .name = cases[i].name};
        for (size_t n = 0; line_next(&l); n = strlen(all))
            snprintf(all + n, sizeof all - n, "%d %s|%.*s\n", l.number, l.where, (int)l.size, l.line);
        CU_ASSERT_STRING_EQUAL(all, cases[i].taken);
    }
}

/* Writes a result over an older one, and disturbs that: 0, not at all; 1, the disk is full when it comes to writing; 2, the
 * new file is gone when it is to take its place. */
static void disturb(int way, const char *dir, FILE *file) {
    if (way == 1) {
        const int full = open("/dev/full", O_WRONLY);
        CHECK(full >= 0 && dup2(full, fileno(file)) >= 0 && close(full) == 0);
    } else if (way == 2) {
        DIR *d = opendir(dir);
        for (const struct dirent *e; (e = readdir(d));)
            if (e->d_name[0] != '.' && strcmp(e->d_name, "result") != 0) CHECK(unlinkat(dirfd(d), e->d_name, 0) == 0);
        closedir(d);
    }
}

static void a_result_is_there_as_a_whole_or_not_at_all(void) {
    static const char *const said[] = {"", "No space left on device", "No such file"};
    for (int way = 0; way < 3; way++) {
        const char *dir = temp_dir();
        char path[600];
        size_t len;
        Error err = {0, ""};
        write_file(dir, "result", "older", 5);
        snprintf(path, sizeof path, "%s/result", dir);
        FILE *file = output_open("--json", path, &err);
        CU_ASSERT_PTR_NOT_NULL_FATAL(file);
        CU_ASSERT(fputs("newer, and longer", file) >= 0);
        disturb(way, dir, file);
        CU_ASSERT_EQUAL(output_close(file, "--json", path, &err), way ? -1 : 0);
        CU_ASSERT(!way || (err.code == EXIT_FAILED && strstr(err.text, "--json") && strstr(err.text, said[way])));
        CU_ASSERT_EQUAL(count_files(dir), 1); /* nothing half beside it */
        char *text = file_read(path, 100, &len, &err);
        CU_ASSERT_STRING_EQUAL(text, way ? "older" : "newer, and longer");
        free(text);
    }
}

static bool no_memory; /* for streams */

FILE *fdopen(int fd, const char *mode) { /* instead of the C library's */
    FILE *(*const real)(int, const char *) = (FILE * (*)(int, const char *)) dlsym(RTLD_NEXT, "fdopen");
    return no_memory ? errno = ENOMEM, NULL : real(fd, mode);
}

static void a_result_without_memory_to_write_it_leaves_nothing(void) {
    const char *dir = temp_dir();
    char path[600];
    Error err = {0, ""};
    const int lowest = dup(0);
    close(lowest);
    snprintf(path, sizeof path, "%s/result", dir);
    no_memory = true;
    FILE *file = output_open("--json", path, &err);
    no_memory = false;
    CU_ASSERT(!file && err.code == EXIT_FAILED && strstr(err.text, "Cannot allocate memory"));
    CU_ASSERT_EQUAL(count_files(dir), 0);
    CU_ASSERT_EQUAL(dup(0), lowest); /* nothing stays open */
    close(lowest);
}

CU_TestInfo tests[] = {
    {"json values come through", json_values_come_through},
    {"what is not json is refused with its place", what_is_not_json_is_refused_with_its_place},
    {"strings that would lose something are refused", strings_that_would_lose_something_are_refused},
    {"keys must be unique however they are written", keys_must_be_unique_however_they_are_written},
    {"nesting stops at 64 levels", nesting_stops_at_64_levels},
    {"a vocabulary is read in well under a second", a_vocabulary_is_read_in_well_under_a_second},
    {"utf8 is checked to the letter", utf8_is_checked_to_the_letter},
    {"a string is written so that it can be read again", a_string_is_written_so_that_it_can_be_read_again},
    {"a long number is read whole or refused", a_long_number_is_read_whole_or_refused},
    {"every pair of surrogates is a character", every_pair_of_surrogates_is_a_character},
    {"a whole number is one from 0 to 2 to the 53", a_whole_number_is_one_from_0_to_2_to_the_53},
    {"lines are counted and come without their ends", lines_are_counted_and_come_without_their_ends},
    {"files are read whole or refused", files_are_read_whole_or_refused},
    {"a result is there as a whole or not at all", a_result_is_there_as_a_whole_or_not_at_all},
    {"a result without memory to write it leaves nothing", a_result_without_memory_to_write_it_leaves_nothing},
    CU_TEST_INFO_NULL,
};
