/* test_policy.c: what hardware_read accepts, what it refuses and says; Appendix A.3 against values by hand, and what must
 * hold of a best placement whatever the machine. */
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

// ---------------------------------------------------------------------------------------------------------------
// Appendix A.3
// ---------------------------------------------------------------------------------------------------------------

/* Every rate is another round number, so that a wrong one shows. [0]: generation, [1]: prefill. */
static const Hardware round_machine = {.name = "round",
                                       .gmem = 16e9,
                                       .cmem = 200e9,
                                       .nmem = 1500e9,
                                       .ctog_bdw = {12e9, 10e9},
                                       .gtoc_bdw = {6e9, 5e9},
                                       .dtoc_bdw = {2e9, 1.6e9},
                                       .ctod_bdw = {1e9, 0.8e9},
                                       .mm_flops = {4e12, 20e12},
                                       .bmm_flops = {0.3e12, 8e12},
                                       .cpu_flops = {0.05e12, 0.04e12}};
static const Block block_30b = {.s = 512, .n = 32, .gbs = 48, .num_gpu_batches = 3};

/* OPT-30B: l = 48, h1 = 7168, h2 = 28672, nh = 56; s = 512, n = 32, gbs = 48, bls = 144. In bytes:
 *     weights of a layer  8 h1^2 + 4 h1 h2                     = 24 x 7168^2                = 1233125376, all: x 48 =
 * 59190018048 activations^p       2 s h1 bls   = 2 x 512 x 7168 x 144  = 1056964608, of a GPU batch: / 3 = 352321536
 *     activations^g       2 h1 bls     = 2 x 7168 x 144        = 2064384
 *     cache^p             4 (s + 1) h1 bls = 4 x 513 x 7168 x 144                           = 2118057984
 *     cache read^g        4 bls (s + n/2) h1 = 4 x 144 x 528 x 7168                         = 2179989504, one token:
 * 4128768 cache, all          4 (s + n) h1 bls l = 4 x 544 x 7168 x 144 x 48                    = 107810390016 in flops:
 *     linear^p            bls s (8 h1^2 + 4 h1 h2) = 144 x 512 x 1233125376                 = 90915867721728
 *     attention^p         4 bls s^2 h1 = 4 x 144 x 262144 x 7168                            = 1082331758592
 *     linear^g            bls (8 h1^2 + 4 h1 h2) = 144 x 1233125376                         = 177570054144
 *     attention^g         as the cache read                                                 = 2179989504
 * working memory of a GPU batch, in bytes:
 *     prefill             qkv 8 s h1 gbs = 1409286144; att gbs (4 s h1 + 2 nh s^2) = 48 (14680064 + 29360128) = 2113929216;
 *                         embed 4 s h1 gbs = 704643072; mlp 2 gbs s (h1 + h2) = 96 x 512 x 35840 = 1761607680
 *     generation          kv 8 h1 gbs = 2752512; att gbs (2 h1 + 2 x 544 h1 + 2 nh 544) = 48 (14336 + 7798784 + 60928)
 *                         = 377954304; embed 4 h1 gbs = 1376256; mlp 2 gbs (h1 + h2) = 3440640
 *     CPU, generation     hd: 2 x 2 h1 gbs = 1376256; cd: 2 x 4 (s + n) h1 gbs = 1497366528;
 *                         always: 2 nh (s + n) gbs + 2 h1 gbs = 2924544 + 688128 = 3612672 */
#define W 1233125376.
#define W_ALL 59190018048.
#define C_ALL 107810390016.
#define H_P 1056964608.
#define H_G 2064384.
#define H_GBS 352321536.
typedef struct {
    const char *name;
    double a[NVARS], b;
} Row;
#define GPU_P(name, cg, one) \
    { "gpu_peak^p with " name, {W_ALL - 2 * W, 0, 0, C_ALL + cg, 0, 0, H_P - H_GBS}, 16e9 - 2 * W - H_GBS - one }
