/* test_hardware.c: what hardware_read accepts, what it refuses and says; that hardware_write is read back; what an op
 * takes, against values by hand. Damaged files of any kind are fuzz.c's, and what is measured test_measure.c's. */
#include <glob.h>

#include "tests.h"
#include "written.h"

#define FILE_NAME "hw.json"

static const char good[] =
    "{\"name\": \"a machine\", \"gmem\": 1, \"cmem\": 2e9, \"nmem\": 3, \"ctog_bdw\": 4, "
    "\"gtoc_bdw_p\": 5, \"gtoc_bdw_g\": 6, \"dtoc_bdw\": 7, \"ctod_bdw_g\": 8, \"ctod_bdw_p\": 9, "
    "\"mm_flops\": 10.5, \"bmm_flops\": 11, \"cpu_flops\": 12}";
static Error err;

/* Reads `good` with its first `from` replaced by `to`. */
static Hardware edited(const char *from, const char *to) {
    Hardware h;
    write_file(suite_dir(), FILE_NAME, good, strlen(good));
    spoil(suite_dir(), FILE_NAME, from, to);
    ASSERT_OK(hardware_read(&h, in_dir(suite_dir(), FILE_NAME), &err));
    return h;
}

/* What was there before stays if a file is refused. */
static bool hardware_opens(const char *dir, Error *why) {
    Hardware h = {.name = "untouched", .gmem = 77};
    const bool accepted = !hardware_read(&h, in_dir(dir, FILE_NAME), why);
    CU_ASSERT(accepted || (!strcmp(h.name, "untouched") && h.gmem == 77));
    return accepted;
}

/* The same numbers; names aside. */
static bool same(const Hardware *a, const Hardware *b) {
    return !memcmp(&a->gmem, &b->gmem, offsetof(Hardware, shared_cores) - offsetof(Hardware, gmem)) &&
           a->shared_cores == b->shared_cores &&
           !memcmp(&a->copy_core_s, &b->copy_core_s, sizeof *a - offsetof(Hardware, copy_core_s));
}

TEST(a_file_becomes_the_numbers_it_holds) {
    Hardware expected = {.gmem = 1,
                         .cmem = 2e9,
                         .nmem = 3,
                         .ctog_bdw = {4, 4},
                         .gtoc_bdw = {6, 5}, /* [0]: generation, [1]: prefill */
                         .dtoc_bdw = {7, 7},
                         .ctod_bdw = {8, 9},
                         .mm_flops = {10.5, 10.5},
                         .bmm_flops = {11, 11},
                         .cpu_flops = {12, 12}};
    Hardware h = edited("{", "{\"op_s\": 0, \"shared_cores\": false, \"copy_core_s\": 0, \"sources\": {},");
    CU_ASSERT_STRING_EQUAL(h.name, "a machine");
    CU_ASSERT(same(&h, &expected));
    expected.gpu_bdw = 20, expected.cpu_bdw = 21, expected.op_s = .5, expected.shared_cores = true;
    expected.copy_core_s = 1e-10, expected.disk_core_s = 2e-10;
    expected.mm_rows = (Curve){3, {1, 16, 17.5}, {10, 100, 3}};
    expected.bmm_tokens[1] = (Curve){1, {5}, {6}}, expected.bmm_tokens[0] = (Curve){1, {7}, {8}};
    expected.cpu_tokens = (Curve){1, {9}, {10}};
    h = edited("{",
               "{\"gpu_bdw\": 20, \"cpu_bdw\": 21, \"op_s\": 0.5, \"shared_cores\": true, \"copy_core_s\": 1e-10, "
               "\"disk_core_s\": 2e-10, \"mm_rows\": [[1, 10], [16, 1e2], [17.5, 3]], "
               "\"bmm_tokens_p\": [[5, 6]], \"bmm_tokens_g\": [[7, 8]], \"cpu_tokens\": [[9, 10]], "
               "\"sources\": {\"gmem\": \"said so\", \"gtoc_bdw_p\": \"\", \"name\": \"x\", "
               "\"mm_rows\": \"a\", \"bmm_tokens_p\": \"b\", \"copy_core_s\": \"c\"},");
    CU_ASSERT(same(&h, &expected));
}

