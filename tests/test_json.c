/* test_json.c: what json_parse accepts, and what it refuses and says; UTF-8; how input files are read and results written.
 * Hostile files of a model are test_checkpoint.c's and test_tokenizer.c's. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "tests.h"
#include "written.h"

static Error err;

static cJSON *parse(const char *text) { return json_parse(text, strlen(text), &err); }

// ---- JSON and UTF-8 -------------------------------------------------------------------------------------------------

TEST(json_values_come_through) {
    cJSON *tree = parse(
        " {\"a\": [1, -2.5e3, 0, true, false, null, {}, [], 1E-05, -0.05, 10], "
        "\"\\u00e9\\uD83D\\uDE00\\n\": \"\\\\x\", \"\\\\\": \".01]\\\"}\", \"A\": {\"a\": [{\"a\": 1}, {\"a\": "
        "1}]}}\r\n\t");
    CU_ASSERT_PTR_NOT_NULL_FATAL(tree);
    char *printed = cJSON_PrintUnformatted(tree);
    CU_ASSERT_STRING_EQUAL(printed,
                           "{\"a\":[1,-2500,0,true,false,null,{},[],1e-05,-0.05,10],\"\xC3\xA9\xF0\x9F\x98\x80\\n\":"
                           "\"\\\\x\",\"\\\\\":\".01]\\\"}\",\"A\":{\"a\":[{\"a\":1},{\"a\":1}]}}");
    free(printed);
    cJSON_Delete(tree);
    tree = parse("3");
    CU_ASSERT(tree && tree->valuedouble == 3);
    cJSON_Delete(tree);
}

/* The text, in which $ stands for a byte of 0, and what the refusal says. */
static const struct {
    const char *text, *says;
} bad[] = {
    {"", "byte 0: the text ends here"},
    {"  ", "byte 2: the text ends here"},
    {"{\"a\": NaN}", "byte 6: found 'NaN}'; expected JSON"},
    {"[Infinity]", "byte 1: found 'Infinity]'"},
    {"[-Infinity]", "byte 1"},
    {"[1,]", "byte 3: found ']'"},
    {"[1 2]", "byte 3"},
    {"{\"a\" 1}", "byte 5: found '1}'"},
    {"{a: 1}", "expected JSON here or just before"},
    {"{\"a\": 1,}", "expected JSON here or just before"},
    {"{'a': 1}", "expected JSON here or just before"},
    {"[1}", "byte 2: found '}'"},
    {"[01]", "byte 1: found '01]'; expected no leading zero"},
    {"[-00.5]", "leading zero"},
    {"[1.]", "byte 2: found '.]'; expected digits before and behind a point"},
    {"[-.5]", "digits before and behind a point"},
    {"[1.e5]", "digits before and behind a point"},
    {"[.5]", "byte 1"},
    {"[+1]", "byte 1"},
    {"[1e]", "byte 2"},
    {"[0x10]", "byte 2"},
    {"[1e999]", "a number is inf; expected a number of at most 1.7e308"},
    {"{\"a\": {\"b\": [0, {\"c\": -2e308}]}}", "c is -inf; expected a number of at most"},
    {"tru", "byte 0"},
    {"truex", "byte 4"},
    {"{\"a\": 1} x", "byte 9: found 'x'; expected nothing after the value"},
    {"{\"a\": 1}{}", "nothing after the value"},
    {"{\"a\": 1}}", "nothing after the value"},
    {"1$", "byte 1: found byte 0x00"},
    {"[1,$ 2]", "byte 3: found byte 0x00"},
    {"\xEF\xBB\xBF{}", "byte order mark"},
    {"[1,\v2]", "byte 3: found byte 0x0b"},
    {"\"abc", "byte 4: the text ends here; expected the closing quote"},
    {"[\"abc", "byte 5: the text ends here; expected the closing quote"},
    {"[\"abc\\", "byte 6: the text ends here"},
    {"[\"\\u12", "four hex digits"},
    {"[\"\\u123G\"]", "byte 2: found '\\u123G\"]'; expected four hex digits"},
    {"[\"\\x\"]", "byte 2: found '\\x\"]'; expected an escape"},
    {"{", "byte 1: the text ends here"},
    {"{\"a\":", "byte 5: the text ends here"},
    {"{\"a\": 1,", "byte 8: the text ends here"}, /* some versions of cJSON read beyond it */
    {"-", "byte 0"},
    {"[\"a\\u0000b\"]", "byte 3: found '\\u0000b"},
    {"{\"a\\u0000b\": 1}", "zero byte"},
    {"[\"a$b\"]", "byte 3: found byte 0x00; expected no control character"},
    {"[\"a\nb\"]", "byte 3: found byte 0x0a; expected no control character"},
    {"[\"\\ud800\"]", "byte 2: found '\\ud800\"]'; expected an escape of JSON, surrogates in pairs"},
    {"[\"\\ud800\\u0041\"]", "surrogates in pairs"},
    {"[\"\\ud800\\ud800\"]", "surrogates in pairs"},
    {"[\"\\udc00\"]", "surrogates in pairs"},
    {"[\"\xC0\x80\"]", "byte 2: found byte 0xc0; expected UTF-8"},
    {"\xFF", "UTF-8"},
    {"{\"a\": 1, \"b\": 2, \"a\": 3}", "the key \"a\" occurs twice"},
    {"{\"a\": 1, \"\\u0061\": 3}", "the key \"a\" occurs twice"},
    {"[{\"x\": [{\"k\": 1, \"k\": 1}]}]", "the key \"k\" occurs twice"},
    {"{\"\": 1, \"\": 3}", "occurs twice"},
};