#define GPU_G(name, cg, one) \
    { "gpu_peak^g with " name, {W_ALL - 2 * W, 0, 0, C_ALL + cg, 0, 0, H_G - H_GBS}, 16e9 - 2 * W - H_GBS - one }
static const Row rows_30b[NROWS] = {
    /* wg wc wd cg cc cd hg hc hd T_pre T_gen */
    {"ctog^p", {0, W / 10e9, W / 10e9, 0, 0, 0, 0, H_P / 10e9, H_P / 10e9, -1, 0}, 0},
    {"gtoc^p", {0, 0, 0, 0, 2118057984 / 5e9, 2118057984 / 5e9, 0, H_P / 5e9, H_P / 5e9, -1, 0}, 0},
    {"dtoc^p", {0, 0, W / 1.6e9, 0, 0, 0, 0, 0, H_P / 1.6e9, -1, 0}, 0},
    {"ctod^p", {0, 0, 0, 0, 0, 2118057984 / .8e9, 0, 0, H_P / .8e9, -1, 0}, 0},
    {"comp^p", {0, 0, 0, 0, 0, 0, 0, 0, 0, -1, 0}, -(90915867721728 / 20e12 + 1082331758592 / 8e12)},
    {"ctog^g", {0, W / 12e9, W / 12e9, 0, 0, 0, 0, H_G / 12e9, H_G / 12e9, 0, -1}, 0},
    {"gtoc^g", {0, 0, 0, 0, 0, 0, 0, H_G / 6e9, H_G / 6e9, 0, -1}, 0},
    {"dtoc^g", {0, 0, W / 2e9, 0, 0, 2179989504 / 2e9, 0, 0, H_G / 2e9, 0, -1}, 0},
    {"ctod^g", {0, 0, 0, 0, 0, 4128768 / 1e9, 0, 0, H_G / 1e9, 0, -1}, 0},
    {"comp^g",
     {0, 0, 0, 2179989504 / .3e12, 2179989504 / .05e12, 2179989504 / .05e12, 0, 0, 0, 0, -1},
     -177570054144 / 4e12},
    GPU_P("qkv^p", 0, 1409286144),
    GPU_P("att_1^p", 2113929216, 0),
    GPU_P("att_2^p", 2113929216, 0),
    GPU_P("embed^p", 0, 704643072),
    GPU_P("mlp_1^p", 0, 1761607680),
    GPU_P("mlp_2^p", 0, 1761607680),
    GPU_G("kv^g", 0, 2752512),
    GPU_G("att_1^g", 377954304, 0),
    GPU_G("att_2^g", 377954304, 0),
    GPU_G("embed^g", 0, 1376256),
    GPU_G("mlp_1^g", 0, 3440640),
    GPU_G("mlp_2^g", 0, 3440640),
    {"cpu_peak^p", {-W, W_ALL, 0, 0, C_ALL, 0, -H_GBS, H_P}, 200e9 - W - H_GBS},
    {"cpu_peak^g", {0, W_ALL, W, 0, C_ALL, 1497366528, 0, H_G, 1376256}, 200e9 - 3612672},
    {"nvme_peak", {0, 0, W_ALL, 0, 0, C_ALL, 0, 0, H_P}, 1500e9},
    {"wg + wc + wd", {1, 1, 1}, 1},
    {"cg + cc + cd", {0, 0, 0, 1, 1, 1}, 1},
    {"hg + hc + hd", {0, 0, 0, 0, 0, 0, 1, 1, 1}, 1},
};

static bool near(double a, double b) { return fabs(a - b) <= 1e-12 * fabs(b); } /* a few roundings */

static OptConfig opt(const char *name) {
    OptConfig config;
    CHECK(opt_config_by_name(&config, name) == 0);
    return config;
}