static const Fault bad[] = {
    {NULL, "[]", "hw.json: holds no JSON object"},
    /* missing */
    {"\"gmem\": 1,", "", "hw.json: has no gmem; expected gmem, a number of bytes"},
    {"\"ctog_bdw\": 4,", "",
     "has no ctog_bdw_g; expected ctog_bdw, a number of bytes/s (a rate may also be a pair, KEY_p and KEY_g)"},
    {"\"gtoc_bdw_g\": 6,", "", "has no gtoc_bdw_g"},
    {"\"gtoc_bdw_p\": 5,", "", "has no gtoc_bdw_p"},
    {"\"name\": \"a machine\",", "", "name is nothing; expected a text"},
    /* given twice */
    {"{", "{\"ctog_bdw_p\": 4,", "has both ctog_bdw and ctog_bdw_p"},
    {"\"gtoc_bdw_p\": 5", "\"gtoc_bdw\": 5", "has both gtoc_bdw and gtoc_bdw_g"},
    /* unknown */
    {"{", "{\"gmen\": 1,", "unknown key \"gmen\""},
    {"{", "{\"GMEM\": 1,", "unknown key \"GMEM\""},
    {"{", "{\"gmem_p\": 1,", "unknown key \"gmem_p\""},
    {"{", "{\"gpu_bdw_p\": 1,", "unknown key \"gpu_bdw_p\""},
    {"{", "{\"ctog_bdw_x\": 1,", "unknown key \"ctog_bdw_x\""},
    {"{", "{\"\": 1,", "unknown key \"\""},
    {"{", "{\"a\\nb\": 1,", "unknown key \"a?b\""},
    /* no value of that key */
    {"\"gtoc_bdw_g\": 6", "\"gtoc_bdw_g\": 0", "gtoc_bdw_g is 0; expected a number of bytes/s from 1e-09 to 1e+30"},
    {"\"ctog_bdw\": 4", "\"ctog_bdw\": 1e31", "ctog_bdw is 1e+31; expected a number of bytes/s"},
    {"\"cpu_flops\": 12", "\"cpu_flops\": \"4\"", "cpu_flops is \"4\"; expected a number of FLOP/s"},
    {"\"gmem\": 1", "\"gmem\": 0.5", "gmem is 0.5; expected a number of bytes from 1 to 1e+18"},
    {"{", "{\"op_s\": -1e-9,", "op_s is -1e-09; expected a number of seconds from 0"},
    {"{", "{\"cpu_bdw\": null,", "cpu_bdw is null;"},
    {"{", "{\"shared_cores\": 1,", "shared_cores is 1; expected true or false"},
    {"a machine", "", "name is \"\"; expected a text of 1 to 95 bytes"},
    {"\"a machine\"", "7", "name is 7;"},
    {"a machine", "a\\nb", "without control characters"},
    /* a source belongs to a value */
    {"{", "{\"sources\": 3,", "sources is 3; expected an object"},
    {"{", "{\"sources\": {\"gmem\": 3},", "sources: gmem is 3; expected a text"},
    {"{", "{\"sources\": {\"gtoc_bdw\": \"x\"},", "\"gtoc_bdw\", which is no key"},
    /* points of a curve */
    {"{", "{\"cpu_tokens\": [],", "cpu_tokens has 0 points; expected 1 to 16"},
    {"{", "{\"mm_rows\": 3,", "mm_rows is 3; expected a list of points [rows, FLOP/s]"},
    {"{", "{\"mm_rows\": [[1, 2], {}],", "mm_rows: point 2 is an object; expected [rows, FLOP/s]"},
    {"{", "{\"cpu_tokens\": [[1]],", "cpu_tokens: point 1 is a list of 1; expected [tokens, FLOP/s]"},
    {"{", "{\"cpu_tokens\": [[1, 2, 3]],", "cpu_tokens: point 1 is a list of 3;"},
    {"{", "{\"mm_rows\": [[0.5, 2]],", "mm_rows: the size of point 1 is 0.5; expected a number of rows from 1, to 1e+15"},
    {"{", "{\"mm_rows\": [[1e16, 2]],", "mm_rows: the size of point 1 is 1e+16;"},
    {"{", "{\"mm_rows\": [[3, 2], [4, 2], [4, 2]],", "the size of point 3 is 4; expected a number of rows above 4,"},
    {"{", "{\"bmm_tokens_p\": [[3, 0]],", "the rate of point 1 is 0; expected a number of FLOP/s from 1e-09 to 1e+30"},
};

