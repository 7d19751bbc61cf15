/* test_hardware.c: what hardware_read accepts, what it refuses and says; that hardware_write is read back; what an op
 * takes, against values by hand. Damaged files of any kind are fuzz.c's, and what is measured test_measure.c's. */
#include <cjson/cJSON.h>
#include <glob.h>

#include "tests.h"

static const char good[] =
    "{\"name\": \"a machine\", \"gmem\": 1, \"cmem\": 2e9, \"nmem\": 3, \"ctog_bdw\": 4, \"gtoc_bdw_p\": 5, "
    "\"gtoc_bdw_g\": 6, "
    "\"dtoc_bdw\": 7, \"ctod_bdw_g\": 8, \"ctod_bdw_p\": 9, \"mm_flops\": 10.5, \"bmm_flops\": 11, \"cpu_flops\": 12}";

static int read_text(Hardware *hardware, const char *text, Error *err) {
    static char dir[300];
    if (!dir[0]) snprintf(dir, sizeof dir, "%s", temp_dir()); /* one will do: the file is written anew */
    write_file(dir, "hw.json", text, strlen(text));
    return hardware_read(hardware, in_dir(dir, "hw.json"), err);
}

/* `good` with its first `from` replaced by `to`. */
static char *edited(const char *from, const char *to) {
    static char text[4096];
    const char *at = strstr(good, from);
    CHECK(at);
    snprintf(text, sizeof text, "%.*s%s%s", (int)(at - good), good, to, at + strlen(from));
    return text;
}

/* `good` with these keys more. */
static const char *with(const char *keys) {
    char to[3000];
    snprintf(to, sizeof to, "\"gmem\": 1, %s", keys);
    return edited("\"gmem\": 1", to);
}

/* text is refused as wrong use, in one line that names the file and contains part; what was there before stays. */
static void refused(const char *text, const char *part) {
    Error err = {0, ""};
    Hardware hardware = {.name = "untouched", .gmem = 77};
    CU_ASSERT_EQUAL(read_text(&hardware, text, &err), -1);
    CU_ASSERT_EQUAL(err.code, EXIT_USAGE);
    CU_ASSERT(strcmp(hardware.name, "untouched") == 0 && hardware.gmem == 77);
    if (!strstr(err.text, "hw.json: ") || !strstr(err.text, part) || strchr(err.text, '\n')) {
        fprintf(stderr, "\n    gave: %s\n    expected in it: %s\n", err.text, part);
        CU_FAIL("message");
    }
}

/* The same numbers; names aside. */
static bool same(const Hardware *a, const Hardware *b) {
    return !memcmp(&a->gmem, &b->gmem, offsetof(Hardware, shared_cores) - offsetof(Hardware, gmem)) &&
           a->shared_cores == b->shared_cores &&
           !memcmp(&a->copy_core_s, &b->copy_core_s, sizeof *a - offsetof(Hardware, copy_core_s));
}