static void the_rows_of_opt_30b_are_those_of_a_3_by_hand(void) {
    static Lp lp;
    OptConfig config = opt("opt-30b");
    paper_lp(&lp, &round_machine, &config, &block_30b);
    CU_ASSERT_EQUAL(lp.n, NVARS);
    CU_ASSERT_EQUAL_FATAL(lp.m, NROWS);
    for (int i = 0; i < NROWS; i++) {
        const LpRow *row = &lp.row[i];
        CU_ASSERT_STRING_EQUAL(row->name, rows_30b[i].name);
        CU_ASSERT_EQUAL(row->equal, i >= SUM_ROWS);
        bool same = near(row->b, rows_30b[i].b);
        for (int j = 0; j < NVARS; j++) same = same && near(row->a[j], rows_30b[i].a[j]);
        if (!same) fprintf(stderr, "\n    %s differs\n", row->name);
        CU_ASSERT(same);
    }
    for (int f = 0; f < NFRACTIONS; f++) CU_ASSERT_EQUAL(lp.c[f], 0);
    CU_ASSERT(near(lp.c[T_PRE], 48 / 144.) && near(lp.c[T_GEN], 31 * 48 / 144.)); /* T / bls */
}

/* Where the GPU has room for all, nothing moves, and T is what it computes: per layer 90915867721728 / 20e12 +
 * 1082331758592 / 8e12 = 4.681084855910 s in prefill, 177570054144 / 4e12 + 2179989504 / 0.3e12 = 0.051659145216 s in
 * generation. */
static void a_gpu_with_room_for_all_gets_all(void) {
    Error err;
    Cost cost;
    Hardware large = round_machine;
    OptConfig config = opt("opt-30b");
    large.gmem = 1e12;
    ASSERT_OK(paper_cost(&cost, &large, &config, &block_30b, &err));
    CU_ASSERT(fabs(cost.T_pre - 4.681084855910) < 1e-11 && fabs(cost.T_gen - .051659145216) < 1e-12);
    CU_ASSERT(near(cost.T, 48 * cost.T_pre + 31 * 48 * cost.T_gen));
    CU_ASSERT(near(cost.throughput, 144 * 32 / cost.T));
    CU_ASSERT(cost.fraction[CG] == 1);
    CU_ASSERT_STRING_EQUAL(cost.slowest[1], "comp^p");
    CU_ASSERT_PTR_NOT_NULL(strstr(cost.slowest[0], "comp^g"));
    CU_ASSERT(!cost.full[TIER_GPU][0] && !cost.full[TIER_CPU][0] && !cost.full[TIER_DISK][0]);
    CU_ASSERT(cost.peak[TIER_GPU] > C_ALL && cost.peak[TIER_GPU] < 1e12);
}

/* By hand: nothing costs time but a slow disk, so that T_gen is W wd / 1e6. The GPU has room for its working memory only,
 * the CPU for 40e9 bytes, of which prefill takes W_ALL wc + W (1 - wg) with wg = 0, more than generation. The cache and the
 * activations are those of one token or two. */
static void what_fits_nowhere_else_is_read_from_the_disk(void) {
    Error err;
    Cost cost;
    Hardware h = round_machine;
    OptConfig config = opt("opt-30b");
    Block one = {.s = 1, .n = 2, .gbs = 1, .num_gpu_batches = 1};
    h.gmem = 2 * W + 1e6, h.cmem = 40e9;
    for (int p = 0; p < 2; p++)
        h.ctog_bdw[p] = h.gtoc_bdw[p] = h.ctod_bdw[p] = h.mm_flops[p] = h.bmm_flops[p] = h.cpu_flops[p] = 1e18,
        h.dtoc_bdw[p] = 1e6;
    ASSERT_OK(paper_cost(&cost, &h, &config, &one, &err));
    double wd = 1 - (40e9 - W) / W_ALL;
    CU_ASSERT(fabs(cost.fraction[WD] - wd) < 1e-4);
    CU_ASSERT(fabs(cost.T_gen / (W * wd / 1e6) - 1) < 1e-3);
    CU_ASSERT_STRING_EQUAL(cost.slowest[0], "dtoc^g");
    CU_ASSERT_STRING_EQUAL(cost.slowest[1], "dtoc^p");
    CU_ASSERT_STRING_EQUAL(cost.full[TIER_CPU], "cpu_peak^p");
    CU_ASSERT_PTR_NOT_NULL(strstr(cost.full[TIER_GPU], "gpu_peak^p with mlp_1^p"));
}