TEST(what_is_wrong_in_a_file_is_named) {
    edited("", "");
    refuses_each(hardware_opens, EXIT_USAGE, suite_dir(), FILE_NAME, bad, COUNT(bad));
    refuses(hardware_opens, EXIT_USAGE, "/nonexistent", "/nonexistent/hw.json: cannot open");
}

/* The longest that is taken, and one more. */
TEST(a_name_has_95_bytes_and_a_curve_16_points) {
    char text[200] = "", keys[2000] = "{\"mm_rows\": [[1, 2]";
    memset(text, 'x', 95);
    for (int i = 2; i <= MAX_POINTS; i++) sprintf(keys + strlen(keys), ", [%d, 2]", i);
    char *end = keys + strlen(keys);
    strcpy(end, "],");
    CU_ASSERT_STRING_EQUAL(edited("a machine", text).name, text);
    CU_ASSERT_EQUAL(edited("{", keys).mm_rows.n, MAX_POINTS);
    strcat(text, "x"), strcpy(end, ", [99, 2]],");
    const Fault longer[] = {{"a machine", text, "expected a text of 1 to 95 bytes"},
                            {"{", keys, "mm_rows has 17 points; expected 1 to 16"}};
    edited("", "");
    refuses_each(hardware_opens, EXIT_USAGE, suite_dir(), FILE_NAME, longer, COUNT(longer));
}

/* The files that come with the program are read, every value has its source, and none is off by a thousand. */
TEST(the_machines_that_come_with_the_program_are_complete) {
    glob_t files;
    CU_ASSERT_EQUAL_FATAL(glob("hardware/*.json", 0, NULL, &files), 0);
    CU_ASSERT(files.gl_pathc >= 8);
    for (size_t i = 0; i < files.gl_pathc; i++) {
        Hardware h;
        ASSERT_OK(hardware_read(&h, files.gl_pathv[i], &err));
        cJSON *json = json_read(files.gl_pathv[i], 1 << 20, &err);
        const cJSON *sources = json_get(json, "sources"), *child;
        cJSON_ArrayForEach(child, json) if (strcmp(child->string, "name") != 0 && child != sources)
            CU_ASSERT_PTR_NOT_NULL(json_get(sources, child->string));
        cJSON_Delete(json);
        CU_ASSERT(1e9 < h.gmem && h.gmem < h.cmem && h.cmem < h.nmem && h.nmem < 1e14);
        for (int p = 0; p < 2; p++) {
            const double slowest = fmin(h.dtoc_bdw[p], h.ctod_bdw[p]), disk = fmax(h.dtoc_bdw[p], h.ctod_bdw[p]);
            CU_ASSERT(3e8 < slowest && disk < h.ctog_bdw[p] && 5e9 < h.ctog_bdw[p] && h.ctog_bdw[p] < 1e11);
            CU_ASSERT(5e8 < h.gtoc_bdw[p] && h.gtoc_bdw[p] <= h.ctog_bdw[p] && h.mm_flops[p] < 1e15);
            CU_ASSERT(1e10 < h.cpu_flops[p] && h.cpu_flops[p] < h.bmm_flops[p] && h.bmm_flops[p] < h.mm_flops[p]);
        }
    }
    globfree(&files);
}