/* The text is refused; and as a file, in a line that names the file first. */
static void refused(const char *text, size_t len, const char *says) {
    const char *path = in_dir(suite_dir(), "t.json");
    char *exact = xcalloc(len, 1); /* without a 0 behind it, so that ASan sees a read too far */
    for (size_t i = 0; i < len; i++) exact[i] = text[i] == '$' ? 0 : text[i];
    CU_ASSERT_PTR_NULL(json_parse(exact, len, &err));
    said(&err, EXIT_FAILED, says);
    char first[1024];
    snprintf(first, sizeof first, "%.900s: %.100s", path, err.text);
    write_file(suite_dir(), "t.json", exact, len);
    CU_ASSERT_PTR_NULL(json_read(path, 1 << 20, &err));
    CU_ASSERT_EQUAL(strncmp(err.text, first, strlen(first)), 0);
    free(exact);
}

TEST(what_is_not_json_or_would_lose_something_is_refused_with_its_place) {
    for (size_t i = 0; i < COUNT(bad); i++) refused(bad[i].text, strlen(bad[i].text), bad[i].says);
}

TEST(nesting_stops_at_64_levels) {
    static char text[200001];
    for (int depth = 64; depth <= 65; depth++) {
        memset(text, '[', depth);
        memset(text + depth, ']', depth);
        cJSON *tree = json_parse(text, 2 * depth, &err);
        CU_ASSERT_EQUAL(tree != NULL, depth == 64);
        cJSON_Delete(tree);
    }
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "byte 64: found '[]]"));
    memset(text, '[', sizeof text);
    refused(text, sizeof text, "64 levels");
    for (int i = 0; i < 33; i++) memcpy(text + 5 * i, "[{\"\":", 5);
    refused(text, 5 * 33, "64 levels");
}

/* Comparing every pair of keys would take minutes; sorting takes 0.05 s, and sanitizers a few times that. */
TEST(a_vocabulary_is_read_in_well_under_a_second) {
    enum { N = 100000 };
    char *text = xcalloc(N, 24), *at = text;
    for (int i = 0; i < N; i++) at += sprintf(at, "%c\"key%d\":%d", i ? ',' : '{', i, i);
    strcpy(at, "}");
    const clock_t begun = clock(); /* of the processor */
    cJSON *tree = parse(text);
    CU_ASSERT(tree && clock() - begun < 5 * CLOCKS_PER_SEC);
    cJSON_Delete(tree);
    free(text);
}

TEST(utf8_is_checked_to_the_letter) {
    static const char *const cases[2][14] = {
        {"\x80", "\xC0\x80", "\xC1\xBF", "\xE0\x9F\xBF", "\xED\xA0\x80", "\xF0\x8F\xBF\xBF", "\xF4\x90\x80\x80",
         "\xF4\xBF\x80\x80", "\xF5\x80\x80\x80", "\xFF", "\xC2", "\xE1\x80", "\xF1\x80\x80", "a\xC2z"},
        {"", "abc", "\xC2\x80", "\xDF\xBF", "\xE0\xA0\x80", "\xED\x9F\xBF", "\xEE\x80\x80", "\xF0\x90\x80\x80",
         "\xF4\x8F\xBF\xBF"}};
    for (int good = 0; good < 2; good++)
        for (int i = 0; i < 14 && cases[good][i]; i++)
            CU_ASSERT_EQUAL(utf8_valid(cases[good][i], strlen(cases[good][i])), good);
    CU_ASSERT(utf8_valid("a\0b", 3));
}