// ---------------------------------------------------------------------------------------------------------------
// Any machine
// ---------------------------------------------------------------------------------------------------------------

static double between(uint64_t *seed, double low, double high) {
    return low * pow(high / low, (test_random(seed) + 1) / 2);
}

typedef struct {
    OptConfig config;
    Hardware hardware;
    Block block;
} Case;

/* A machine on which the model is a squeeze, mostly. */
static Case random_case(uint64_t *seed) {
    static const char *const names[] = {"opt-125m", "opt-350m", "opt-1.3b", "opt-2.7b", "opt-6.7b",
                                        "opt-13b",  "opt-30b",  "opt-66b",  "opt-175b"};
    Case c = {.config = opt(names[(int)between(seed, 1, 9.99) - 1]), .hardware = {.name = "random"}};
    double weights = 24. * c.config.h1 * c.config.h1 * c.config.l;
    Hardware *h = &c.hardware;
    c.block.s = (int)between(seed, 1, 1500), c.block.n = (int)between(seed, 1, 500);
    c.block.gbs = (int)between(seed, 1, 200), c.block.num_gpu_batches = (int)between(seed, 1, 20);
    h->gmem = weights * between(seed, .02, 3);
    h->cmem = weights * between(seed, .05, 10);
    h->nmem = weights * between(seed, .1, 100);
    for (int p = 0; p < 2; p++) {
        h->ctog_bdw[p] = between(seed, 1e9, 6e10), h->gtoc_bdw[p] = between(seed, 1e9, 6e10);
        h->dtoc_bdw[p] = between(seed, 1e8, 1e10), h->ctod_bdw[p] = between(seed, 5e7, 1e10);
        h->mm_flops[p] = between(seed, 1e12, 1e15), h->bmm_flops[p] = between(seed, 1e10, 1e14);
        h->cpu_flops[p] = between(seed, 1e9, 1e12);
    }
    return c;
}

/* T of a placement by the rows, infinite where some tier is too small. */
static double rows_T(const Lp *lp, const Case *c, const double *fraction) {
    double x[NVARS] = {0}, T[2] = {0, 0};
    memcpy(x, fraction, NFRACTIONS * sizeof *x);
    for (int i = 0; i < SUM_ROWS; i++) {
        double excess = lp_excess(&lp->row[i], x, NVARS);
        if (i < GPU_ROWS)
            T[i < T_GEN_ROWS] = fmax(T[i < T_GEN_ROWS], excess);
        else if (excess > 1e-9 * fabs(lp->row[i].b))
            return INFINITY;
    }
    return (T[1] + T[0] * (c->block.n - 1)) * c->config.l;
}

/* Three fractions that add up to 1, often at a corner. */
static void random_shares(double share[3], uint64_t *seed) {
    double sum = 0;
    for (int i = 0; i < 3; i++) share[i] = fmax(test_random(seed), 1e-9), sum += share[i];
    for (int i = 0; i < 3; i++) share[i] /= sum;
}