TEST(a_file_becomes_the_numbers_it_holds) {
    Error err;
    Hardware h, expected = {.gmem = 1,
                            .cmem = 2e9,
                            .nmem = 3,
                            .ctog_bdw = {4, 4},
                            .gtoc_bdw = {6, 5}, /* [0]: generation, [1]: prefill */
                            .dtoc_bdw = {7, 7},
                            .ctod_bdw = {8, 9},
                            .mm_flops = {10.5, 10.5},
                            .bmm_flops = {11, 11},
                            .cpu_flops = {12, 12}};
    ASSERT_OK(read_text(&h, good, &err));
    CU_ASSERT_STRING_EQUAL(h.name, "a machine");
    CU_ASSERT(same(&h, &expected));
    ASSERT_OK(read_text(&h, with("\"op_s\": 0, \"shared_cores\": false, \"copy_core_s\": 0, \"sources\": {}"), &err));
    CU_ASSERT(same(&h, &expected));
    expected.gpu_bdw = 20, expected.cpu_bdw = 21, expected.op_s = .5, expected.shared_cores = true;
    expected.copy_core_s = 1e-10, expected.disk_core_s = 2e-10;
    expected.mm_rows = (Curve){3, {1, 16, 17.5}, {10, 100, 3}};
    expected.bmm_tokens[1] = (Curve){1, {5}, {6}}, expected.bmm_tokens[0] = (Curve){1, {7}, {8}};
    expected.cpu_tokens = (Curve){1, {9}, {10}};
    ASSERT_OK(
        read_text(&h,
                  with("\"gpu_bdw\": 20, \"cpu_bdw\": 21, \"op_s\": 0.5, \"shared_cores\": true, \"copy_core_s\": 1e-10, "
                       "\"disk_core_s\": 2e-10, \"mm_rows\": [[1, 10], [16, 1e2], [17.5, 3]], "
                       "\"bmm_tokens_p\": [[5, 6]], \"bmm_tokens_g\": [[7, 8]], \"cpu_tokens\": [[9, 10]], "
                       "\"sources\": {\"gmem\": \"said so\", \"gtoc_bdw_p\": \"\", \"name\": \"x\", "
                       "\"mm_rows\": \"a\", \"bmm_tokens_p\": \"b\", \"copy_core_s\": \"c\"}"),
                  &err));
    CU_ASSERT(same(&h, &expected));
}