TEST(a_string_is_written_so_that_it_can_be_read_again) {
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
    for (size_t i = 0; i < COUNT(cases); i++) {
        char *json;
        size_t size;
        FILE *out = open_memstream(&json, &size);
        json_write_string(out, cases[i].text, cases[i].len);
        CHECK(fclose(out) == 0);
        CU_ASSERT_STRING_EQUAL(json, cases[i].json);
        free(json);
    }
}

/* Digits before the point or behind it, or zeros of an exponent: each filled up to so many characters. Versions of cJSON
 * before 1.7.19 have room for 63. */
TEST(a_long_number_is_read_whole_or_refused) {
    static const char *const begins[] = {"1", "-1", "1.0", "-0.0", "1e-0", "12E+0"};
    for (size_t i = 0; i < COUNT(begins); i++)
        for (size_t n = 60; n <= 80; n++) {
            char text[100] = "";
            memset(text, '0', n);
            memcpy(text, begins[i], strlen(begins[i]));
            cJSON *tree = parse(text);
            CU_ASSERT(tree ? tree->valuedouble == strtod(text, NULL) : n > 60);
            cJSON_Delete(tree);
        }
}

/* From U+10000 to U+10FFFF: the first and the last of every high surrogate. */
TEST(every_pair_of_surrogates_is_a_character) {
    for (unsigned high = 0xD800; high <= 0xDBFF; high++)
        for (unsigned low = 0xDC00; low <= 0xDFFF; low += 0x3FF) {
            char text[20];
            uint32_t code = 0;
            snprintf(text, sizeof text, "\"\\u%04x\\u%04X\"", high, low);
            cJSON *tree = parse(text);
            CU_ASSERT_PTR_NOT_NULL_FATAL(tree);
            CU_ASSERT(strlen(tree->valuestring) == 4 && utf8_step(&code, tree->valuestring, 4) == 4);
            CU_ASSERT_EQUAL(code, 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00));
            cJSON_Delete(tree);
        }
}

TEST(a_whole_number_is_one_from_0_to_2_to_the_53) {
    enum { NONE = 7 };
    static const struct {
        const char *text;
        size_t number;
    } cases[] = {
        {"0", 0},       {"-0", 0},     {"1", 1},        {"1e3", 1000},   {"2.50e1", 25}, {"9007199254740992", 1ull << 53},
        {"-1", NONE},   {"0.5", NONE}, {"1e300", NONE}, {"\"1\"", NONE}, {"true", NONE}, {"9007199254740994", NONE},
        {"null", NONE}, {"[1]", NONE}};
    for (size_t i = 0; i < COUNT(cases); i++) {
        size_t number = NONE;
        cJSON *tree = parse(cases[i].text);
        CU_ASSERT_EQUAL(json_whole(tree, &number), cases[i].number != NONE);
        CU_ASSERT_EQUAL(number, cases[i].number);
        cJSON_Delete(tree);
    }
    CU_ASSERT(!json_whole(NULL, &(size_t){0}));
}

// ---- Files ----------------------------------------------------------------------------------------------------------

#define UTF_16 "lines: is in UTF-16, and UTF-8 was expected; convert it: iconv -f UTF-16 -t UTF-8"

