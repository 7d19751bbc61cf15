/* test_gpu.c: how the program finds a GPU: a copy of it with different files beside it, with and without a driver. And how
 * scripts/gpu_check.sh, which has one chance on a borrowed GPU, does when its programs hang, crash and are killed; what it
 * computes; and the page for readers with a GPU, docs/GPU.md. test_cli.c has the program on a GPU that it has found. */
#include "tests/started.h"

/* A copy of the program has a library for GPUs beside it, with the stub of a driver or without one. */
TEST(a_program_finds_its_library_or_says_what_is_missing) {
    static const struct {
        const char *library;
        bool driver;
        int status;
        const char *said;
    } cases[] = {
        {"", true, 2, "flexgen_cuda.so; build it where nvcc is installed"},
        {"README.md", false, 2, "nvidia-smi"}, /* nothing is loaded without a driver, or where the real one has no GPU */
        {"README.md", true, 1, "invalid ELF header; install the CUDA toolkit"},
        {"${FLEXGEN_EMULATED}_cuda.so", true, 0, "emulated GPU"}};
    const char *bin = keep(xstrdup(getenv("FLEXGEN_BIN")));
    char command[1000], path[1000];
    for (int i = 0; i < (getenv("FLEXGEN_EMULATED") ? 4 : 3); i++) {
        const char *dir = temp_dir();
        snprintf(command, sizeof command,
                 "cp \"$FLEXGEN_BIN\" %s/flexgen && { [ -z '%s' ] || cp \"%s\" %s/flexgen_cuda.so; }", dir,
                 cases[i].library, cases[i].library, dir);
        CHECK(system(command) == 0);
        snprintf(path, sizeof path, "LD_LIBRARY_PATH=%s", cases[i].driver ? getenv("FLEXGEN_DRIVER") : "");
        with.set[0] = path;
        setenv("FLEXGEN_BIN", in_dir(dir, "flexgen"), 1);
        const Result r = flexgen(
            "generate --device cuda --model models/opt-tiny --prompt x --max-tokens 1 --gpu-batch-size 1 "
            "--num-gpu-batches 1 --percent 100 0 100 0 100 0");
        setenv("FLEXGEN_BIN", bin, 1);
        assert_ends(r, cases[i].status, cases[i].said);
    }
}

// ---- scripts/gpu_check.sh, with programs that are shell scripts -----------------------------------------------------

/* bench_gpu measures one thing, hangs, and takes its time to go; meanwhile it holds the GPU. */
static const char stub_bench[] =
    "#!/bin/bash\n"
    "case \"$*\" in\n"
    "waits) echo launch 2.5 ;;\n"
    "*) trap 'sleep .3; rm held; exit' TERM; touch held; echo h2d 55; while :; do sleep .05; done ;;\n"
    "esac\n";

/* flexgen: one run hangs when it has measured, one crashes and leaves a process behind, one is killed. */
static const char stub_flexgen[] =
    "#!/bin/bash\n"
    "for json; do [[ $json == *.json ]] && break; done\n"
    "case $json in\n"
    "*/gpu.json) [ ! -e held ] || touch was-held; cp out.tar.gz before-gpu.tar.gz\n"
    "  printf '{\"model\": \"opt-6.7b\",\\n\"s\": 512,\\n\"n\": 32,\\n\"gbs\": 64,\\n\"num_gpu_batches\": "
    "1,\\n\"throughput\": "
    "777,\\n\"prefill_s\": 1,\\n\"decode_s\": 1,\\n\"total_s\": 2}\\n' | sed 's/^{/{\\n/' >\"$json\"; sleep 1000 ;;\n"
    "*/limited.json) (trap '' TERM; exec sleep 1000) & echo $! >left; kill -SEGV $$ ;;\n"
    "*/offload.json) ! grep -q ') [^Z]' /proc/$(<left)/stat || touch was-left; kill -KILL $$ ;;\n"
    "esac\n";

