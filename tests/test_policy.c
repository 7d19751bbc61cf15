/* test_policy.c: what hardware_read accepts, what it refuses and says. */
#include <cjson/cJSON.h>
#include <glob.h>

#include "tests.h"

static const char good[] =
    "{\"name\": \"a machine\", \"gmem\": 1, \"cmem\": 2e9, \"nmem\": 3, \"ctog_bdw\": 4, \"gtoc_bdw_p\": 5, "
    "\"gtoc_bdw_g\": 6, "
    "\"dtoc_bdw\": 7, \"ctod_bdw_g\": 8, \"ctod_bdw_p\": 9, \"mm_flops\": 10.5, \"bmm_flops\": 11, \"cpu_flops\": 12}";

static int read_text(Hardware *hardware, const char *text, Error *err) {
    char path[600];
    const char *dir = temp_dir();
    write_file(dir, "hw.json", text, strlen(text));
    snprintf(path, sizeof path, "%s/hw.json", dir);
    return hardware_read(hardware, path, err);
}

/* `good` with its first `from` replaced by `to`. */
static char *edited(const char *from, const char *to) {
    static char text[4096];
    const char *at = strstr(good, from);
    CHECK(at);
    snprintf(text, sizeof text, "%.*s%s%s", (int)(at - good), good, to, at + strlen(from));
    return text;
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

static void a_file_becomes_the_numbers_it_holds(void) {
    Error err;
    Hardware h;
    ASSERT_OK(read_text(&h, good, &err));
    CU_ASSERT_STRING_EQUAL(h.name, "a machine");
    CU_ASSERT(h.gmem == 1 && h.cmem == 2e9 && h.nmem == 3);
    CU_ASSERT(h.ctog_bdw[0] == 4 && h.ctog_bdw[1] == 4);
    CU_ASSERT(h.gtoc_bdw[0] == 6 && h.gtoc_bdw[1] == 5); /* [0]: generation, [1]: prefill */
    CU_ASSERT(h.dtoc_bdw[0] == 7 && h.dtoc_bdw[1] == 7);
    CU_ASSERT(h.ctod_bdw[0] == 8 && h.ctod_bdw[1] == 9);
    CU_ASSERT(h.mm_flops[0] == 10.5 && h.mm_flops[1] == 10.5);
    CU_ASSERT(h.bmm_flops[0] == 11 && h.bmm_flops[1] == 11);
    CU_ASSERT(h.cpu_flops[0] == 12 && h.cpu_flops[1] == 12);
    CU_ASSERT(h.gpu_bdw == 0 && h.cpu_bdw == 0 && h.op_s == 0 && !h.shared_cores);
}

static void optional_keys_are_read_too(void) {
    Error err;
    Hardware h;
    ASSERT_OK(read_text(&h,
                        edited("\"gmem\": 1",
                               "\"gmem\": 1, \"gpu_bdw\": 20, \"cpu_bdw\": 21, \"op_s\": 0.5, \"shared_cores\": true, "
                               "\"sources\": {\"gmem\": \"said so\", \"gtoc_bdw_p\": \"\", \"name\": \"x\"}"),
                        &err));
    CU_ASSERT(h.gpu_bdw == 20 && h.cpu_bdw == 21 && h.op_s == .5 && h.shared_cores);
    ASSERT_OK(
        read_text(&h, edited("\"gmem\": 1", "\"gmem\": 1, \"op_s\": 0, \"shared_cores\": false, \"sources\": {}"), &err));
    CU_ASSERT(h.op_s == 0 && !h.shared_cores);
}

static void a_missing_value_is_named(void) {
    refused(edited("\"gmem\": 1,", ""), "has no gmem; expected a number of bytes");
    refused(edited("\"nmem\": 3,", ""), "has no nmem");
    refused(edited("\"ctog_bdw\": 4,", ""),
            "has no ctog_bdw; expected ctog_bdw, a number of bytes/s, or ctog_bdw_p and ctog_bdw_g");
    refused(edited("\"gtoc_bdw_g\": 6,", ""), "has no gtoc_bdw_g");
    refused(edited("\"gtoc_bdw_p\": 5,", ""), "has no gtoc_bdw_p");
    refused(edited(", \"cpu_flops\": 12", ""), "has no cpu_flops; expected cpu_flops, a number of FLOP/s");
    refused(edited("\"name\": \"a machine\",", ""), "has no name");
    refused("{}", "has no name");
}

static void a_value_given_twice_is_refused(void) {
    refused(edited("\"ctog_bdw\": 4", "\"ctog_bdw\": 4, \"ctog_bdw_p\": 4"), "has both ctog_bdw and ctog_bdw_p");
    refused(edited("\"gtoc_bdw_p\": 5", "\"gtoc_bdw\": 5"), "has both gtoc_bdw and gtoc_bdw_g");
    refused(edited("\"gmem\": 1", "\"gmem\": 1, \"gmem\": 1"), "\"gmem\" occurs twice");
}

static void unknown_keys_are_refused(void) {
    refused(edited("\"gmem\": 1", "\"gmem\": 1, \"gmen\": 1"), "unknown key \"gmen\"");
    refused(edited("\"gmem\": 1", "\"gmem\": 1, \"gmem_p\": 1, \"gmem_g\": 1"), "unknown key \"gmem_p\"");
    refused(edited("\"gmem\": 1", "\"gmem\": 1, \"GMEM\": 1"), "unknown key \"GMEM\"");
    refused(edited("\"gmem\": 1", "\"gmem\": 1, \"gpu_bdw_p\": 1"), "unknown key \"gpu_bdw_p\"");
    refused(edited("\"gmem\": 1", "\"gmem\": 1, \"ctog_bdw_x\": 1"), "unknown key \"ctog_bdw_x\"");
    refused(edited("\"gmem\": 1", "\"gmem\": 1, \"\": 1"), "unknown key \"\"");
    refused(edited("\"gmem\": 1", "\"gmem\": 1, \"a\\nb\": 1"), "unknown key \"a?b\"");
}

static void values_that_no_machine_has_are_refused(void) {
    static const char *const bad[][2] = {{"0", "is 0;"},
                                         {"-1", "is -1;"},
                                         {"-0.0", "is -0;"},
                                         {"1e-300", "is 1e-300;"},
                                         {"1e300", "is 1e+300;"},
                                         {"\"4\"", "is the text \"4\";"},
                                         {"true", "is true;"},
                                         {"null", "is null;"},
                                         {"[4]", "is a list;"},
                                         {"{}", "is an object;"},
                                         {"NaN", "expected a JSON value"},
                                         {"Infinity", "expected a JSON value"},
                                         {"1e999", "1e999"}};
    static const char *const keys[] = {"\"gmem\": 1", "\"ctog_bdw\": 4", "\"gtoc_bdw_p\": 5", "\"gtoc_bdw_g\": 6",
                                       "\"cpu_flops\": 12"};
    char to[100];
    for (size_t k = 0; k < sizeof keys / sizeof *keys; k++)
        for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
            snprintf(to, sizeof to, "%.*s: %s", (int)(strchr(keys[k], ':') - keys[k]), keys[k], bad[i][0]);
            refused(edited(keys[k], to), bad[i][1]);
        }
    refused(edited("\"gtoc_bdw_g\": 6", "\"gtoc_bdw_g\": 0"), "gtoc_bdw_g is 0; expected a number of bytes/s from 1e-09");
    refused(edited("\"gmem\": 1", "\"gmem\": 0.5"), "gmem is 0.5; expected a number of bytes from 1 to 1e+18");
    refused(edited("\"gmem\": 1", "\"gmem\": 1, \"op_s\": -1e-9"), "op_s is -1e-09; expected a number of seconds from 0");
    refused(edited("\"gmem\": 1", "\"gmem\": 1, \"gpu_bdw\": 0"), "gpu_bdw is 0;");
    refused(edited("\"gmem\": 1", "\"gmem\": 1, \"cpu_bdw\": null"), "cpu_bdw is null;");
    refused(edited("\"gmem\": 1", "\"gmem\": 1, \"shared_cores\": 1"), "shared_cores is 1; expected true or false");
}