/* Each line as "number where|line". */
TEST(lines_are_counted_and_come_without_their_ends) {
    static const struct {
        const char *text, *taken;
    } cases[] = {{"", ""},
                 {"one", "1 line 1|one\n"},
                 {"one\ntwo\n", "1 line 1|one\n2 line 2|two\n"},
                 {"one\r\ntwo\r\n\r\n", "1 line 1|one\n2 line 2|two\n"},
                 {"\n \t\n one\r \n\r", "3 line 3| one\r \n"},
                 {"\xEF\xBB\xBFone\n\xEF\xBB\xBFtwo", "1 line 1|one\n2 line 2|\xEF\xBB\xBFtwo\n"}};
    static const struct {
        const char *text;
        size_t len;
        const char *says;
    } refused[] = {
        {"\xFF\xFEh\0i\0\n", 8, UTF_16},
        {"\xFE\xFF\0h\0i\0\n", 8, UTF_16},
        {"h\0i\0\n", 6, UTF_16},
        {"\0h\0i\0\n", 6, UTF_16},
        {"version https://git-lfs.github.com/spec/v1\noid sha256:0a\n", 57, "lines: is a Git-LFS pointer, which stands"}};
    for (size_t i = 0; i < 2 * COUNT(refused); i++) {
        Lines l;
        write_file(suite_dir(), "lines", refused[i / 2].text, refused[i / 2].len);
        ASSERT_OK(lines_open(&l, in_dir(suite_dir(), "lines"), &err));
        const int status = i % 2 ? lines_whole(&l, 1, &err) : line_next(&l, &err);
        lines_close(&l);
        CU_ASSERT_EQUAL(status, -1);
        said(&err, EXIT_FAILED, refused[i / 2].says);
    }
    for (size_t i = 0; i < COUNT(cases); i++) {
        char all[400] = "", *at = all;
        Lines l;
        write_file(suite_dir(), "lines", cases[i].text, strlen(cases[i].text));
        ASSERT_OK(lines_open(&l, in_dir(suite_dir(), "lines"), &err));
        while (line_next(&l, &err) > 0) at += sprintf(at, "%d %s|%.*s\n", l.number, l.where, (int)l.size, l.line);
        lines_close(&l);
        CU_ASSERT_STRING_EQUAL(all, cases[i].taken);
    }
}