TEST(every_step_keeps_its_time_and_its_figures_whatever_the_others_do) {
    static const char *const done[] = {
        "chmod 755 build/[bfn]* && ! PATH=$PWD/build:$PATH CUDA_HOME=$PWD/build BUILD=build TMPDIR=$PWD GRACE=2 "
        "scripts/gpu_check.sh performance out.tar.gz 20 bounds_gpu gpu limited offload waits >said 2>errors",
        "tar xzf out.tar.gz && cd performance",
        "grep -q '\"name\": \"bounds_gpu\".*\"exit_status\": 124.*\"note\": \"ended after' performance/summary.json",
        "grep -q '\"name\": \"gpu\".*\"exit_status\": 124' performance/summary.json",
        "grep -q '\"name\": \"limited\".*\"exit_status\": 139' performance/summary.json",
        "grep -q '\"name\": \"offload\".*\"exit_status\": 137' performance/summary.json",
        "grep -q '\"name\": \"waits\".*\"exit_status\": 0, \"ok\": true' performance/summary.json",
        "grep -q '\"failed\": 4' performance/summary.json",
        "grep -q '\"value\": 55,\\|\"value\": 55}' performance/figures.json",
        "grep -q '\"value\": 777' performance/figures.json", /* measured before the step was ended */
        "grep -q '\"value\": 2.5' performance/figures.json",
        "mkdir early && tar xzf before-gpu.tar.gz -C early && grep -q '\"value\": 55' early/performance/figures.json",
        "! grep -q 'not ended' performance/summary.json",
        "test ! -e held && test ! -e was-held", /* a step that was ended is gone before the next one begins */
        "test -e left && test ! -e was-left",   /* and so is what it left running */
        "grep -q '^gpu  *opt-6.7b all on the GPU.*at most [0-9.]* s' said"};
    static const char nvcc[] = "#!/bin/sh\necho release 13.0,\n", nvidia_smi[] = "#!/bin/sh\necho CUDA Version: 13.0\n";
    const char *checked = temp_dir();
    char line[1000];
    snprintf(line, sizeof line,
             "cp -r scripts '%s' && cd '%s' && mkdir -p build/include build/lib64 && touch build/include/cublasLt.h "
             "build/lib64/libcublasLt.so.13 build/lib64/libcudart_static.a",
             checked, checked);
    CU_ASSERT_FATAL(system(line) == 0);
    write_file(checked, "build/bench_gpu", stub_bench, strlen(stub_bench));
    write_file(checked, "build/flexgen", stub_flexgen, strlen(stub_flexgen));
    /* a machine that will do; the rest of what may be asked of it is test_rehearsal.c's */
    write_file(checked, "build/nvcc", nvcc, strlen(nvcc));
    write_file(checked, "build/nvidia-smi", nvidia_smi, strlen(nvidia_smi));
    for (size_t i = 0; i < sizeof done / sizeof *done; i++) {
        snprintf(line, sizeof line, "cd '%s' && { %s; } >/dev/null 2>&1", checked, done[i]);
        const bool right = system(line) == 0;
        if (!right) fprintf(stderr, "\n    not so: %s\n", done[i]);
        CU_ASSERT(right);
    }
}

/* The step that begins with mini.cu, where nvcc and cc are scripts that take the emulated program and the suite's own for
 * what they compiled, and compute-sanitizer one that runs a program and finds nothing. Of the 24 tokens there are 6. The
 * second machine writes other tokens, and on the third, which writes those of mini.c, the sanitizer finds an error. */