static void the_best_placement_is_one_and_no_other_is_faster(void) {
    uint64_t seed = 1;
    static Lp lp;
    int fits = 0, tried = 0;
    for (int trial = 0; trial < 400; trial++) {
        Case c = random_case(&seed);
        Cost cost = {.T = INFINITY};
        Error err;
        double other[NFRACTIONS];
        bool ok = paper_cost(&cost, &c.hardware, &c.config, &c.block, &err) == 0;
        paper_lp(&lp, &c.hardware, &c.config, &c.block);
        if (ok) {
            for (int f = 0; f < NFRACTIONS; f += 3)
                CU_ASSERT(fabs(cost.fraction[f] + cost.fraction[f + 1] + cost.fraction[f + 2] - 1) < 1e-9);
            for (int f = 0; f < NFRACTIONS; f++) CU_ASSERT(cost.fraction[f] >= 0);
            CU_ASSERT(fabs(rows_T(&lp, &c, cost.fraction) / cost.T - 1) < 1e-9);
            CU_ASSERT(cost.slowest[0][0] && cost.slowest[1][0]);
        }
        for (int i = 0; i < 200; i++) {
            for (int f = 0; f < NFRACTIONS; f += 3) random_shares(other + f, &seed);
            double T = rows_T(&lp, &c, other);
            CU_ASSERT(T == INFINITY || (ok && T >= cost.T * (1 - 1e-9)));
            tried += T < INFINITY;
        }
        fits += ok;
    }
    CU_ASSERT(fits > 100 && fits < 390 && tried > 1000);
}

static void more_memory_or_bandwidth_is_never_worse(void) {
    uint64_t seed = 2;
    int better = 0;
    for (int trial = 0; trial < 300; trial++) {
        Case c = random_case(&seed);
        Cost cost, more;
        Error err;
        int before = paper_cost(&cost, &c.hardware, &c.config, &c.block, &err);
        for (int i = 0; i < 17; i++) {
            Hardware h = c.hardware;
            double *const rate[] = {h.ctog_bdw, h.gtoc_bdw, h.dtoc_bdw, h.ctod_bdw, h.mm_flops, h.bmm_flops, h.cpu_flops};
            *(i == 0 ? &h.gmem : i == 1 ? &h.cmem : i == 2 ? &h.nmem : &rate[(i - 3) / 2][(i - 3) % 2]) *= 1.5;
            int after = paper_cost(&more, &h, &c.config, &c.block, &err);
            CU_ASSERT(before != 0 || after == 0);
            if (before != 0) continue;
            CU_ASSERT(more.T <= cost.T * (1 + 1e-9));
            better += more.T < cost.T * (1 - 1e-6);
        }
    }
    CU_ASSERT(better > 300);
}

/* The bytes that the message says a tier lacks. */
static double lacks(const char *text, const char *tier) {
    char find[40];
    double gib = 0;
    snprintf(find, sizeof find, " %s lacks ", tier);
    const char *at = strstr(text, find);
    return at && sscanf(at + strlen(find), "%lf GiB", &gib) == 1 ? gib * 0x1p30 : 0;
}

static void who_cannot_hold_it_is_named_with_what_is_enough(void) {
    uint64_t seed = 3;
    int count[NTIERS] = {0};
    for (int trial = 0; trial < 600; trial++) {
        Case c = random_case(&seed);
        Cost cost;
        Error err = {0, ""};
        if (paper_cost(&cost, &c.hardware, &c.config, &c.block, &err) == 0) continue;
        CU_ASSERT_EQUAL(err.code, EXIT_USAGE);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "no placement fits: the "));
        CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "--gpu-batch-size"));
        double *const mem[] = {&c.hardware.gmem, &c.hardware.cmem, &c.hardware.nmem};
        for (int t = 0; t < NTIERS; t++) count[t] += lacks(err.text, tier_name[t]) > 0;
        for (int t = 0; t < NTIERS; t++) *mem[t] += lacks(err.text, tier_name[t]);
        ASSERT_OK(paper_cost(&cost, &c.hardware, &c.config, &c.block, &err));
    }
    CU_ASSERT(count[TIER_GPU] > 50 && count[TIER_CPU] > 0 && count[TIER_DISK] > 50);
}

/* By hand, OPT-30B: whatever is placed where, the GPU works on 2 W - wg 2 W + wg W_ALL + H_GBS + 1761607680 (mlp) at least,
 * so 4580179968 bytes with wg = hg = 0: of 4 GiB = 4294967296, 285212672 are missing, 0.265625 GiB. */