/* Of members that nobody wants the keys stay; one with an escape may be wanted. */
TEST(a_line_has_the_values_that_are_wanted) {
    static const char wanted[] = "\"a\" \"bc\"";
    static const struct {
        const char *line, *kept, *says;
    } cases[] = {
        {"{}", "{}", NULL},
        {"{\"a\": [1, {\"x\": 2}], \"b\": [1, {\"x\": \"]}\"}], \"bc\": \"t\"}",
         "{\"a\":[1,{\"x\":2}],\"b\":0,\"bc\":\"t\"}", NULL},
        {" { \"x\" : { } , \"y\":[ ] ,\"z\":-1.5e3, \"bcd\": true , \"a\" : null } ",
         "{\"x\":0,\"y\":0,\"z\":0,\"bcd\":0,\"a\":null}", NULL},
        {"{\"\\u0061\": [7], \"a \": 8, \"\": 9}", "{\"a\":[7],\"a \":0,\"\":0}", NULL},
        {"{\"x\": {\"a\": 1}, \"a\": {\"x\": 1}}", "{\"x\":0,\"a\":{\"x\":1}}", NULL},
        {"[{\"x\": 1}]", NULL, "holds no JSON object"},
        {"{\"x\": [1 2], \"a\": 1}", NULL, "byte 9: found '2]"},
        {"{\"x\": [1}, \"a\": 1]}", NULL, "byte 8: found '}, "},
        {"{\"x\": {\"a\" 1}}", NULL, "byte 11: found '1}}'"},
        {"{\"x\": {1: 1}}", NULL, "byte 8: found ': 1}}'"},
        {"{\"x\": [1,], \"a\": 1}", NULL, "byte 9: found '], "},
        {"{\"x\": [tru], \"a\": 1}", NULL, "byte 7: found 'tru]"},
        {"{\"x\": \"\\ud800\", \"a\": 1}", NULL, "surrogates in pairs"},
        {"{\"x\": [01], \"a\": 1}", NULL, "no leading zero"},
        {"{\"x\": 1, \"a\": 1", NULL, "a closing bracket"},
        {"{\"x\": 1} 2", NULL, "nothing after the value"},
        {"{\"x\": [1], \"x\": 2}", NULL, "the key \"x\" occurs twice"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        char *line = xstrdup(cases[i].line);
        cJSON *tree = line_parse(&(Lines){.line = line, .size = strlen(line)}, wanted, &err);
        char *kept = tree ? cJSON_PrintUnformatted(tree) : NULL;
        CU_ASSERT(tree ? cases[i].kept && !strcmp(kept, cases[i].kept) : cases[i].says != NULL);
        if (!tree) said(&err, EXIT_FAILED, cases[i].says);
        free(kept), free(line), cJSON_Delete(tree);
    }
}

/* As json_parse takes and refuses them, but for what only a tree shows. */
TEST(a_value_is_known_without_being_built) {
    static const char *const values[] = {"{}",     " [1, {\"a\": \"]\"}]\n", "-1.5e3", "\"a\\u00e9\"", "true",
                                         " null ", "[[], {}, [{}]]"};
    for (size_t i = 0; i < COUNT(values); i++)
        CU_ASSERT_EQUAL(json_kind(values[i], strlen(values[i])), values[i][strspn(values[i], " ")]);
    for (size_t i = 0; i < COUNT(bad); i++) {
        const bool tree = strstr(bad[i].says, "1.7e308") || strstr(bad[i].says, "at most") || strstr(bad[i].says, "twice");
        char *text = xstrdup(bad[i].text);
        const size_t len = strlen(text);
        for (size_t at = 0; at < len; at++) text[at] = text[at] == '$' ? 0 : text[at];
        CU_ASSERT_EQUAL(json_kind(text, len) != 0, tree);
        free(text);
    }
}

/* The one before it and the one behind it are whole. */
TEST(a_line_that_is_too_long_is_cut_and_refused) {
    char *text = xcalloc(2 * MAX_LINE + 9, 1);
    for (int more = 0; more < 2; more++) {
        Lines l;
        const size_t len = MAX_LINE + more * (1 + MAX_LINE / 2);
        memset(text, '1', len + 8);
        memset(text + 2, '0', len);
        text[1] = text[2 + len] = '\n';
        write_file(suite_dir(), "long", text, len + 5);
        ASSERT_OK(lines_open(&l, in_dir(suite_dir(), "long"), &err));
        CU_ASSERT(line_next(&l, &err) == 1 && l.size == 1);
        CU_ASSERT(line_next(&l, &err) == 1 && l.size == (size_t)MAX_LINE + more);
        CU_ASSERT_PTR_NULL(line_parse(&l, "", &err));
        said(&err, EXIT_FAILED, more ? "has more than 16 MiB; shorten it" : "no leading zero");
        CU_ASSERT(line_next(&l, &err) == 1 && l.size == 2 && l.number == 3 && !strcmp(l.line, "11"));
        CU_ASSERT_EQUAL(line_next(&l, &err), 0);
        lines_close(&l);
    }
    free(text);
}

TEST(files_are_read_whole_or_refused) {
    static const struct {
        const char *name;
        size_t most;
        const char *text, *says;
    } cases[] = {{"ten", 10, "0123456789", NULL},
                 {"ten", 9, NULL, "/ten: has 10 bytes; expected at most 9"},
                 {"empty", 100, "", NULL},
                 {".", 100, NULL, "/.: is a directory"},
                 {"none", 100, NULL, "/none: cannot open: No such file"},
                 {"pipe", 100, NULL, "/pipe: is a special file"}}; /* and does not wait for a writer */
    const char *dir = temp_dir();
    write_file(dir, "ten", "0123456789", 10), write_file(dir, "empty", "", 0);
    CHECK(mkfifo(in_dir(dir, "pipe"), 0600) == 0);
    for (size_t i = 0; i < COUNT(cases); i++) {
        size_t len;
        char *text = file_read(in_dir(dir, cases[i].name), cases[i].most, &len, &err);
        if (cases[i].text)
            CU_ASSERT(text && len == strlen(cases[i].text) && !strcmp(text, cases[i].text))
        else {
            CU_ASSERT_PTR_NULL(text);
            said(&err, EXIT_FAILED, cases[i].says);
        }
        free(text);
    }
    const int ten = open(in_dir(dir, "ten"), O_RDONLY);
    CU_ASSERT_PTR_NULL(file_read_part(ten, "a part", 6, 5, &err));
    said(&err, EXIT_FAILED, "a part: read error: the file became shorter");
    close(ten);
}

static bool unsynced, unsynced_directory, no_memory; /* True if fsync fails, for a directory; if fdopen does. */

/* These two are called instead of the C library's. This one syncs nothing. */
int fsync(int fd) {
    struct stat st;
    CHECK(!fstat(fd, &st));
    return unsynced || (unsynced_directory && S_ISDIR(st.st_mode)) ? errno = EIO, -1 : 0;
}

FILE *fdopen(int fd, const char *mode) {
    FILE *(*const real)(int, const char *) = (FILE * (*)(int, const char *)) dlsym(RTLD_NEXT, "fdopen");
    return no_memory ? errno = ENOMEM, NULL : real(fd, mode);
}

/* Written over an older one, and disturbed: 0, not at all; 1, the disk is full when it comes to writing; 2, the new file is
 * gone when it is to take its place; 3, its bytes do not reach the disk, which must be known before it takes its place. */
TEST(a_result_is_there_as_a_whole_or_not_at_all) {
    static const char *const says[] = {"", "No space left on device", "No such file", "Input/output error"};
    for (int way = 0; way < 4; way++) {
        if (way == 1 && access("/dev/full", W_OK)) continue; /* macOS has no such device */
        const char *dir = temp_dir(), *path = in_dir(dir, "result");
        write_file(dir, "result", "older", 5);
        FILE *file = output_open("--json", path, &err);
        CU_ASSERT_PTR_NOT_NULL_FATAL(file);
        CU_ASSERT(fputs("newer, and longer", file) >= 0);
        if (way == 1) redirect(fileno(file), "/dev/full", O_WRONLY);
        if (way == 2) CHECK(unlink(unfinished_name()) == 0);
        unsynced = way == 3;
        CU_ASSERT_EQUAL(output_close(file, "--json", path, &err), way ? -1 : 0);
        unsynced = false;
        CU_ASSERT(!way || !strncmp(err.text, "--json ", 7));
        if (way) said(&err, EXIT_FAILED, says[way]);
        CU_ASSERT_EQUAL(count_files(dir), 1); /* nothing half beside it */
        char *text = contents(path, NULL);
        CU_ASSERT_STRING_EQUAL(text, way ? "older" : "newer, and longer");
        free(text);
    }
}

/* Also of one that a link leads to. Only root can keep another owner. */
TEST(a_result_keeps_mode_and_owner_of_the_file_that_it_replaces) {
    static const mode_t modes[] = {0600, 0640, 0604, 0666};
    const uid_t owner = geteuid() ? geteuid() : 1;
    const char *dir = temp_dir(), *path = in_dir(dir, "result"), *name = in_dir(dir, "link");
    struct stat st;
    write_file(dir, "result", "older", 5);
    CHECK(!symlink("result", name) && !chown(path, owner, -1));
    for (size_t i = 0; i < 2 * COUNT(modes); i++) {
        const char *to = i % 2 ? name : path;
        CHECK(!chmod(path, modes[i / 2]));
        FILE *file = output_open("--json", to, &err);
        CU_ASSERT_FATAL(file && fputs("newer", file) >= 0 && !output_close(file, "--json", to, &err));
        CU_ASSERT(!lstat(path, &st) && S_ISREG(st.st_mode) && (st.st_mode & 0777) == modes[i / 2]);
        CU_ASSERT_EQUAL(st.st_uid, owner);
        CU_ASSERT(!lstat(name, &st) && S_ISLNK(st.st_mode));
    }
}

/* What a later run could not be sure of: the name in the directory. */
TEST(a_result_is_not_done_before_its_name_is_on_the_disk) {
    const char *dir = temp_dir(), *path = in_dir(dir, "result");
    FILE *file = output_open("--json", path, &err);
    CU_ASSERT_FATAL(file && fputs("{}", file) >= 0);
    unsynced_directory = true;
    CU_ASSERT_EQUAL(output_close(file, "--json", path, &err), -1);
    unsynced_directory = false;
    said(&err, EXIT_FAILED, "Input/output error");
    CU_ASSERT_EQUAL(count_files(dir), 1);
}

TEST(a_result_without_memory_to_write_it_leaves_nothing) {
    const char *dir = temp_dir(), *path = in_dir(dir, "result");
    const int lowest = dup(0);
    close(lowest);
    no_memory = true;
    FILE *file = output_open("--json", path, &err);
    no_memory = false;
    CU_ASSERT_PTR_NULL(file);
    said(&err, EXIT_FAILED, "Cannot allocate memory");
    CU_ASSERT_EQUAL(count_files(dir), 0);
    CU_ASSERT_EQUAL(dup(0), lowest); /* nothing stays open */
    close(lowest);
}