TEST(the_first_step_compares_mini_with_itself_on_the_GPU) {
    static const struct {
        const char *mini, *errors;
        bool ok;
    } machines[] = {{"exec $MINI_EMULATED \"$@\"", "0", true},
                    {"${0%gpu}cpu \"$@\" | sed 's/: .[0-9].*/: [1, 2, 3]}/'", "0", false},
                    {"exec ${0%gpu}cpu \"$@\"", "1", false}};
    if (!getenv("MINI_EMULATED")) return;
    setenv("ASAN_OPTIONS", "detect_leaks=0", 1); /* mini leaves its memory to the system when it ends */
    setenv("MINI_EMULATED", keep(realpath(getenv("MINI_EMULATED"), NULL)), 1);
    setenv("MINI_BIN", keep(realpath(getenv("MINI_BIN"), NULL)), 1);
    for (size_t m = 0; m < sizeof machines / sizeof *machines; m++) {
        const char *checked = temp_dir();
        char line[1500], text[400];
        setenv("checked", checked, 1);
        CU_ASSERT_FATAL(
            system("cp -r scripts models mini.c mini.cu $checked && cd $checked && mkdir -p include lib64 && touch "
                   "include/cublasLt.h lib64/libcublasLt.so.13 lib64/libcudart_static.a && "
                   "grep -q -e '--max-tokens 24' scripts/gpu_check.sh && "
                   "sed -i 's/--max-tokens 24/--max-tokens 6/' scripts/gpu_check.sh") == 0);
        const char *const programs[][2] = {
            {"nvcc", "case $* in *mini.cu*) for to; do :; done; cp mini-stub $to ;; *) echo release 13.0, ;; esac\n"},
            {"cc", "[ \"$1 $2 $3\" = '-O3 mini.c -lm' ] && for to; do :; done && cp $MINI_BIN $to\n"},
            {"nvidia-smi", "case $* in *query*) echo one, 8.6, 580.1 ;; *) echo CUDA Version: 13.0 ;; esac\n"},
            {"mini-stub", machines[m].mini},
            {"compute-sanitizer", "shift 4; \"$@\"; echo ERROR SUMMARY: $ERRORS errors; exit $((9 * ERRORS))\n"}};
        for (size_t p = 0; p < sizeof programs / sizeof *programs; p++) {
            const int len = snprintf(text, sizeof text, "#!/bin/bash\n%s\n", programs[p][1]);
            write_file(checked, programs[p][0], text, len);
            CHECK(chmod(in_dir(checked, programs[p][0]), 0755) == 0);
        }
        snprintf(
            line, sizeof line,
            "cd $checked && ERRORS=%s CC=cc PATH=$PWD:$PATH CUDA_HOME=$PWD TMPDIR=$PWD scripts/gpu_check.sh correctness "
            "a.tar.gz 200 card mini >said 2>&1; tar xzf a.tar.gz && grep -q '\"name\": \"mini\".*\"ok\": %s,' "
            "correctness/summary.json && grep -q 'alike: ' correctness/02-mini.log",
            machines[m].errors, machines[m].ok ? "true" : "false");
        const bool right = system(line) == 0;
        if (!right) fprintf(stderr, "\n%s", (char *)keep(contents(in_dir(checked, "said"), NULL)));
        CU_ASSERT(right);
    }
}

/* Runs a shell command with `line` as $line, and gives back what it printed; its exit status has to be 0. */
static char *shell(const char *line, const char *command) {
    static char said[1 << 16];
    setenv("line", line, 1);
    setenv("scratch", temp_dir(), 1);
    FILE *f = popen(command, "r");
    CHECK(f);
    said[fread(said, 1, sizeof said - 1, f)] = 0;
    const int status = pclose(f);
    if (status) fprintf(stderr, "\n   %s: %s\n", line, said);
    CU_ASSERT_EQUAL(status, 0);
    return said;
}

/* The table of a part adds up, and every step that it names is there and says what it does. */
TEST(the_steps_of_gpu_check_fit_their_time) {
    static const char *const parts[] = {"correctness", "performance"};
    for (int p = 0; p < 2; p++)
        shell(parts[p],
              "sed -n \"/^$line=\\\"/,/\\\"$/p\" scripts/gpu_check.sh | grep ' [0-9]' >$scratch/steps\n"
              "! { awk '{ s += $2 } !/ : [a-zA-Z]/; END { if (s != 530) print s, \"s\" }' $scratch/steps\n"
              "while read -r step rest; do grep -q \"^step_$step()\" scripts/gpu_check.sh || echo no $step\n"
              "done <$scratch/steps; } | grep .");
}

// ---- gpu_figures.awk: what a run of OPT-6.7B did beside the bounds of its machine -----------------------------------