// ---- One number changed ---------------------------------------------------------------------------------------------

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
    for (size_t i = 0; i < COUNT(cases); i++) {
        Hardware changed = edited("", "");
        const Hardware expected = edited(cases[i][1], cases[i][2]);
        ASSERT_OK(hardware_change(&changed, cases[i][0], &err));
        CU_ASSERT(same(&changed, &expected));
        CU_ASSERT(!strncmp(changed.name, "a machine, ", 11) && !strcmp(changed.name + 11, cases[i][0]));
    }
}

/* Nine bytes and fifteen changes of ten fill the name to its last byte. The sixteenth change is made, but not named. */
TEST(the_name_says_changes_as_far_as_there_is_room) {
    Hardware h = edited("", "");
    for (int i = 0; i < 16; i++) ASSERT_OK(hardware_change(&h, i < 15 ? "gmem=7e9" : "gmem=8e9", &err));
    CU_ASSERT_EQUAL(strlen(h.name), sizeof h.name - 1);
    CU_ASSERT(h.gmem == 8e9 && !strstr(h.name, "8e9"));
}

/* The machine, which has curves, stays as it was. */
TEST(a_wrong_change_is_refused) {
    static const char *const cases[][2] = {
        {"--with ctog_bdw", "expected KEY=NUMBER"},
        {"--with =3", "expected KEY=NUMBER"},
        {"--with ctog=3", "expected KEY=NUMBER"},
        {"--with gmem_p=3", "expected KEY=NUMBER"},
        {"--with shared_cores=1", "expected KEY=NUMBER"},
        {"--with mm_rows=1", "expected KEY=NUMBER"},
        {"--with op_s=", "a number of seconds from 0 to 1e+09"},
        {"--with ctog_bdw=12G", "a number of bytes/s from 1e-09 to 1e+30"},
        {"--with ctog_bdw=0", "a number of bytes/s from 1e-09 to 1e+30"},
        {"--with ctog_bdw=nan", "a number of bytes/s from 1e-09 to 1e+30"},
        {"--with gmem=2e18", "a number of bytes from 1 to 1e+18"},
        {"--with mm_flops_g=3", "a curve in its place"},
        {"--with bmm_flops_p=3", "a curve in its place"},
        {"--with cpu_flops=3", "a curve in its place"},
    };
    const Hardware before = edited("{", "{\"mm_rows\": [[1, 2]], \"bmm_tokens_p\": [[1, 2]], \"cpu_tokens\": [[1, 2]],");
    for (size_t i = 0; i < COUNT(cases); i++) {
        Hardware h = before;
        CU_ASSERT_EQUAL(hardware_change(&h, cases[i][0] + strlen("--with "), &err), -1);
        CU_ASSERT(!memcmp(&h, &before, sizeof h) && !strncmp(err.text, cases[i][0], strlen(cases[i][0])));
        said(&err, EXIT_USAGE, cases[i][1]);
    }
}

// ---- Written and read back ------------------------------------------------------------------------------------------

static Hardware read_back(const Hardware *h, const char *measured) {
    Hardware back;
    FILE *f = fopen(in_dir(suite_dir(), FILE_NAME), "w");
    hardware_write(h, measured, f);
    CHECK(fclose(f) == 0);
    ASSERT_OK(hardware_read(&back, in_dir(suite_dir(), FILE_NAME), &err));
    return back;
}

/* Numbers of all sizes, with all their digits. The first keys, which are needed, are those of both phases, too. */
TEST(what_is_written_is_read_back_bit_for_bit) {
    char text[] =
        "gmem cmem nmem ctog_bdw gtoc_bdw dtoc_bdw ctod_bdw mm_flops bmm_flops cpu_flops gpu_bdw cpu_bdw op_s copy_core_s "
        "disk_core_s ctog_bdw_p dtoc_bdw_g mm_flops_p cpu_flops_g";
    char *keys[20];
    const int nkeys = split_words(text, keys, 20), needed = 10;
    uint64_t seed = 11;
    for (int trial = 0; trial < 300; trial++) {
        Hardware h = {.op_s = 0};
        for (int k = 0; k < nkeys; k++) {
            char change[80];
            snprintf(change, sizeof change, "%s=%.17g", keys[k], test_spread(&seed, 1, 1e9));
            if (k < needed || test_below(&seed, 2)) ASSERT_OK(hardware_change(&h, change, &err));
        }
        for (Curve *c = &h.mm_rows; c <= &h.cpu_packed; c++) { /* a machine's curves lie side by side */
            c->n = test_below(&seed, MAX_POINTS + 1);
            for (int p = 0; p < c->n; p++) {
                c->size[p] = (p ? c->size[p - 1] : 1) * test_spread(&seed, 1.01, 5);
                c->rate[p] = test_spread(&seed, 1e-3, 1e20);
            }
        }
        h.shared_cores = trial % 2;
        strcpy(h.name, "a \"machine\" \\ \xc3\xa9");
        const Hardware back = read_back(&h, NULL);
        CU_ASSERT(same(&h, &back) && !strcmp(h.name, back.name));
    }
}