static void a_name_is_a_short_text(void) {
    char name[120], text[200];
    Error err;
    Hardware h;
    for (int n = 95; n <= 96; n++) {
        memset(name, 'x', n), name[n] = 0;
        snprintf(text, sizeof text, "\"name\": \"%s\"", name);
        if (n == 95) {
            ASSERT_OK(read_text(&h, edited("\"name\": \"a machine\"", text), &err));
            CU_ASSERT_EQUAL(strlen(h.name), 95);
        } else {
            refused(edited("\"name\": \"a machine\"", text), "expected a text of 1 to 95 bytes");
        }
    }
    refused(edited("\"a machine\"", "\"\""), "name is the text \"\"; expected a text of 1 to 95 bytes");
    refused(edited("\"a machine\"", "7"), "name is 7;");
    refused(edited("\"a machine\"", "\"a\\nb\""), "without control characters");
}

static void a_source_belongs_to_a_value(void) {
    refused(edited("\"gmem\": 1", "\"gmem\": 1, \"sources\": 3"), "sources is 3; expected an object");
    refused(edited("\"gmem\": 1", "\"gmem\": 1, \"sources\": [\"gmem\"]"), "sources is a list;");
    refused(edited("\"gmem\": 1", "\"gmem\": 1, \"sources\": {\"gmem\": 3}"), "sources: gmem is 3; expected a text");
    refused(edited("\"gmem\": 1", "\"gmem\": 1, \"sources\": {\"gpu_bdw\": \"x\"}"), "\"gpu_bdw\", which is no key");
    refused(edited("\"gmem\": 1", "\"gmem\": 1, \"sources\": {\"gtoc_bdw\": \"x\"}"), "\"gtoc_bdw\", which is no key");
}