/* By hand, of 16 prompts with s = 512 and n = 32, in GB, TFLOP and seconds; l = 32, h1 = 4096.
 *   weights  32 x 12 x 4096^2 numbers of 2 bytes, or of 36 / 64 in groups, and 32 x 13 x 4096 x 2 bytes of biases and norms
 *            are 12.88830976 or 3.627286528; the table of the head is 50272 x 4096 x 2 bytes, .411828224
 *   decode   31 steps read weights and table, and of 16 x (31 x 512 + 31 x 16) = 261888 tokens 32 x 2 x 4096 numbers each
 *   prefill  16 x (512 x 2 x 32 x 12 x 4096^2 + 32 x 2 x 512^2 x 4096) = 106.652627894
 *   offload  Each stage takes as long as its slowest lane. Prefill computes for 106.652627894 / 90 s. Half of the weights
 *            take .257766195 s, at 25 GB/s. K and V of 16 t tokens, which the CPU reads at 17 GB/s, take 4.93447529e-4 t s:
 *            in ten steps less than the weights do, in those from t = 523 to 543 more. These t are 11193 together.
 *            On the other machine, whose link down is slow and whose other copies take no time, prefill stores K and V of
 *            8192 tokens at 2 GB/s, and a step computes for 16 x 2 x 32 x 12 x 4096^2 / 90e12 s */
TEST(figures_of_a_gpu_are_those_of_a_hand_calculation) {
    static const char *const bounds[] = {"h2d 25\nd2h 20\nd2d 800\nplain_read 17\ngemm_large 90000\ngemm_prefill 70000\n",
                                         "h2d 1e6\nd2h 2\nd2d 800\nplain_read 1e6\ngemm_large 90000\ngemm_prefill 70000\n"};
    static const char *const runs[] = {"all-fp16-8.json", "all-w4c4-8.json", "offload.json"};
#define ALL_GPU "opt-6.7b, all on the GPU, 16 x 512 + 32, "
#define OFFLOAD "opt-6.7b, 8 GiB, 8 x 2, 512 + 32: time"
    static const struct {
        int machine;
        const char *name;
        double value, bound;
    } expected[] = {{0, ALL_GPU "fp16: decode", (31 * 13.300137984 + 261888 * 524288e-9) / 4, 800},
                    {0, ALL_GPU "w4c4: decode", (31 * 4.039114752 + 261888 * 147456e-9) / 4, 800},
                    {0, ALL_GPU "fp16: prefill", 106.652627894 / 2, 90},
                    {0, ALL_GPU "w4c4: prefill", 106.652627894 / 2, 90},
                    {0, OFFLOAD, 6, 1.18502920 + 10 * .257766195 + 11193 * 4.93447529e-4},
                    {1, OFFLOAD, 6, 8192 * 524288e-9 / 2 + 31 * .00229064922}};
    char text[1000];
    const char *checked = temp_dir();
    for (int i = 0; i < 3; i++) {
        const char *packed = i == 1 ? "true" : "false";
        const int len = snprintf(
            text, sizeof text,
            "{\n  \"model\": \"opt-6.7b\",\n  \"s\": 512,\n  \"n\": 32,\n  \"gbs\": 8,\n  \"num_gpu_batches\": 2,\n"
            "  \"wc\": 0.5,\n  \"cg\": 0,\n  \"compress_weight\": %s,\n  \"compress_cache\": %s,\n"
            "  \"throughput\": 85.3,\n  \"prefill_s\": 2,\n  \"decode_s\": 4,\n  \"total_s\": 6\n}\n",
            packed, packed);
        write_file(checked, runs[i], text, len);
    }
    snprintf(text, sizeof text,
             "f=$PWD/scripts/gpu_figures.awk; cd %s && awk -v card=card -v memory='8 GiB' -f $f bounds-gpu *.json >table",
             checked);
    for (int i = 0; i < 6; i++) {
        const char *machine = bounds[expected[i].machine];
        const cJSON *one;
        double value = NAN, bound = NAN;
        write_file(checked, "bounds-gpu", machine, strlen(machine));
        CU_ASSERT_EQUAL(system(text), 0);
        cJSON *json = keep(cJSON_Parse(keep(contents(in_dir(checked, "figures.json"), NULL))));
        cJSON_ArrayForEach(one, cJSON_GetObjectItem(json, "figures")) {
            if (strcmp(cJSON_GetStringValue(cJSON_GetObjectItem(one, "name")), expected[i].name) != 0) continue;
            value = cJSON_GetNumberValue(cJSON_GetObjectItem(one, "value"));
            bound = cJSON_GetNumberValue(cJSON_GetObjectItem(one, "bound"));
            break;
        }
        const bool right = fabs(value / expected[i].value - 1) < 1e-5 && fabs(bound / expected[i].bound - 1) < 1e-5;
        if (!right)
            fprintf(stderr, "\n    %s: %g of %g, expected %g of %g", expected[i].name, value, bound, expected[i].value,
                    expected[i].bound);
        CU_ASSERT(right);
    }
}