TEST(what_is_wrong_in_a_file_is_named) {
    static const struct {
        const char *from, *to, *says; /* from NULL: these keys more */
    } cases[] = {
        /* missing */
        {"\"gmem\": 1,", "", "has no gmem; expected gmem, a number of bytes"},
        {"\"nmem\": 3,", "", "has no nmem"},
        {"\"ctog_bdw\": 4,", "",
         "has no ctog_bdw_g; expected ctog_bdw, a number of bytes/s (a rate may also be a pair, KEY_p and KEY_g)"},
        {"\"gtoc_bdw_g\": 6,", "", "has no gtoc_bdw_g"},
        {"\"gtoc_bdw_p\": 5,", "", "has no gtoc_bdw_p"},
        {", \"cpu_flops\": 12", "", "has no cpu_flops_g; expected cpu_flops, a number of FLOP/s"},
        {"\"name\": \"a machine\",", "", "name is nothing; expected a text"},
        /* given twice */
        {NULL, "\"ctog_bdw_p\": 4", "has both ctog_bdw and ctog_bdw_p"},
        {"\"gtoc_bdw_p\": 5", "\"gtoc_bdw\": 5", "has both gtoc_bdw and gtoc_bdw_g"},
        {NULL, "\"gmem\": 1", "\"gmem\" occurs twice"},
        /* unknown */
        {NULL, "\"gmen\": 1", "unknown key \"gmen\""},
        {NULL, "\"gmem_p\": 1, \"gmem_g\": 1", "unknown key \"gmem_p\""},
        {NULL, "\"GMEM\": 1", "unknown key \"GMEM\""},
        {NULL, "\"gpu_bdw_p\": 1", "unknown key \"gpu_bdw_p\""},
        {NULL, "\"ctog_bdw_x\": 1", "unknown key \"ctog_bdw_x\""},
        {NULL, "\"\": 1", "unknown key \"\""},
        {NULL, "\"a\\nb\": 1", "unknown key \"a?b\""},
        {NULL, "\"bmm_tokens\": [[1, 2]]", "unknown key \"bmm_tokens\""},
        {NULL, "\"mm_rows_p\": [[1, 2]]", "unknown key \"mm_rows_p\""},
        /* no value of that key */
        {"\"gtoc_bdw_g\": 6", "\"gtoc_bdw_g\": 0", "gtoc_bdw_g is 0; expected a number of bytes/s from 1e-09"},
        {"\"gmem\": 1", "\"gmem\": 0.5", "gmem is 0.5; expected a number of bytes from 1 to 1e+18"},
        {NULL, "\"op_s\": -1e-9", "op_s is -1e-09; expected a number of seconds from 0"},
        {NULL, "\"gpu_bdw\": 0", "gpu_bdw is 0;"},
        {NULL, "\"cpu_bdw\": null", "cpu_bdw is null;"},
        {NULL, "\"shared_cores\": 1", "shared_cores is 1; expected true or false"},
        {NULL, "\"copy_core_s\": -1", "copy_core_s is -1; expected a number of seconds from 0"},
        {NULL, "\"disk_core_s\": []", "disk_core_s is a list;"},
        {"\"a machine\"", "\"\"", "name is \"\"; expected a text of 1 to 95 bytes"},
        {"\"a machine\"", "7", "name is 7;"},
        {"\"a machine\"", "\"a\\nb\"", "without control characters"},
        /* a source belongs to a value */
        {NULL, "\"sources\": 3", "sources is 3; expected an object"},
        {NULL, "\"sources\": [\"gmem\"]", "sources is a list;"},
        {NULL, "\"sources\": {\"gmem\": 3}", "sources: gmem is 3; expected a text"},
        {NULL, "\"sources\": {\"gpu_bdw\": \"x\"}", "\"gpu_bdw\", which is no key"},
        {NULL, "\"sources\": {\"gtoc_bdw\": \"x\"}", "\"gtoc_bdw\", which is no key"},
        /* points of a curve */
        {NULL, "\"cpu_tokens\": []", "cpu_tokens has 0 points; expected 1 to 16"},
        {NULL, "\"mm_rows\": 3", "mm_rows is 3; expected a list of points [rows, FLOP/s]"},
        {NULL, "\"mm_rows\": null", "mm_rows is null;"},
        {NULL, "\"mm_rows\": {\"1\": 2}", "mm_rows is an object;"},
        {NULL, "\"mm_rows\": [1, 2]", "mm_rows: point 1 is 1; expected [rows, FLOP/s]"},
        {NULL, "\"mm_rows\": [[1, 2], {}]", "mm_rows: point 2 is an object; expected [rows, FLOP/s]"},
        {NULL, "\"cpu_tokens\": [[1]]", "cpu_tokens: point 1 is a list of 1; expected [tokens, FLOP/s]"},
        {NULL, "\"cpu_tokens\": [[1, 2, 3]]", "cpu_tokens: point 1 is a list of 3;"},
        {NULL, "\"cpu_tokens\": [[]]", "cpu_tokens: point 1 is a list of 0;"},
        {NULL, "\"mm_rows\": [[0.5, 2]]",
         "mm_rows: the size of point 1 is 0.5; expected a number of rows from 1, to 1e+15"},
        {NULL, "\"mm_rows\": [[1e16, 2]]", "mm_rows: the size of point 1 is 1e+16;"},
        {NULL, "\"mm_rows\": [[\"1\", 2]]", "mm_rows: the size of point 1 is \"1\";"},
        {NULL, "\"mm_rows\": [[3, 2], [3, 2]]", "mm_rows: the size of point 2 is 3; expected a number of rows above 3,"},
        {NULL, "\"bmm_tokens_g\": [[3, 2], [4, 2], [2, 2]]",
         "bmm_tokens_g: the size of point 3 is 2; expected a number of tokens above 4,"},
        {NULL, "\"bmm_tokens_p\": [[3, 0]]",
         "bmm_tokens_p: the rate of point 1 is 0; expected a number of FLOP/s from 1e-09 to 1e+30"},
        {NULL, "\"mm_rows\": [[1, 2], [3, -4]]", "mm_rows: the rate of point 2 is -4;"},
        {NULL, "\"mm_rows\": [[1, 1e31]]", "the rate of point 1 is 1e+31;"},
        {NULL, "\"mm_rows\": [[1, null]]", "the rate of point 1 is null;"},
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
        refused(cases[c].from ? edited(cases[c].from, cases[c].to) : with(cases[c].to), cases[c].says);
}

TEST(values_that_no_machine_has_are_refused) {
    static const char *const bad[][2] = {{"0", "is 0;"},
                                         {"-1", "is -1;"},
                                         {"-0.0", "is -0;"},
                                         {"1e-300", "is 1e-300;"},
                                         {"1e300", "is 1e+300;"},
                                         {"\"4\"", "is \"4\";"},
                                         {"true", "is true;"},
                                         {"null", "is null;"},
                                         {"[4]", "is a list;"},
                                         {"{}", "is an object;"},
                                         {"NaN", "found 'NaN"},
                                         {"Infinity", "found 'Infinity"},
                                         {"1e999", " is inf; expected"}};
    static const char *const keys[] = {"\"gmem\": 1", "\"ctog_bdw\": 4", "\"gtoc_bdw_p\": 5", "\"gtoc_bdw_g\": 6",
                                       "\"cpu_flops\": 12"};
    char to[100];
    for (size_t k = 0; k < sizeof keys / sizeof *keys; k++)
        for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
            snprintf(to, sizeof to, "%.*s: %s", (int)(strchr(keys[k], ':') - keys[k]), keys[k], bad[i][0]);
            refused(edited(keys[k], to), bad[i][1]);
        }
}