static void what_is_no_object_or_no_file_is_refused(void) {
    Error err = {0, ""};
    Hardware h;
    refused("[]", "holds no JSON object");
    refused("3", "holds no JSON object");
    refused("", "the text ends here");
    refused("{\"name\": ", "the text ends here");
    CU_ASSERT_EQUAL(hardware_read(&h, "/nonexistent/hw.json", &err), -1);
    CU_ASSERT_EQUAL(err.code, EXIT_USAGE);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "/nonexistent/hw.json: cannot open"));
    CU_ASSERT_EQUAL(hardware_read(&h, temp_dir(), &err), -1);
    CU_ASSERT_EQUAL(err.code, EXIT_USAGE);
}

/* The files that come with the program are read, every value has its source, and none is off by a thousand. */
static void the_machines_that_come_with_the_program_are_complete(void) {
    glob_t files;
    Error err;
    CU_ASSERT_EQUAL_FATAL(glob("hardware/*.json", 0, NULL, &files), 0);
    CU_ASSERT(files.gl_pathc >= 5);
    for (size_t i = 0; i < files.gl_pathc; i++) {
        Hardware h;
        size_t len;
        ASSERT_OK(hardware_read(&h, files.gl_pathv[i], &err));
        char *text = file_read(files.gl_pathv[i], 1 << 20, &len, &err);
        cJSON *json = json_parse(text, len, files.gl_pathv[i], &err);
        const cJSON *sources = cJSON_GetObjectItemCaseSensitive(json, "sources");
        for (const cJSON *child = json->child; child; child = child->next)
            if (strcmp(child->string, "name") != 0 && child != sources)
                CU_ASSERT_PTR_NOT_NULL(cJSON_GetObjectItemCaseSensitive(sources, child->string));
        cJSON_Delete(json);
        free(text);
        CU_ASSERT(1e9 < h.gmem && h.gmem < h.cmem && h.cmem < h.nmem && h.nmem < 1e14);
        for (int p = 0; p < 2; p++) {
            CU_ASSERT(5e9 < h.ctog_bdw[p] && h.ctog_bdw[p] < 1e11);
            CU_ASSERT(5e8 < h.gtoc_bdw[p] && h.gtoc_bdw[p] <= h.ctog_bdw[p]);
            CU_ASSERT(3e8 < h.dtoc_bdw[p] && h.dtoc_bdw[p] < h.ctog_bdw[p]);
            CU_ASSERT(3e8 < h.ctod_bdw[p] && h.ctod_bdw[p] < h.ctog_bdw[p]);
            CU_ASSERT(1e12 < h.mm_flops[p] && h.mm_flops[p] < 1e15 && h.bmm_flops[p] < h.mm_flops[p]);
            CU_ASSERT(1e10 < h.cpu_flops[p] && h.cpu_flops[p] < h.bmm_flops[p]);
        }
    }
    globfree(&files);
}

CU_TestInfo tests_policy[] = {
    {"a file becomes the numbers it holds", a_file_becomes_the_numbers_it_holds},
    {"optional keys are read too", optional_keys_are_read_too},
    {"a missing value is named", a_missing_value_is_named},
    {"a value given twice is refused", a_value_given_twice_is_refused},
    {"unknown keys are refused", unknown_keys_are_refused},
    {"values that no machine has are refused", values_that_no_machine_has_are_refused},
    {"a name is a short text", a_name_is_a_short_text},
    {"a source belongs to a value", a_source_belongs_to_a_value},
    {"what is no object or no file is refused", what_is_no_object_or_no_file_is_refused},
    {"the machines that come with the program are complete", the_machines_that_come_with_the_program_are_complete},
    CU_TEST_INFO_NULL,
};