// ---- docs/GPU.md ----------------------------------------------------------------------------------------------------

/* Its commands, on the emulation and with less to do: the shipped model for larger ones, fewer tokens,
 * one small batch, a machine from a file for this one. Profiling is only parsed. */
TEST(the_commands_of_the_page_for_readers_with_a_gpu_run) {
    static const char less[] =
        "command=$(printf %s \"$line\" | sed -e \"s|/tmp/|$scratch/|g\" -e \"s|^    ./flexgen|'$program'|\"); case $line "
        "in "
        "*' profile '*) command=\"$command --help\" ;; *' policy '*|*' sim '*) ;; "
        "*) command=$(printf %s \"$command\" | sed -e 's|--model opt-1[^ ]*|--model models/opt-tiny|' -e 's|-len 256|-len "
        "24|' "
        "-e 's|-len 32|-len 2|' -e 's|--max-tokens [0-9]*|--max-tokens 2|'); case $line in *percent*) ;; "
        "*bench*) command=\"$command --hardware hardware/laptop.json --num-prompts 4\" ;; "
        "*) command=\"$command --hardware hardware/laptop.json\" ;; esac ;; esac; eval \"$command\" 2>&1";
    const char *emulated = getenv("FLEXGEN_EMULATED");
    char line[600];
    int n = 0;
    FILE *page = fopen("docs/GPU.md", "r");
    CHECK(page);
    setenv("program", emulated ? emulated : getenv("FLEXGEN_BIN"), 1);
    if (emulated) setenv("LD_LIBRARY_PATH", getenv("FLEXGEN_DRIVER"), 1);
    while (fgets(line, sizeof line, page)) {
        if (strncmp(line, "    ./flexgen ", 14) != 0) continue;
        line[strcspn(line, "\n")] = 0;
        CU_ASSERT_PTR_NULL(strchr(line, '\\')); /* it does not go on in the next line, which is not read */
        const char *said = shell(line, less);
        if (strstr(line, " sim ")) { /* what the page says of it */
            const char *rate = strstr(said, "generation throughput ");
            char figure[64];
            snprintf(figure, sizeof figure, "%.0f token/s", rate ? atof(rate + strlen("generation throughput ")) : NAN);
            shell(figure, "grep -w \"$line\" docs/GPU.md");
        }
        n++;
    }
    fclose(page);
    unsetenv("LD_LIBRARY_PATH");
    CU_ASSERT(n >= 7);
}

/* The files that it names are there, and the lines that it explains are the program's. */
TEST(what_the_page_for_readers_with_a_gpu_names_is_there) {
    CU_ASSERT_STRING_EQUAL(shell("",
                                 "grep -oE '\\b(hardware|scripts|models)/[a-z0-9_.-]+[a-z0-9]' docs/GPU.md | sort -u | "
                                 "while read -r f; do [ -e \"$f\" ] || echo \"$f\"; done"),
                           "");
    CU_ASSERT_STRING_EQUAL(shell("",
                                 "sed -n 's/^| `\\([^`]*\\)` |.*/\\1/p' docs/GPU.md | while read -r said; do "
                                 "cat *.c *.cu */*.c | tr -d '\\n\"' | tr -s ' ' | sed 's/%s tier needs/GPU tier needs/' | "
                                 "grep -qF \"$said\" || echo \"$said\"; done"),
                           "");
    CU_ASSERT(atoi(shell("", "grep -c '^| `' docs/GPU.md")) >= 9);
}