/* The longest that is taken, and one more. */
TEST(a_name_has_95_bytes_and_a_curve_16_points) {
    char text[200] = "\"", keys[2000] = "\"mm_rows\": [[1, 2]";
    Error err;
    Hardware h;
    memset(text + 1, 'x', 95), strcpy(text + 96, "\"");
    for (int i = 2; i <= MAX_POINTS; i++) snprintf(keys + strlen(keys), 40, ", [%d, 2]", i);
    char *end = keys + strlen(keys);
    strcpy(end, "]");
    ASSERT_OK(read_text(&h, edited("\"a machine\"", text), &err));
    CU_ASSERT_EQUAL(strlen(h.name), 95);
    ASSERT_OK(read_text(&h, with(keys), &err));
    CU_ASSERT_EQUAL(h.mm_rows.n, MAX_POINTS);
    strcpy(text + 96, "x\""), strcpy(end, ", [99, 2]]");
    refused(edited("\"a machine\"", text), "expected a text of 1 to 95 bytes");
    refused(with(keys), "mm_rows has 17 points; expected 1 to 16");
}

TEST(what_is_no_object_or_no_file_is_refused) {
    Error err = {0, ""};
    Hardware h;
    refused("[]", "holds no JSON object");
    refused("3", "holds no JSON object");
    refused("", "the text ends here");
    refused("{\"name\": ", "the text ends here");
    refused("{}", "name is nothing; expected a text");
    CU_ASSERT(hardware_read(&h, "/nonexistent/hw.json", &err) == -1 && err.code == EXIT_USAGE);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "/nonexistent/hw.json: cannot open"));
    CU_ASSERT(hardware_read(&h, temp_dir(), &err) == -1 && err.code == EXIT_USAGE);
}

/* The files that come with the program are read, every value has its source, and none is off by a thousand. */
TEST(the_machines_that_come_with_the_program_are_complete) {
    glob_t files;
    Error err;
    CU_ASSERT_EQUAL_FATAL(glob("hardware/*.json", 0, NULL, &files), 0);
    CU_ASSERT(files.gl_pathc >= 8);
    for (size_t i = 0; i < files.gl_pathc; i++) {
        Hardware h;
        ASSERT_OK(hardware_read(&h, files.gl_pathv[i], &err));
        char *text = contents(files.gl_pathv[i], NULL);
        cJSON *json = cJSON_Parse(text), *sources = cJSON_GetObjectItem(json, "sources"), *child;
        cJSON_ArrayForEach(child, json) if (strcmp(child->string, "name") != 0 && child != sources)
            CU_ASSERT_PTR_NOT_NULL(cJSON_GetObjectItem(sources, child->string));
        cJSON_Delete(json), free(text);
        CU_ASSERT(1e9 < h.gmem && h.gmem < h.cmem && h.cmem < h.nmem && h.nmem < 1e14);
        for (int p = 0; p < 2; p++) {
            const double ctog = h.ctog_bdw[p], bmm = h.bmm_flops[p];
            CU_ASSERT(5e9 < ctog && ctog < 1e11 && 5e8 < h.gtoc_bdw[p] && h.gtoc_bdw[p] <= ctog);
            CU_ASSERT(3e8 < fmin(h.dtoc_bdw[p], h.ctod_bdw[p]) && fmax(h.dtoc_bdw[p], h.ctod_bdw[p]) < ctog);
            CU_ASSERT(1e10 < h.cpu_flops[p] && h.cpu_flops[p] < bmm);
            CU_ASSERT(bmm < h.mm_flops[p] && 1e12 < h.mm_flops[p] && h.mm_flops[p] < 1e15);
        }
    }
    globfree(&files);
}