static void a_gpu_too_small_for_its_working_memory_is_named(void) {
    Hardware h = round_machine;
    OptConfig config = opt("opt-30b");
    Cost cost;
    Error err = {0, ""};
    h.gmem = 4294967296;
    CU_ASSERT_EQUAL(paper_cost(&cost, &h, &config, &block_30b, &err), -1);
    CU_ASSERT_EQUAL(err.code, EXIT_USAGE);
    CU_ASSERT_PTR_NOT_NULL(
        strstr(err.text, "opt-30b, 512 + 32 tokens, block of 48 x 3: no placement fits: the GPU lacks 0.27 GiB; "));
}

/* With n = 1 the LP does not pay for T_gen, and yet it is the largest of its terms. */
static void one_token_out_costs_no_generation(void) {
    uint64_t seed = 5;
    static Lp lp;
    for (int trial = 0; trial < 100; trial++) {
        Case c = random_case(&seed);
        Cost cost;
        Error err;
        double x[NVARS] = {0}, T_gen = 0;
        c.block.n = 1;
        if (paper_cost(&cost, &c.hardware, &c.config, &c.block, &err) != 0) continue;
        paper_lp(&lp, &c.hardware, &c.config, &c.block);
        memcpy(x, cost.fraction, sizeof cost.fraction);
        for (int i = T_GEN_ROWS; i < GPU_ROWS; i++) T_gen = fmax(T_gen, lp_excess(&lp.row[i], x, NVARS));
        CU_ASSERT(near(cost.T, c.config.l * cost.T_pre));
        CU_ASSERT(near(cost.T_gen, T_gen));
    }
}

/* Rates from low to high. An answer, or one line, and no nonsense; returns the share of those that are lost in rounding. */
static double lost_share(double low, double high, uint64_t seed) {
    int lost = 0, trials = 1000;
    for (int trial = 0; trial < trials; trial++) {
        Case c = random_case(&seed);
        Cost cost;
        Error err = {0, ""};
        Hardware *h = &c.hardware;
        double *const rate[] = {h->ctog_bdw, h->gtoc_bdw,  h->dtoc_bdw, h->ctod_bdw,
                                h->mm_flops, h->bmm_flops, h->cpu_flops};
        for (int i = 0; i < 7; i++)
            for (int p = 0; p < 2; p++) rate[i][p] = between(&seed, low, high);
        int status = paper_cost(&cost, h, &c.config, &c.block, &err);
        CU_ASSERT(status == 0 ? isfinite(cost.T) && cost.T > 0 && isfinite(cost.throughput)
                              : (err.code == EXIT_USAGE || err.code == EXIT_FAILED) && err.text[0]);
        lost += status != 0 && err.code == EXIT_FAILED;
    }
    return (double)lost / trials;
}

static void impossible_machines_get_an_answer_or_a_line(void) {
    CU_ASSERT(lost_share(1e8, 1e16, 6) < .005);
    CU_ASSERT(lost_share(1e6, 1e18, 7) < .03);
    lost_share(1e-9, 1e30, 8); /* the bounds of a hardware file */
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
    {"the rows of OPT-30B are those of A.3 by hand", the_rows_of_opt_30b_are_those_of_a_3_by_hand},
    {"a GPU with room for all gets all", a_gpu_with_room_for_all_gets_all},
    {"what fits nowhere else is read from the disk", what_fits_nowhere_else_is_read_from_the_disk},
    {"the best placement is one and no other is faster", the_best_placement_is_one_and_no_other_is_faster},
    {"more memory or bandwidth is never worse", more_memory_or_bandwidth_is_never_worse},
    {"who cannot hold it is named with what is enough", who_cannot_hold_it_is_named_with_what_is_enough},
    {"a GPU too small for its working memory is named", a_gpu_too_small_for_its_working_memory_is_named},
    {"one token out costs no generation", one_token_out_costs_no_generation},
    {"impossible machines get an answer or a line", impossible_machines_get_an_answer_or_a_line},
    CU_TEST_INFO_NULL,
};