/* Each value has its source, under the same key, and nothing else has one. */
TEST(sources_follow_their_keys) {
    static const char *const sources[] = {
        "\"name\":\t\"today\"",          "\"ctog_bdw_p\":\t\"copies",     "\"ctog_bdw_g\":\t\"copies",
        "\"gtoc_bdw\":\t\"copies",       "\"op_s\":\t\"a chain",          "\"mm_rows\":\t\"linear",
        "\"dtoc_bdw\":\t\"not measured", "\"ctod_bdw\":\t\"not measured", "\"gmem\":\t\"capacity"};
    Hardware h = machine_with("ctog_bdw_p=1e10 op_s=1e-6");
    h.mm_rows = (Curve){1, {16}, {1e12}};
    h.dtoc_bdw[0] = h.dtoc_bdw[1] = h.ctod_bdw[0] = h.ctod_bdw[1] = NO_DISK;
    h.gmem = NO_DISK; /* of memory it is a number like others */
    read_back(&h, "today");
    char *text = contents(in_dir(suite_dir(), FILE_NAME), NULL);
    for (size_t i = 0; i < COUNT(sources); i++) CU_ASSERT_PTR_NOT_NULL(strstr(text, sources[i]));
    cJSON *json = cJSON_Parse(text);
    CU_ASSERT_EQUAL(cJSON_GetArraySize(json_get(json, "sources")), cJSON_GetArraySize(json) - 1);
    CU_ASSERT(!strstr(text, "gpu_bdw") && !strstr(text, "cpu_tokens\":") && !strstr(text, "shared_cores")); /* not set */
    cJSON_Delete(json), free(text);
}

// ---- What an op takes -----------------------------------------------------------------------------------------------

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
                    {PACKED, 20, 24000 * 4.5 / 16 / 1e9},
                    {ON_CPU, 20, 24000 / 2e9},
                    {0}});
    CU_ASSERT(near(linear_seconds(&h, true, (Linear){10, 10, 100, 4, false}), 6400 / 1e9));
    CU_ASSERT(near(attend_prefill_seconds(&h, 1, 4, 100, 2), 3200 / 1e9));
    CU_ASSERT(near(attend_prefill_seconds(&h, 1, 4, 100, 4), 4800 / 1e9));
}

/* By hand, 2 n k = 2000 flops a row: at 4 rows 8000 / 100 = 80 s, at 8 rows 16000 / 160 = 100 s, and 5 s more for each row
 * between them; at 16 rows 160 s. Outside in proportion: 80 / 4 = 20 s for one row, 160 / 16 x 20 = 200 s for 20.
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
                        {PRODUCT, 5, 85},
                        {PRODUCT, 1, 20},
                        {PRODUCT, 12, 130},
                        {PRODUCT, 20, 200},
                        {PRODUCT | PACKED, 4, 80},
                        {0, 10, 12},
                        {PACKED, 10, 12},
                        {ON_CPU, 10, 24},
                        {ON_CPU | PACKED, 10, 24},
                        {0}});
    takes(&h, false, (Timed[]){{0, 20, 15}, {ON_CPU, 20, 30}, {0}});
    CU_ASSERT(near(attend_prefill_seconds(&h, 7, 4, 100, 2), 28)); /* 28000 flops */
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