// ---------------------------------------------------------------------------------------------------------------
// One number changed
// ---------------------------------------------------------------------------------------------------------------

/* A change is the file with another number in it, and nothing else but that the name says so. */
TEST(a_change_is_the_file_with_another_number) {
    static const char *const cases[][3] = {{"gmem=7e9", "\"gmem\": 1", "\"gmem\": 7e9"},
                                           {"ctog_bdw=8e9", "\"ctog_bdw\": 4", "\"ctog_bdw\": 8e9"},
                                           {"ctog_bdw_g=8e9", "\"ctog_bdw\": 4", "\"ctog_bdw_p\": 4, \"ctog_bdw_g\": 8e9"},
                                           {"gtoc_bdw_p=3", "\"gtoc_bdw_p\": 5", "\"gtoc_bdw_p\": 3"},
                                           {"gtoc_bdw=3", "\"gtoc_bdw_p\": 5, \"gtoc_bdw_g\": 6", "\"gtoc_bdw\": 3"},
                                           {"bmm_flops=1e30", "\"bmm_flops\": 11", "\"bmm_flops\": 1e30"},
                                           {"op_s=0", "\"gmem\": 1", "\"gmem\": 1, \"op_s\": 0"},
                                           {"cpu_bdw=5", "\"gmem\": 1", "\"gmem\": 1, \"cpu_bdw\": 5"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Error err;
        Hardware changed, expected;
        ASSERT_OK(read_text(&changed, good, &err));
        ASSERT_OK(hardware_change(&changed, cases[i][0], &err));
        ASSERT_OK(read_text(&expected, edited(cases[i][1], cases[i][2]), &err));
        CU_ASSERT(same(&changed, &expected));
        CU_ASSERT(!strncmp(changed.name, "a machine, ", 11) && !strcmp(changed.name + 11, cases[i][0]));
    }
}

/* Nine bytes and fifteen changes of ten fill the name to its last byte. The sixteenth change is made, but not named. */
TEST(the_name_says_changes_as_far_as_there_is_room) {
    Error err;
    Hardware h;
    ASSERT_OK(read_text(&h, good, &err));
    for (int i = 0; i < 16; i++) ASSERT_OK(hardware_change(&h, i < 15 ? "gmem=7e9" : "gmem=8e9", &err));
    CU_ASSERT_EQUAL(strlen(h.name), sizeof h.name - 1);
    CU_ASSERT(h.gmem == 8e9 && !strstr(h.name, "8e9"));
}

/* As wrong use, by name; the machine stays as it was. */
TEST(a_wrong_change_is_refused) {
    static const struct {
        const char *says, *changes[9];
    } cases[] = {
        {"expected KEY=NUMBER",
         {"ctog_bdw", "=3", "ctog=3", "ctog_bdw_x=3", "gmem_p=3", "name=3", "shared_cores=1", "mm_rows=1"}},
        {"a number of bytes/s from 1e-09 to 1e+30", {"ctog_bdw=", "ctog_bdw=12G", "ctog_bdw=0", "ctog_bdw=nan"}},
        {"a number of bytes from 1 to 1e+18", {"gmem=-1"}},
        {"a number of seconds from 0", {"op_s=-1"}},
        {"a curve in its place", {"mm_flops_g=3", "bmm_flops_p=3", "cpu_flops=3"}},
    };
    Error err;
    Hardware h, before;
    ASSERT_OK(read_text(&h, with("\"mm_rows\": [[1, 2]], \"bmm_tokens_p\": [[1, 2]], \"cpu_tokens\": [[1, 2]]"), &err));
    before = h;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (const char *const *change = cases[i].changes; *change; change++) {
            err = (Error){0, ""};
            CU_ASSERT(hardware_change(&h, *change, &err) == -1 && err.code == EXIT_USAGE);
            CU_ASSERT(!strncmp(err.text, "--with ", 7) && !strncmp(err.text + 7, *change, strlen(*change)));
            if (!strstr(err.text, cases[i].says)) fprintf(stderr, "\n    gave: %s\n", err.text);
            CU_ASSERT_PTR_NOT_NULL(strstr(err.text, cases[i].says));
            CU_ASSERT(!memcmp(&h, &before, sizeof h));
        }
}

// ---------------------------------------------------------------------------------------------------------------
// Written and read back
// ---------------------------------------------------------------------------------------------------------------

/* Writes, and reads into *back; the text stays in `text`. */
static int write_and_read(Hardware *back, const Hardware *h, const char *measured, char *text, size_t size, Error *err) {
    FILE *f = tmpfile();
    hardware_write(h, measured, f);
    CU_ASSERT(!ferror(f));
    rewind(f);
    text[fread(text, 1, size - 1, f)] = 0;
    fclose(f);
    return read_text(back, text, err);
}

/* Numbers of all sizes, with all their digits. */
static double any(uint64_t *seed, double low, double high) {
    return low * pow(high / low, ((double)test_random(seed) + 1) / 2) * (1 + test_random(seed) * 1e-9);
}

static void random_curve(Curve *c, uint64_t *seed) {
    c->n = (int)any(seed, 1, MAX_POINTS + .9);
    for (int i = 0; i < c->n; i++) {
        c->size[i] = (i ? c->size[i - 1] : 1) * any(seed, 1.01, 5);
        c->rate[i] = any(seed, 1e-3, 1e20);
    }
}

TEST(what_is_written_is_read_back_bit_for_bit) {
    static char text[20000];
    uint64_t seed = 11;
    for (int trial = 0; trial < 300; trial++) {
        Hardware h = {.name = "a \"machine\" \\ \xc3\xa9"}, back;
        Error err;
        double *const one[] = {&h.gmem, &h.cmem, &h.nmem, &h.gpu_bdw, &h.cpu_bdw, &h.op_s, &h.copy_core_s, &h.disk_core_s};
        double *const pair[] = {h.ctog_bdw, h.gtoc_bdw, h.dtoc_bdw, h.ctod_bdw, h.mm_flops, h.bmm_flops, h.cpu_flops};
        for (int i = 0; i < 8; i++)
            if (i < 3 || trial % 3) *one[i] = i < 5 ? any(&seed, 2, 1e17) : any(&seed, 1e-12, 1);
        for (int i = 0; i < 7; i++)
            for (int p = 0; p < 2; p++) pair[i][p] = p && test_random(&seed) < 0 ? pair[i][0] : any(&seed, 1e-8, 1e25);
        Curve *const curve[] = {&h.mm_rows, &h.bmm_tokens[0], &h.bmm_tokens[1], &h.cpu_tokens};
        for (int i = 0; i < 4; i++)
            if (test_random(&seed) < .5) random_curve(curve[i], &seed);
        h.shared_cores = trial % 2;
        ASSERT_OK(write_and_read(&back, &h, NULL, text, sizeof text, &err));
        CU_ASSERT(same(&h, &back) && !strcmp(h.name, back.name));
    }
}

/* Each value has its source, under the same key, and nothing else has one. */
TEST(sources_follow_their_keys) {
    static char text[20000];
    static const char *const keys[] = {"name", "ctog_bdw_p", "ctog_bdw_g", "gtoc_bdw", "gmem", "op_s", "mm_rows"};
    Error err;
    Hardware h = machine_with("ctog_bdw_p=1e10 op_s=1e-6"), back;
    h.mm_rows = (Curve){1, {16}, {1e12}};
    ASSERT_OK(write_and_read(&back, &h, "today", text, sizeof text, &err));
    cJSON *json = cJSON_Parse(text);
    const cJSON *written = cJSON_GetObjectItem(json, "sources");
    CU_ASSERT_EQUAL(cJSON_GetArraySize(written), cJSON_GetArraySize(json) - 1); /* that they are of it is read back */
    for (int i = 0; i < 7; i++) CU_ASSERT_PTR_NOT_NULL(cJSON_GetObjectItem(written, keys[i]));
    CU_ASSERT_STRING_EQUAL(json_get(written, "name")->valuestring, "today");
    cJSON_Delete(json);
    CU_ASSERT(!strstr(text, "gpu_bdw") && !strstr(text, "cpu_tokens\":") && !strstr(text, "shared_cores")); /* not set */
    h.dtoc_bdw[0] = h.dtoc_bdw[1] = h.ctod_bdw[0] = h.ctod_bdw[1] = NO_DISK;
    h.gmem = NO_DISK; /* of memory it is a number like others */
    ASSERT_OK(write_and_read(&back, &h, "today", text, sizeof text, &err));
    CU_ASSERT(strstr(text, "\"dtoc_bdw\":\t\"not measured") && strstr(text, "\"ctod_bdw\":\t\"not measured"));
    CU_ASSERT_PTR_NOT_NULL(strstr(text, "\"gmem\":\t\"capacity"));
}

// ---------------------------------------------------------------------------------------------------------------
// What an op takes
// ---------------------------------------------------------------------------------------------------------------

static bool near(double a, double b) { return fabs(a - b) <= 1e-12 * fabs(b); } /* a few roundings */

/* A product of `size` x 10 x 100, or attention of 3 sequences of `size` tokens each with h1 100. */
enum { PACKED = 1, ON_CPU = 2, PRODUCT = 4 };
typedef struct {
    int what;
    double size, seconds; /* 0: the last row */
} Timed;

static void takes(const Hardware *h, bool prefill, const Timed *t) {
    for (; t->seconds > 0; t++) {
        const bool packed = t->what & PACKED;
        const double seconds = t->what & PRODUCT ? linear_seconds(h, prefill, (Linear){t->size, 10, 100, 2, packed})
                                                 : attend_seconds(h, t->what & ON_CPU, prefill, 3 * 100, t->size, packed);
        if (!near(seconds, t->seconds))
            fprintf(stderr, "\n    %d, %g: %g s, expected %g", t->what, t->size, seconds, t->seconds);
        CU_ASSERT(near(seconds, t->seconds));
    }
}

/* By hand, of a product of 10 rows: 2e4 flops, 2000 bytes of weights (packed 4.5 bits a weight) and 2 x 10 x 110 of x and
 * y, twice as many in floats. A prompt of 4 tokens with h1 100: 10 pairs, 4000 flops, 4 x 100 x (2 x 2 + 4) = 3200 bytes. 3
 * new tokens to 20 each: 24000 flops, and as many bytes. */
TEST(without_curves_an_op_takes_the_longer_of_flops_and_bytes) {
    Hardware h = machine_with(
        "mm_flops_g=4e12 mm_flops_p=20e12 bmm_flops_g=0.5e12 bmm_flops_p=8e12 cpu_flops_g=0.1e12 "
        "cpu_flops_p=0.04e12");
    takes(&h, true, (Timed[]){{PRODUCT, 10, 2e4 / 20e12}, {0, 20, 24000 / 8e12}, {ON_CPU, 20, 24000 / .04e12}, {0}});
    takes(&h, false, (Timed[]){{PRODUCT, 10, 2e4 / 4e12}, {0, 20, 24000 / .5e12}, {ON_CPU, 20, 24000 / .1e12}, {0}});
    CU_ASSERT(near(attend_prefill_seconds(&h, 1, 4, 100, 2), 4000 / 8e12));
    CU_ASSERT(near(attend_prefill_seconds(&h, 7, 4, 100, 2), 7 * 4000 / 8e12));
    h.gpu_bdw = 1e9, h.cpu_bdw = 2e9;
    takes(&h, true,
          (Timed[]){{PRODUCT, 10, 4200 / 1e9},
                    {PRODUCT | PACKED, 10, (2000 * 4.5 / 16 + 2200) / 1e9},
                    {0, 20, 24000 / 1e9},
                    {ON_CPU, 20, 24000 / 2e9},
                    {0}});
    CU_ASSERT(near(linear_seconds(&h, true, (Linear){10, 10, 100, 4, false}), 6400 / 1e9));
    CU_ASSERT(near(attend_prefill_seconds(&h, 1, 4, 100, 2), 3200 / 1e9));
    CU_ASSERT(near(attend_prefill_seconds(&h, 1, 4, 100, 4), 4800 / 1e9));
}

/* By hand, 2 n k = 2000 flops a row: at 4 rows 8000 / 100 = 80 s, at 8 rows 16000 / 160 = 100 s, and 5 s more for each row
 * between them; at 16 rows 160 s. Outside in proportion: 80 / 4 = 20 s for one row, 160 / 16 x 80 = 800 s for 80.
 * Attention: 4 x 300 flops a token, 12000 for 10. What is packed has a curve of its own, or the same. */
TEST(a_curve_goes_before_rates_and_is_linear_in_seconds) {
    Hardware h = machine_with("gpu_bdw=1 cpu_bdw=1");
    h.mm_rows = (Curve){3, {4, 8, 16}, {100, 160, 200}};
    h.bmm_tokens[1] = (Curve){1, {50}, {1000}};
    h.bmm_tokens[0] = (Curve){2, {10, 30}, {1000, 2000}};
    h.cpu_tokens = (Curve){2, {10, 30}, {500, 1000}};
    for (int prefill = 0; prefill < 2; prefill++)
        takes(&h, prefill,
              (Timed[]){{PRODUCT, 4, 80},
                        {PRODUCT, 8, 100},
                        {PRODUCT, 6, 90},
                        {PRODUCT, 5, 85},
                        {PRODUCT, 1, 20},
                        {PRODUCT, 12, 130},
                        {PRODUCT, 16, 160},
                        {PRODUCT, 80, 800},
                        {PRODUCT | PACKED, 4, 80},
                        {0, 10, 12},
                        {PACKED, 10, 12},
                        {ON_CPU, 10, 24},
                        {ON_CPU | PACKED, 10, 24},
                        {0}});
    takes(&h, false, (Timed[]){{0, 30, 18}, {0, 20, 15}, {ON_CPU, 20, 30}, {0}});
    CU_ASSERT(near(attend_prefill_seconds(&h, 7, 4, 100, 2), 28)); /* 28000 flops */
    CU_ASSERT(near(attend_seconds(&h, true, false, 600, 20, false), 60));
    h.mm_packed = (Curve){1, {1}, {50}}, h.bmm_packed = (Curve){1, {1}, {4000}}, h.cpu_packed = (Curve){1, {1}, {250}};
    takes(&h, false,
          (Timed[]){{PRODUCT | PACKED, 4, 160},
                    {PRODUCT, 4, 80},
                    {PACKED, 10, 3},
                    {ON_CPU | PACKED, 10, 48},
                    {0, 10, 12},
                    {ON_CPU, 10, 24},
                    {0}});
}
