/* test_cli.c: the program as its users meet it: exit status, standard output, one line on standard error, files left
 * behind.
 *
 * Runs the built ./flexgen, or the one that FLEXGEN_BIN names. Of what is refused there is one row for each place of the
 * program that refuses: test_flags.c has all that the command line can be wrong in, the suites checkpoint, tokenizer, job,
 * eval, hardware and quantize have all that a file can be. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include "tests/started.h"
#include "tests/written.h"

#define TINY " --model models/opt-tiny"
/* What is left open is searched for on a machine of numbers: measuring this one takes its time. */
#define LAPTOP " --hardware hardware/laptop.json"
#define GENERATE "generate" TINY LAPTOP
#define TEN_PROMPTS GENERATE " --prompts @ten --max-tokens 12"
#define ALL_GPU " --percent 100 0 100 0 100 0"
#define ALL_CPU " --percent 0 100 0 100 0 100"
#define ALL_DISK " --percent 0 0 0 0 0 0"

// ---- Files and results ----------------------------------------------------------------------------------------------

/* Writes a file, which command lines call @name. */
static void give(const char *name, const char *text) {
    open_directories();
    write_file(capture, name, text, strlen(text));
}

static char *text_of(const char *name) { return keep(contents(in_dir(capture, name), NULL)); }
static bool is_there(const char *name) { return !access(in_dir(capture, name), F_OK); }

static void give_ten_prompts(void) {
    give("ten",
         "Once upon a time\nThe dog\n\nTom and Lily went to the park.\nShe said: \"Look!\"\nA big red\n"
         "One day\r\nHe was\nThe little bird could not\nMom\nI am caf\xC3\xA9 \xF0\x9F\x98\x80\n");
}

static int count_lines(const char *text) {
    int n = 0;
    for (; *text; text++) n += *text == '\n';
    return n;
}

static cJSON *parsed(const char *text, size_t len) {
    Error err;
    cJSON *json = json_parse(text, len, &err);
    ASSERT_OK(!json);
    return keep(json);
}

static cJSON *json_of(const char *name) {
    const char *text = text_of(name);
    return parsed(text, strlen(text));
}

/* The n-th line of a text as JSON; NULL: there is no further one. */
static cJSON *json_line(const char *text, int n) {
    while (n-- > 0 && (text = strchr(text, '\n'))) text++;
    if (!text || !*text) return NULL;
    const char *end = strchr(text, '\n');
    CU_ASSERT_PTR_NOT_NULL_FATAL(end);
    return parsed(text, (size_t)(end - text));
}

/* Checks that all lines are whole completions, and counts them. */
static int count_completions(const char *text) {
    int n = 0;
    for (const cJSON *line; (line = json_line(text, n)); n++) CU_ASSERT_EQUAL(cJSON_GetArraySize(line), 5);
    return n;
}

/* What is at "a.b.c" of an object, or NULL. */
static const cJSON *item(const cJSON *object, const char *path) {
    char names[100], *rest = names, *name;
    snprintf(names, sizeof names, "%s", path);
    while ((name = strsep(&rest, "."))) object = cJSON_GetObjectItemCaseSensitive(object, name);
    return object;
}

static double number(const cJSON *object, const char *path) {
    const cJSON *found = item(object, path);
    if (!cJSON_IsNumber(found)) fprintf(stderr, "\n    no number %s\n", path);
    CU_ASSERT_FATAL(cJSON_IsNumber(found));
    return found->valuedouble;
}

static const char *string(const cJSON *object, const char *path) {
    CU_ASSERT_FATAL(cJSON_IsString(item(object, path)));
    return item(object, path)->valuestring;
}

static bool matches(const cJSON *object, const char *name, char how, const char *value) {
    const cJSON *found = item(object, name), *other = item(object, value);
    const double x = cJSON_IsNumber(found) ? found->valuedouble : NAN, wanted = other ? other->valuedouble : atof(value);
    if (cJSON_IsBool(found)) return !strcmp(value, cJSON_IsTrue(found) ? "true" : "false");
    if (cJSON_IsString(found)) return !strcmp(value, found->valuestring);
    if (!other && strspn(value, "+-.e0123456789") < strlen(value)) return false; /* a name that is not there */
    if (how == '=' || how == '~') return fabs(x - wanted) <= (how == '=' ? 1e-12 : 1e-5) * fabs(wanted);
    return how == '>' ? x > wanted : how == '<' ? x < wanted : x >= 0;
}

/* Each word is a NAME, of a number from 0; NAME=VALUE, of a number, a text, true or false; NAME~VALUE, NAME>VALUE or
 * NAME<VALUE. A value may be another name. */
__attribute__((format(printf, 2, 3))) static void assert_figures(const cJSON *object, const char *format, ...) {
    char line[600], *words[40];
    va_list list;
    va_start(list, format);
    vsnprintf(line, sizeof line, format, list);
    va_end(list);
    split_words(line, words, 40);
    for (char **word = words; *word; word++) {
        const size_t len = strcspn(*word, "<>=~");
        const char how = (*word)[len];
        (*word)[len] = 0;
        const bool right = matches(object, *word, how, *word + len + (how != 0));
        if (!right) fprintf(stderr, "\n    %s is not as expected: %s\n", *word, *word + len + (how != 0));
        CU_ASSERT(right);
    }
}

static cJSON *figures_of(Result r) { return parsed(r.out, r.out_len); }
#define FIGURES(...) figures_of(flexgen_done(__VA_ARGS__))

// ---- A small checkpoint to spoil ------------------------------------------------------------------------------------

/* Makes the directory @small with a model of two layers, which is so many numbers wide. A head is of its own, though
 * config.json ties it to the token table. */
static void give_model(int width, bool with_head) {
    const Model model = {
        {"", 2, width, 64, 4, 1024, 64, width, true, true, 2, {0}, 0, 0, 1}, F16, "model.", .head = with_head, F16, NULL};
    open_directories();
    mkdir(in_dir(capture, "small"), 0777);
    write_model(in_dir(capture, "small"), &model);
    copy_file("tests/golden/tokenizer", in_dir(capture, "small"), "vocab.json");
    copy_file("tests/golden/tokenizer", in_dir(capture, "small"), "merges.txt");
}

// ---- Wrong use ------------------------------------------------------------------------------------------------------

#define POLICY "policy --model opt-30b"
#define ON_T4 " --hardware hardware/t4.json"
#define ON_PAPER POLICY ON_T4 " --cost-model paper --gpu-batch-size 48 --num-gpu-batches 3"
#define EVAL "eval" TINY LAPTOP
#define STORIES EVAL " --perplexity models/opt-tiny/stories.txt --window 64 --json -"

/* Nothing is touched before everything that can be refused has been, and nothing that is there without being told. */
TEST(what_cannot_be_done_is_refused_in_one_line_and_changes_nothing) {
#define A_DIRECTORY "; expected a Hugging Face directory, with config.json"
#define OR_A_NAME "; expected a Hugging Face directory, or one of opt-125m, opt-350m"
#define NO_GROUPS                                                                                                      \
    "have 32 and 64 rows ... whole groups of 64 ... leave the weights unpacked ... --compress-cache still packs a KV " \
    "cache"
    static const struct {
        const char *args;
        int status;
        const char *said;
    } rows[] = {
        {"--model models/opt-tiny", 2, "unknown command --model"},
        {"generate", 2, "--model is missing"},
        /* models */
        {"generate --model opt-125m --prompt a", 2, "--model opt-125m: is a name ... need a model's directory"},
        {"quantize --model opt-125m --output x", 1, "opt-125m: there is no such directory" A_DIRECTORY},
        {"generate --model models/none --prompt a", 1, "models/none: there is no such directory" A_DIRECTORY},
        {"policy --model opt-1t" ON_T4, 2, "opt-1t: there is no such directory" OR_A_NAME},
        {"policy --model Makefile/none" ON_T4, 2, "Makefile/none: Not a directory" OR_A_NAME},
        /* lengths */
        {"bench --model models/opt-tiny --prompt-len 8 --gen-len 2-510", 2,
         "--gen-len 510: expected at most 513 ... 512 positions"},
        {"policy --model opt-125m" LAPTOP " --prompt-len 2040 --gen-len 9", 0, ""}, /* the last token takes no position */
        {"policy --model opt-125m" LAPTOP " --prompt-len 2040 --gen-len 10", 2, "at most 2049 together ... 2048"},
        {ON_PAPER " --prompt-len 2048 --gen-len 2", 2, "at most 2049 together ... 2048"},
        {"bench --model opt-125m" ON_T4 " --num-prompts 1048576", 2, "1048576 prompts ... are over 268435456 tokens"},
        {"bench --model opt-125m" ON_T4 " --gpu-batch-size 1048576", 2, "tier needs ... lower --gpu-batch-size"},
        /* machines */
        {"bench --model opt-125m --hardware x", 2, "x: cannot open"},
        {"bench --model opt-125m --device sim --hardware none.json", 2, "none.json: cannot open"},
        {"bench --model opt-125m" ON_T4 " --with ctog=1e9", 2, "--with ctog=1e9 ... KEY=NUMBER"},
        {"bench --model opt-125m --device sim" ON_T4 " --nodes 13", 2, "13 stages ... 12 layers"},
        {"generate" TINY " --prompt a --hardware none.json", 2, "none.json: cannot open"},
        {POLICY " --hardware none.json --cost-model paper --gpu-batch-size 4 --num-gpu-batches 3", 2,
         "none.json: cannot open"},
        {"profile --device sim", 2, "--device sim ... only bench"},
        /* what does not fit, or takes too long */
        {GENERATE " --prompt a --gpu-mem 1K", 2, "GPU tier needs ... its largest part is ... --gpu-mem"},
        {GENERATE " --prompt a --cpu-mem 16", 2, "CPU tier needs ... its largest part is ... --cpu-mem"},
        {GENERATE " --prompt a --disk-mem 0 --percent 100 0 0 0 100 0", 2,
         "disk tier needs ... its largest part is ... --disk-mem"},
        {GENERATE " --prompt a --max-latency 1e-6", 2, "within 1e-06 s ... the smallest takes ... --max-latency"},
        {POLICY ON_T4 " --disk-mem 0 --cpu-mem 1G", 2, "--gpu-mem"},
        {POLICY ON_T4 " --max-latency 0.5 --frontier", 2, "within 0.5 s ... --max-latency"},
        {POLICY ON_T4 " --gpu-batch-size 48 --num-gpu-batches 3" ALL_CPU " --max-latency 9", 2,
         "within 9 s ... --max-latency"},
        {"policy --model opt-175b" ON_T4 " --cost-model paper --gpu-batch-size 4800 --num-gpu-batches 3", 2,
         "opt-175b, 512 + 32 tokens, block of 4800 x 3: no placement fits: the GPU lacks 329.25 GiB ... disk lacks"},
        /* prompts and texts */
        {"generate" TINY " --prompts @prompts --strict", 1, "prompts line 2: the id 7 is that of line 1 ... unique"},
        {"generate" TINY " --prompts @", 1, "directory"},
        {"generate" TINY " --prompts no/such", 1, "no/such ... check the path"},
        {EVAL " --perplexity /dev/null", 1, "/dev/null"},
        {EVAL " --last-word @words", 1, "words line 2"},
        {EVAL " --last-word /dev/null", 1, "/dev/null: no lines; expected JSON lines"},
        {EVAL " --score no/such", 1, "no/such ... check the path"},
        {EVAL " --score @words --output @old", 2, "old ... --resume ... --overwrite"},
        {EVAL " --score @words --resume", 2, "--resume ... --output"},
        /* compression */
        {"quantize --model @small --output @copies/two", 2, NO_GROUPS},
        {"generate --model @small --prompt a" LAPTOP " --compress-weight", 2, NO_GROUPS},
        {"bench --model @small --prompt-len 6" LAPTOP " --compress-cache", 2,
         "--compress-cache: heads of 8 numbers ... multiples of 16 ... leave it out: --compress-weight still packs the "
         "weights"},
        {"policy --model @small --prompt-len 6" LAPTOP " --allow-compression", 2,
         "--allow-compression: heads of 8 numbers"},
        {"quantize --model @copies/one --output @copies/two", 2, "copies/one ... packed already"},
        {"eval --model @copies/one --perplexity README.md" LAPTOP " --compress-weight --bits 3", 2,
         "--bits ... are packed; name the model that it was made from"},
        /* outputs */
        {"quantize" TINY " --output models/opt-tiny", 2, "--output models/opt-tiny ... not empty"},
        {GENERATE " --prompt a --output @old", 2, "old ... --resume ... --overwrite"},
        {GENERATE " --prompt a --output @old --overwrite --gpu-mem 1K", 2, "--gpu-mem"},
        {GENERATE " --prompt a --resume", 2, "--resume ... --output"},
        {GENERATE " --prompt a --resume --output /dev/stdout", 2, "--resume: standard output has no journal"},
        {"profile --output @old --gpu-mem 1K --offload-dir no/such", 2, "--offload-dir no/such ... directory"},
        {ON_PAPER " --json /nonexistent/x", 1, "--json /nonexistent/x"},
        {GENERATE " --prompt a --trace /nonexistent/x", 1, "--trace /nonexistent/x"},
        {GENERATE " --prompt a --output no/such/file", 1, "--output no/such/file ... No such file"},
        {GENERATE " --prompt a --output @", 1, "--output ... directory"},
        {GENERATE " --prompt a --output /dev/full", 1, "/dev/full ... No space left"},
        {GENERATE ALL_DISK " --prompt a --offload-dir Makefile", 1, "offload ... Makefile ... --offload-dir"},
    };
    give("prompts", "{\"prompt\": \"a\", \"id\": 7}\n{\"prompt\": \"b\", \"id\": 7}\n");
    give("old", "precious\n");
    give("words", "{\"text\": \"a b\"}\nhello\n");
    give_model(32, false);
    CHECK(!mkdir(in_dir(capture, "copies"), 0777));
    flexgen_done("quantize" TINY " --output @copies/one");
    for (size_t i = 0; i < COUNT(rows); i++) assert_ends(flexgen("%s", rows[i].args), rows[i].status, rows[i].said);
    assert_ends(flexgen("generate" TINY " --prompt '%03000d'", 0), EXIT_FAILED, "--prompt: ... takes 512 ... shorten");
    with.input = offload;
    assert_ends(flexgen("generate" TINY " --prompts -"), EXIT_FAILED, "standard input ... directory");
    CU_ASSERT_STRING_EQUAL(text_of("old"), "precious\n");
    CU_ASSERT(!is_there("old.journal") && count_files(in_dir(capture, "copies")) == 1);
    flexgen_done(GENERATE " --prompt a --max-tokens 2 --output @old --overwrite");
    CU_ASSERT_EQUAL(count_completions(text_of("old")), 1);
}

TEST(help_goes_to_standard_output_and_names_every_flag) {
    static const char *const asked[] = {"help", "--help", "bench --help"};
    for (int i = 0; i < 3; i++) {
        const Result r = flexgen_done("%s", asked[i]);
        CU_ASSERT(shows(
            r.out, "flexgen generate ... flexgen bench ... flexgen quantize ... --percent ... --offload-dir ... --stop"));
        CU_ASSERT_EQUAL(r.err_len, 0);
    }
    const Result r = flexgen(" ");
    CU_ASSERT(r.status == EXIT_USAGE && r.out_len == 0 && shows(r.err, "flexgen generate"));
}

/* Of what few people have more than one of, one is not counted as many. The line under the plan counts the cache wherever
 * it rests, as the table above it does. */
TEST(what_was_done_is_told_in_words) {
#define WINDOWS EVAL " --perplexity models/opt-tiny/stories.txt --threads 1 --window "
#define KV_CACHE "KV cache ... 76.50 ... KV cache 76.50 MiB, by A.2.1's estimate"
#define ON_A_SIM "bench --model opt-125m --device sim" ON_T4 " --gpu-batch-size 2 --num-gpu-batches 2"
    static const struct {
        const char *args, *out, *err;
    } rows[] = {
        {WINDOWS "2 --limit 1", "1 token in 1 window of 2,  ... , 1 thread, ", ""},
        {WINDOWS "5 --limit 1", "4 tokens in 1 window of 5,  ... , 1 thread, ", ""},
        {WINDOWS "4 --limit 2", "6 tokens in 2 windows of 4,  ... , 1 thread, ", ""},
        {EVAL " --last-word @words", "last word: accuracy 1.0000 ... : 1 line\n", ""},
        {GENERATE " --prompt a --max-tokens 1 --stop x --stop '\\n'", "",
         "--stop \\n: is taken with its backslash; if it is an escape, write $'\\n'"},
        {GENERATE " --prompts @long --max-tokens 3 --truncate", "\"finish_reason\": \"length\"",
         "1 of 2 prompts truncated: only the last tokens were taken"},
        {GENERATE " --prompt a --max-tokens 1 --verbose", "", "1 batch in flight, 1 sweep; ... 1 prompt, 1 token in "},
        {ON_A_SIM ALL_GPU, "", KV_CACHE},
        {ON_A_SIM ALL_CPU, "", KV_CACHE},
        {ON_A_SIM ALL_DISK, "", KV_CACHE},
        {ON_PAPER, "T_pre ... bound by comp^p ... ctog^g ... gpu_peak^p", ""},
        {"policy --model opt-6.7b" ON_T4 " --nodes 2",
         "opt-6.7b, s 512, n 32, on: T4 16 GB ... flights x block ... 1 machine ... 2 machines, pipeline ... 2 machines, "
         "without offloading",
         ""},
        /* a study needs no whole groups */
        {"eval --model @small --perplexity README.md" LAPTOP " --limit 1 --compress-weight --compress-cache --group 96",
         "a study: weights and cache rounded to 4 bits in groups of 96", ""},
        {"quantize" TINY " --output @told --threads 1", "",
         "11.85 MB packed to ... 1 file in ... told ... 4.50 in the matrices"},
    };
    give("words", "{\"text\": \"Once upon a time, there was a little girl named Lily. Once upon a time\"}\n");
    give_model(32, false);
    char text[2000] = "a\n";
    for (int i = 0; i < 600; i++) strcat(text, "a ");
    give("long", text);
    for (size_t i = 0; i < COUNT(rows); i++) {
        const Result r = flexgen_done("%s", rows[i].args);
        CU_ASSERT(shows(r.out, rows[i].out) && shows(r.err, rows[i].err));
    }
}

#define SMALL "generate --model @small --prompt a --max-tokens 2" LAPTOP

TEST(a_spoilt_model_is_refused_in_one_line_that_names_the_file_and_the_field) {
    static const struct {
        const char *file, *find, *put, *said;
    } cases[] = {
        {"config.json", "\"hidden_size\": 32", "\"hidden_size\": -32", "small/config.json: hidden_size is -32"},
        {"config.json", "\"eos_token_id\": 2", "\"eos_token_id\": 1024", "small/config.json: eos_token_id is 1024"},
        {"vocab.json", "\"<pad>\":1", "\"<pad>\":1024", "vocab.json ... 1024"},
        {"merges.txt", "e r\n", "e qqq\n", "merges.txt line 4 ... qqq"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        give_model(32, false);
        spoil(in_dir(capture, "small"), cases[i].file, cases[i].find, cases[i].put);
        assert_ends(flexgen(SMALL), EXIT_FAILED, cases[i].said);
    }
    give_model(32, false);
    CU_ASSERT_PTR_NULL(strstr(flexgen_done(SMALL).err, "not used")); /* what all of them began with is good */
    write_file(in_dir(capture, "small"), "generation_config.json", "{\"do_sample\": true}", 19);
    CU_ASSERT(shows(flexgen_done(SMALL).err, "small/generation_config.json: do_sample is true: not used; ... greedy"));
}

// ---- Outputs, and a disk that does not play along -------------------------------------------------------------------

TEST(a_full_offload_directory_is_refused_by_name) {
    with.file = 4096;
    const Result r = flexgen(GENERATE ALL_DISK " --prompt a");
    CU_ASSERT_PTR_NOT_NULL(strstr(r.err, offload));
    assert_ends(r, EXIT_FAILED, "offload ... --offload-dir");
}

TEST(an_output_that_cannot_be_written_is_an_error) {
    static const char *const unread[] = {GENERATE " --prompt a", "help", "quantize --help"};
    for (int i = 0; i < 3; i++) {
        with.output = "/dev/full";
        assert_ends(flexgen("%s", unread[i]), EXIT_FAILED, "standard output ... No space left");
    }
    with.output = "/dev/full"; /* where a copy writes nothing */
    const Result copy = flexgen_done("quantize" TINY " --output @written");
    CU_ASSERT(count_lines(copy.err) == 1 && strstr(copy.err, " packed to "));
    static const char *const outputs[] = {"-", "/dev/full"};
    for (int i = 0; i < 2; i++) {
        with.output = "/dev/full";
        const Result r = flexgen("bench" TINY LAPTOP " --prompt-len 4 --gen-len 2 --num-prompts 4 --json %s", outputs[i]);
        const char *said = strstr(r.err, "flexgen: --json "); /* behind the plan, one line */
        CU_ASSERT(r.status == EXIT_FAILED && said && count_lines(said) == 1 && shows(said, ": ... No space left"));
    }
}

/* The file that a link leads to is replaced, and standard output is written where it stands, whatever it is called. */
TEST(a_link_stays_a_link_and_standard_output_may_have_any_name) {
#define ONCE GENERATE " --prompt Once --max-tokens 2"
    struct stat st;
    give("file", "old");
    CHECK(symlink("file", in_dir(capture, "link")) == 0);
    const Result plain = flexgen_done(ONCE " --trace @link");
    CU_ASSERT(lstat(in_dir(capture, "link"), &st) == 0 && S_ISLNK(st.st_mode));
    CU_ASSERT(cJSON_GetArraySize(item(json_of("file"), "traceEvents")) > 2 * 7); /* 2 tokens, 6 layers and the head */
    CHECK(unlink(in_dir(capture, "file")) == 0);
    assert_ends(flexgen(ONCE " --output @link"), EXIT_FAILED, "--output ... link to nothing");
    CU_ASSERT_STRING_EQUAL(flexgen_done(ONCE " --output -").out, plain.out);
    CU_ASSERT_STRING_EQUAL(flexgen_done(ONCE " --output /dev/stdout").out, plain.out);
    CU_ASSERT_EQUAL(flexgen_done(ONCE " --output @completions").out_len, 0);
    CU_ASSERT_STRING_EQUAL(text_of("completions"), plain.out);
}

/* A full disk has stopped a job. It goes on with the flags that its tokens depend on, as they were, and with no others. */
TEST(a_job_goes_on_only_as_it_began) {
#define TEN_OUT \
    "generate" TINY ALL_GPU " --prompts @ten --max-tokens 8 --gpu-batch-size 2 --num-gpu-batches 1 --output @began "
#define ALL_SET "--temperature 0.7 --seed 3 --top-k 50 --top-p 0.75 --stop x --attn-sparsity 0.5 "
#define OTHER "is of another job ... "
    static const struct {
        const char *began, *goes_on; /* began NULL: the job above is still there */
        int status;
        const char *said;
    } cases[] = {
        {ALL_SET, ALL_SET "--seed 4", 2, OTHER "--seed is \"3\""},
        {NULL, ALL_SET "--temperature 0.8", 2, OTHER "--temperature is "},
        {NULL, ALL_SET "--top-k 5", 2, OTHER "--top-k is 50, and here it is 5"},
        {NULL, ALL_SET "--top-p 0.5", 2, OTHER "--top-p is 0.75"},
        {NULL, ALL_SET "--stop y", 2, OTHER "--stop is [\"x\"], and here it is [\"x\",\"y\"]"},
        {NULL, ALL_SET "--attn-sparsity 0.25", 2, OTHER "--attn-sparsity is 0.5, and here it is 0.25"},
        {"", "--attn-sparsity 0.5", 2, OTHER "--attn-sparsity is 1, and here it is 0.5"},
        {"--compress-weight --compress-cache ", "", 2, OTHER "bits of weights is 4, and here it is 0"},
        {NULL, "--compress-weight", 2, OTHER "bits of the cache is 4, and here it is 0"},
        {NULL, "--compress-weight --compress-cache --compress-head", 2, OTHER "bits of the head is 0, and here it is 4"},
        {NULL, "--allow-compression", 0, ""},
        {"--compress-weight --compress-head ", "--compress-weight", 2, OTHER "bits of the head is 4, and here it is 0"},
        {NULL, "--allow-compression", 0, ""},
        {"--prompts @batch ", "--prompts @batch --format openai", 2, OTHER "--format openai is false, and here it is true"},
        {"--prompts @batch --format openai ", "--prompts @batch", 2, OTHER "--format openai is true, and here it is false"},
        {NULL, "--prompts @batch --format openai", 0, ""},
    };
    give_ten_prompts();
    char batch[1000] = "";
    for (int i = 0; i < 6; i++)
        sprintf(batch + strlen(batch), "{\"custom_id\": \"%d\", \"body\": {\"prompt\": \"Once\", \"max_tokens\": %d}}\n", i,
                6 + i);
    give("batch", batch);
    for (size_t i = 0; i < COUNT(cases); i++) {
        if (cases[i].began) {
            with.file = 800;
            assert_ends(flexgen(TEN_OUT "--overwrite %s", cases[i].began), EXIT_FAILED, "cannot write ... File too large");
        }
        assert_ends(flexgen(TEN_OUT "--resume %s", cases[i].goes_on), cases[i].status, cases[i].said);
        CU_ASSERT_EQUAL(strstr(text_of("began.journal"), JOURNAL_ENDED) != NULL, !cases[i].status);
    }
    const Result whole = flexgen_done(
        "generate" TINY ALL_GPU " --prompts @batch --format=openai --max-tokens=8 --gpu-batch-size=6 --num-gpu-batches 1");
    CU_ASSERT_STRING_EQUAL(text_of("began"), whole.out);
    assert_figures(json_line(whole.out, 5),
                   "custom_id=5 response.body.object=text_completion response.body.usage.completion_tokens=11");
}

/* Copies the shipped model to `capture`/other, where files can be changed. */
static void give_other(void) {
    char command[700];
    snprintf(command, sizeof command, "rm -rf '%s/other' && cp -r models/opt-tiny '%s/other'", capture, capture);
    CHECK(!system(command));
}

/* Zeros every third matrix of its layers but for the last 4 KiB of each. */
static void zero_a_third(void) {
    static const char zeros[1 << 20];
    const char *dir = in_dir(capture, "other");
    Checkpoint *c = opens(dir);
    const int fd = open(in_dir(dir, "model.safetensors"), O_WRONLY);
    for (int t = 0, matrices = 0; t < part_count(&c->config); t++) {
        const Part part = checkpoint_part(c, t);
        const size_t n = part.matrix ? tensor_bytes(*part.tensor) - 4096 : 0;
        CHECK(n <= sizeof zeros);
        if (part.matrix && matrices++ % 3 == 0) CHECK(pwrite(fd, zeros, n, (off_t)part.tensor->offset) == (ssize_t)n);
    }
    CHECK(!close(fd));
    checkpoint_close(c);
}

/* Gives two tokens each other's ids. */
static void swap_pieces(void) {
    spoil(in_dir(capture, "other"), "vocab.json", "\"!\": 4, \"\\\"\": 5", "\"!\": 5, \"\\\"\": 4");
}

/* Gives two lines of merges.txt each other's places. */
static void swap_merges(void) {
    const char *dir = in_dir(capture, "other");
    char *text = contents(in_dir(dir, "merges.txt"), NULL), *first = strchr(text, '\n') + 1,
         *second = strchr(first, '\n') + 1, *rest = strchr(second, '\n') + 1, changed[100];
    snprintf(changed, sizeof changed, "%.*s%.*s", (int)(rest - second), second, (int)(second - first), first);
    *rest = 0;
    spoil(dir, "merges.txt", first, changed);
    free(text);
}

static void edit_ended(void) { spoil(capture, "ended", "\"completion\": \"", "\"completion\": \"?"); }

/* A job of three prompts that has ended, and one that a full disk has stopped: each is asked to go on as another one, which
 * differs in one thing. */
TEST(a_job_goes_on_as_no_other_also_when_it_has_ended) {
#define THREE "generate --model @other" ALL_GPU " --prompts @three --gpu-batch-size 2 --num-gpu-batches 1 --output @"
    static const struct {
        const char *flags;
        void (*change)(void); /* of the model, or of the finished output */
        const char *said;     /* of the job that has ended; "": nothing is left to do */
    } cases[] = {
        {"", NULL, ""},
        {"--compress-weight", NULL, OTHER "bits of weights is 0, and here it is 4"},
        {"--compress-cache", NULL, OTHER "bits of the cache is 0, and here it is 4"},
        {"--attn-sparsity 0.5", NULL, OTHER "--attn-sparsity is 1, and here it is 0.5"},
        {"--temperature 0.8", NULL, OTHER "--temperature is 0, and here it is 0.8"},
        {"--stop she", NULL, OTHER "--stop is [], and here it is [\"she\"]"},
        {"--max-tokens 3", NULL, OTHER "prompts is \"3, "},
        {"", zero_a_third, OTHER "model is \""},
        {"", swap_pieces, OTHER "tokenizer is \""},
        {"", swap_merges, OTHER "tokenizer is \""},
        {"", edit_ended, "ended was changed after its job had ended ... --overwrite"},
    };
    give("three", "One day\nTom and Sue\nThe big dog\n");
    give_other();
    flexgen_done(THREE "ended --max-tokens 20");
    const char *ended = text_of("ended");
    with.file = 700;
    assert_ends(flexgen(THREE "begun --max-tokens 20"), EXIT_FAILED, "cannot write ... File too large");
    const char *begun = text_of("begun"), *journal = text_of("begun.journal");
    for (size_t i = 0; i < COUNT(cases); i++) {
        if (cases[i].change) cases[i].change();
        const bool refused = cases[i].said[0], edited = cases[i].change == edit_ended;
        const Result r = flexgen(THREE "ended --max-tokens 20 --resume %s", cases[i].flags);
        assert_ends(r, refused ? EXIT_USAGE : 0, cases[i].said);
        CU_ASSERT(refused || shows(r.err, "nothing is left to do"));
        assert_ends(flexgen(THREE "begun --max-tokens 20 --resume %s", cases[i].flags), refused && !edited ? EXIT_USAGE : 0,
                    edited ? "" : cases[i].said);
        CU_ASSERT_STRING_EQUAL(text_of("begun"), refused && !edited ? begun : ended);
        give("ended", ended), give("begun", begun), give("begun.journal", journal);
        if (cases[i].change) give_other();
    }
}

// ---- Jobs that are stopped ------------------------------------------------------------------------------------------

/* Starts a job, waits until its journal has so many bytes, and stops it. */
static Result stop_at(off_t bytes, int signal, const char *output, const char *job) {
    char journal[100];
    struct stat st = {0};
    const pid_t pid = start_flexgen("%s --output @%s", job, output);
    snprintf(journal, sizeof journal, "%s.journal", output);
    while ((stat(in_dir(capture, journal), &st) || st.st_size < bytes) && program_runs(pid)) usleep(1000);
    CU_ASSERT(st.st_size >= bytes);
    kill(pid, signal);
    return finish(pid);
}

#define SLOW_JOB TEN_PROMPTS ALL_CPU " --gpu-batch-size 3 --num-gpu-batches 1 --link ctog=50M"
enum { SOME_TOKENS = 500 /* bytes: behind the head of its journal are some */ };

/* Stopped by a signal between two tokens, the run says how to go on; and does. */
TEST(a_signal_stops_a_job_that_then_goes_on) {
    static const int signals[] = {SIGINT, SIGTERM};
    give_ten_prompts();
    const Result plain = flexgen_done(TEN_PROMPTS ALL_CPU " --gpu-batch-size 3 --num-gpu-batches 1");
    for (int i = 0; i < 2; i++) {
        const char *output = i ? "stopped" : "interrupted";
        assert_ends(stop_at(SOME_TOKENS, signals[i], output, SLOW_JOB), 128 + signals[i],
                    i ? "SIGTERM ... go on with --resume" : "SIGINT ... go on with --resume");
        flexgen_done(TEN_PROMPTS " --resume --output @%s", output);
        CU_ASSERT_STRING_EQUAL(text_of(output), plain.out);
    }
}

/* Somebody has edited the journal of a job that was killed: its head is then no policy, or is of a program that added in
 * another order, or that did not say in which. */
TEST(a_head_that_was_edited_is_refused_or_another_order_of_sums_is_said) {
    char now[20];
    snprintf(now, sizeof now, "\"sums\":%d", HOST_SUMS);
    const struct {
        const char *find, *put, *flag;
        int status;
        const char *said;
    } edits[] = {{"\"bits of weights\":0", "\"bits of weights\":9", "--allow-compression", 2, OTHER "bits of weights is 9"},
                 {"\"bits of the cache\":0", "\"bits of the cache\":4", "--allow-compression", 2,
                  OTHER "group of the cache is 0, and here it is 64"},
                 {",\"bits of the head\":0", "", "", 2, OTHER "bits of the head is missing, and here it is 0"},
                 {now, now, "", 0, ""},
                 {now, "\"sums\":1", "", 0, "going on with another version of this program"},
                 {now, "\"others\":2", "", 0, "going on with another version of this program"}};
    give_ten_prompts();
    const Result killed = stop_at(SOME_TOKENS, SIGKILL, "killed", SLOW_JOB);
    CU_ASSERT_EQUAL(killed.status, 1000 + SIGKILL);
    const char *output = text_of("killed"), *journal = text_of("killed.journal");
    for (size_t i = 0; i < COUNT(edits); i++) {
        give("edited", output), give("edited.journal", journal);
        spoil(capture, "edited.journal", edits[i].find, edits[i].put);
        const Result r = flexgen(TEN_PROMPTS " --resume --output @edited %s", edits[i].flag);
        assert_ends(r, edits[i].status, edits[i].said);
        CU_ASSERT(edits[i].said[0] || !strstr(r.err, "going on with another version"));
    }
}

/* The prompts fit; with what has been generated behind them they do not any more. */
TEST(a_job_goes_on_in_smaller_batches_where_longer_prompts_do_not_fit) {
#define EIGHT \
    "generate" TINY ALL_GPU " --prompts @prompts --max-tokens 100 --gpu-batch-size 8 --num-gpu-batches 1 --gpu-mem 17600K"
    enum { FIFTY_SWEEPS = 400 + 50 * 76 /* bytes of a journal */ };
    give("prompts", "a\nb\nc\nd\ne\nf\ng\nh\n");
    const Result plain = flexgen_done(EIGHT), killed = stop_at(FIFTY_SWEEPS, SIGKILL, "eight", EIGHT),
                 rest = flexgen_done(EIGHT " --output @eight --resume");
    CU_ASSERT_EQUAL(killed.status, 1000 + SIGKILL);
    CU_ASSERT(shows(rest.err, "do not fit: going on with --gpu-batch-size 4 ... 8 prompts, "));
    CU_ASSERT_STRING_EQUAL(text_of("eight"), plain.out);
}

/* The first and the last prompt are good. */
TEST(a_job_goes_on_beside_prompts_that_are_impossible) {
    static const char *const prompts[] = {
        "One\n\xFF\nTwo\n", "{\"prompt\": \"One\"}\n{\"prompt\": 1}\n{\"prompt\": \"Two\"}\n",
        "{\"id\": 1, \"prompt\": \"One\"}\n{\"id\": 1, \"prompt\": \"\"}\n{\"prompt\": \"Two\"}\n"};
    for (int i = 0; i < 3; i++) {
        give("prompts", prompts[i]);
        const Result r = flexgen(GENERATE " --prompts @prompts --max-tokens 3");
        CU_ASSERT(r.status == EXIT_FAILED && shows(r.err, "flexgen: 1 of 3 prompts could not be completed"));
        CU_ASSERT(json_line(r.out, 0) && json_line(r.out, 2) && !json_line(r.out, 3));
        const cJSON *error = json_line(r.out, 1);
        assert_figures(error, "id=1");
        CU_ASSERT(shows(string(error, "error"), "line 2: ") && cJSON_GetArraySize(error) == 2);
        CU_ASSERT_EQUAL(flexgen(GENERATE " --prompts @prompts --max-tokens 3 --output @ended --overwrite").status,
                        EXIT_FAILED);
        CU_ASSERT_STRING_EQUAL(text_of("ended"), r.out);
        const Result again = flexgen(GENERATE " --prompts @prompts --max-tokens 3 --output @ended --resume");
        CU_ASSERT_EQUAL(again.status, EXIT_FAILED); /* of a job that has ended, too */
        CU_ASSERT(shows(again.err, "nothing is left to do ... flexgen: 1 of 3 prompts"));
    }
}

enum { ALL_STORIES = 180 /* lines of stories.txt that are not blank */ };

/* Starts a job of ALL_STORIES prompts whose standard output is a pipe; returns its end to read from. */
static int start_piped(pid_t *pid, const char *flags) {
    int ends[2];
    CHECK(pipe2(ends, O_CLOEXEC) == 0 && fcntl(ends[1], F_SETPIPE_SZ, 4096) >= 4096);
    with.pipe = ends[1];
    *pid = start_flexgen(GENERATE " --prompts models/opt-tiny/stories.txt %s", flags);
    close(ends[1]);
    return ends[0];
}

/* Nobody reads the job's output: it has no journal, and does not wait for a reader. With a given block nothing is said of
 * longer ones. */
TEST(a_signal_stops_a_job_whose_pipe_is_full) {
    pid_t pid;
    const int from = start_piped(&pid, "--max-tokens 4 --gpu-batch-size 8 --num-gpu-batches 2");
    while (poll(&(struct pollfd){.fd = from, .events = POLLIN}, 1, -1) != 1) CHECK(errno == EINTR);
    usleep(500000); /* or longer than the whole job takes */
    kill(pid, SIGTERM);
    const Result r = finish(pid);
    CU_ASSERT_EQUAL(r.status, 128 + SIGTERM);
    CU_ASSERT_STRING_EQUAL(r.err, "flexgen: stopped by SIGTERM\n");
    close(from);
}

/* When the first of the lines has come, the run is under way. */
TEST(a_killed_run_leaves_no_offload_file_and_whole_lines) {
    for (int killed = 0; killed < 2; killed++) {
        static char out[1 << 16];
        size_t len = 0;
        pid_t pid;
        const int from = start_piped(&pid, ALL_DISK " --max-tokens 20 --gpu-batch-size 2 --num-gpu-batches 1 --threads 1");
        ssize_t n = read(from, out, sizeof out - 1);
        kill(pid, killed ? SIGKILL : SIGTERM);
        for (; n > 0; n = read(from, out + len, sizeof out - 1 - len)) len += (size_t)n;
        close(from);
        out[len] = 0;
        CU_ASSERT_EQUAL(finish(pid).status, killed ? 1000 + SIGKILL : 128 + SIGTERM);
        const int lines = count_completions(out);
        CU_ASSERT(lines > 0 && lines < ALL_STORIES);
    }
}

// ---- Good runs ------------------------------------------------------------------------------------------------------

TEST(prompts_come_from_flags_a_file_or_standard_input) {
    give_ten_prompts();
    const Result file = flexgen_done(TEN_PROMPTS);
    with.input = in_dir(capture, "ten");
    const Result input = flexgen_done(GENERATE " --prompts - --max-tokens 12");
    CU_ASSERT_EQUAL(count_completions(file.out), 10);
    CU_ASSERT_STRING_EQUAL(file.out, input.out);
    const Result flag = flexgen_done(GENERATE " --prompt 'Once upon a time' --prompt 'The dog' --max-tokens 12");
    CU_ASSERT(!strncmp(flag.out, file.out, flag.out_len));                                      /* ids 0 and 1 */
    assert_figures(json_line(file.out, 9), "id=10 'prompt=I am caf\xC3\xA9 \xF0\x9F\x98\x80'"); /* blank lines count */
    char text[6000]; /* a line longer than a pipe takes at once */
    snprintf(text, sizeof text, "{\"id\": \"%05000d\", \"prompt\": \"a\"}\n", 0);
    give("long", text);
    const Result line = flexgen_done(GENERATE " --prompts @long --max-tokens 1");
    CU_ASSERT_EQUAL(strlen(string(json_line(line.out, 0), "id")), 5000);
}

/* Lines are in the order of the prompts, whichever ends first. Found by the search, the policy comes with what is expected;
 * given, it does not. A stop text ends sequences early, of which test_completions.c has what is written. */
TEST(every_policy_writes_the_same_completions) {
#define EARLY " --prompts @ten --max-tokens 12 --stop ."
    static const char *const policies[] = {
        "--gpu-batch-size 2 --num-gpu-batches 2 --no-overlap --page-tokens 5 --threads 1", /* more prompts than a block */
        "--gpu-batch-size 64 --num-gpu-batches 3 --gpu-mem 5M",                            /* fewer than a batch */
        "--gpu-batch-size 3 --schedule row --link ctog=1G,gtoc=500M" ALL_CPU,
        "--synchronize --percent 30 30 30 30 30 30 --cpu-cache-compute",
        "--schedule diagonal --gpu-batch-size 2 --num-gpu-batches 2", /* topups, as some stop early */
        "--schedule diagonal --gpu-batch-size 3 --num-gpu-batches 3" ALL_DISK,
        "--schedule diagonal",
    };
    give_ten_prompts();
    const Result plain = flexgen_done(GENERATE EARLY),
                 given = flexgen_done("generate" TINY ALL_CPU EARLY " --gpu-batch-size 3 --num-gpu-batches 2");
    CU_ASSERT(shows(plain.err, "predicted ... measured ... T_pre (s) ... T_gen (s) ... disk peak (MiB)"));
    CU_ASSERT_PTR_NULL(strstr(given.err, "predicted"));
    assert_figures(json_line(plain.out, 0), "finish_reason=stop");
    CU_ASSERT(cJSON_GetArraySize(item(json_line(plain.out, 0), "tokens")) < 12);
    CU_ASSERT_STRING_EQUAL(given.out, plain.out);
    for (size_t i = 0; i < COUNT(policies); i++)
        CU_ASSERT_STRING_EQUAL(flexgen_done(GENERATE EARLY " %s", policies[i]).out, plain.out);
}

TEST(one_seed_gives_one_output_and_another_gives_another) {
#define SAMPLED TEN_PROMPTS " --temperature 1 --top-p 0.95 --top-k 50 --seed "
    give_ten_prompts();
    const Result greedy = flexgen_done(TEN_PROMPTS), a = flexgen_done(SAMPLED "5"),
                 b = flexgen_done(SAMPLED "5 --gpu-batch-size 3"), c = flexgen_done(SAMPLED "6"),
                 narrow = flexgen_done(TEN_PROMPTS " --temperature 1 --top-k 1 --seed 9"),
                 cold = flexgen_done(TEN_PROMPTS " --temperature 0 --top-k 50 --seed 9");
    CU_ASSERT_STRING_EQUAL(greedy.out, cold.out);   /* whoever says 0 means it */
    CU_ASSERT_STRING_EQUAL(greedy.out, narrow.out); /* the likeliest one of one */
    CU_ASSERT_STRING_EQUAL(a.out, b.out);
    CU_ASSERT_STRING_NOT_EQUAL(a.out, c.out);
    CU_ASSERT_STRING_NOT_EQUAL(greedy.out, a.out);
}

/* Beside other lines, in another order, and as lines of a batch; the line without a seed is greedy, and the same. */
TEST(a_line_with_a_seed_gives_the_same_wherever_it_stands) {
    static const char *const fields[] = {"\"prompt\": \"Once upon a time\", \"temperature\": 1, \"seed\": 5",
                                         "\"prompt\": \"Once upon a time\", \"temperature\": 1, \"seed\": 6, \"top_k\": 90",
                                         "\"prompt\": \"Once upon a time\"",
                                         "\"prompt\": \"Once upon a time\", \"temperature\": 1, \"seed\": 5"};
    static const char *const policies[] = {"", "--gpu-batch-size 3 --schedule row" ALL_CPU, "--gpu-batch-size 1" ALL_DISK};
    const char *said[4] = {NULL};
    for (int way = 0; way < 3; way++) {
        char text[2000] = "";
        for (int i = 0; i < 4; i++) {
            const int l = (i + way) % 4;
            sprintf(text + strlen(text), way == 2 ? "{\"custom_id\": \"%d\", \"body\": {%s}}\n" : "{\"id\": \"%d\", %s}\n",
                    l, fields[l]);
        }
        give("seeds", text);
        const Result r = flexgen_done(GENERATE " --prompts @seeds --max-tokens 16 %s", policies[way]);
        for (int i = 0; i < 4; i++) {
            const cJSON *line = json_line(r.out, i);
            const char **of = &said[atoi(string(line, "id"))], *completion = string(line, "completion");
            if (!*of) *of = completion;
            CU_ASSERT_STRING_EQUAL(*of, completion);
        }
    }
    CU_ASSERT_STRING_EQUAL(said[0], said[3]);
    CU_ASSERT(strcmp(said[0], said[1]) && strcmp(said[0], said[2]) && strcmp(said[1], said[2]));
}

/* A name that would forge a line is one line. */
TEST(each_field_that_is_not_known_is_named_once) {
    static const char *const names[] = {"best_of", "user", "top_p ", "id", "?forged"};
    static const int times[] = {1, 1, 1, 0, 1};
    give("fields",
         "{\"prompt\": \"a\", \"best_of\": [1]}\n{\"prompt\": \"b\", \"best_of\": 2, \"top_p \": 0, \"\\nforged\": 1}\n"
         "{\"custom_id\": \"c\", \"body\": {\"prompt\": \"c\", \"model\": \"m\", \"user\": \"u\", \"best_of\": 1}}\n");
    const Result r = flexgen_done(GENERATE " --prompts @fields --max-tokens 1");
    CU_ASSERT(
        shows(r.err, "fields line 1: field \"best_of\" is not known and is ignored\n ... line 3: field \"user\" is not"));
    for (size_t i = 0; i < COUNT(names); i++) {
        char part[100];
        snprintf(part, sizeof part, " field \"%s\" is not known and is ignored\n", names[i]);
        const char *first = strstr(r.err, part);
        CU_ASSERT_EQUAL(first != NULL, times[i]);
        CU_ASSERT(!first || !strstr(first + 1, part));
    }
}

TEST(no_prompts_are_no_work_and_no_error) {
    give("prompts", "\n\r\n \t\n");
    CU_ASSERT_EQUAL(flexgen_done("generate" TINY " --prompts @prompts").out_len, 0);
}

/* It is told from one that ends by itself. */
TEST(a_completion_that_the_positions_cut_short_is_counted) {
    give_model(32, false);
    give("prompts",
         "{\"prompt\": \"a\", \"max_tokens\": 1000}\n{\"prompt\": \"b\"}\n{\"prompt\": \"c\", \"max_tokens\": 65}\n");
    const Result cut = flexgen_done("generate --model @small --prompts @prompts --max-tokens 63" LAPTOP),
                 whole = flexgen_done("generate --model @small --prompt b --max-tokens 63" LAPTOP);
    CU_ASSERT(shows(cut.err, "2 of 3 completions cut short: the model has 64 positions"));
    CU_ASSERT_PTR_NULL(strstr(whole.err, "cut short"));
}

TEST(a_head_that_differs_from_the_table_is_used_and_said) {
    give_model(64, false);
    const Result tied = flexgen_done(SMALL);
    give_model(64, true);
    const Result r = flexgen_done(SMALL), packed = flexgen_done("quantize --model @small --output @headed");
    CU_ASSERT(shows(r.err, "small: lm_head.weight differs from the token table ... tie_word_embeddings"));
    CU_ASSERT(shows(packed.err, "lm_head.weight differs from the token table"));
    CU_ASSERT_PTR_NULL(strstr(tied.err, "lm_head"));
    CU_ASSERT_STRING_NOT_EQUAL(r.out, tied.out);
}

// ---- bench ----------------------------------------------------------------------------------------------------------

/* One object with all the names of the paper, whose numbers agree with each other. */
TEST(bench_reports_one_json_object_with_the_names_of_the_paper) {
    static const struct {
        const char *args, *figures;
        const char *out; /* what standard output says; NULL: it is the JSON, and since all is given nothing is predicted */
    } cases[] = {
        {TINY ALL_GPU " --prompt-len 8 --gen-len 4 --gpu-batch-size 2 --num-gpu-batches 2",
         "wd=0 gbs=2 num_gpu_batches=2 bls=4 s=8 n=4", NULL},
        {TINY " --prompt-len 8 --gen-len 4 --percent 0 50 0 50 0 50 --gpu-batch-size 4 --num-gpu-batches 1",
         "wd=0.5 gbs=4 num_gpu_batches=1 bls=4 s=8 n=4 channels.dtoc.moved_bytes>0 channels.ctod.moved_bytes>0 "
         "tiers.disk.peak_bytes>0",
         "prefill ... decode ... token/s"},
        /* OPT-175B at the paper's 32 x 8, on the paper's machine: no file, no data, and the plan is what is used. The paper
         * measured 0.69; the disk alone bounds it by 0.65 here */
        {" --model opt-175b --device sim" ON_T4 " --gpu-batch-size 32 --num-gpu-batches 8 --percent 0 50 0 0 0 100 "
         "--cpu-cache-compute",
         "wd=0.5 gbs=32 num_gpu_batches=8 bls=256 s=512 n=32 device=sim throughput>.4 throughput<.7 "
         "tiers.GPU.planned_bytes=tiers.GPU.peak_bytes tiers.CPU.planned_bytes=tiers.CPU.peak_bytes "
         "tiers.disk.planned_bytes=tiers.disk.peak_bytes "
         "'breakdown.decode.weight (R).busy_s>breakdown.decode.weight (R).hidden_s'",
         "breakdown ... weight (R) ... cache (W)"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        const char *out = cases[i].out;
        const Result r = flexgen_done("bench%s --json %s", cases[i].args, out ? "@bench.json" : "-");
        const cJSON *json = out ? json_of("bench.json") : figures_of(r);
        const double total = number(json, "total_s"), decode = number(json, "decode_s"), bls = number(json, "bls"),
                     n = number(json, "n");
        assert_figures(json,
                       "wg wc cg cc cd hg hc hd T_pre T_gen throughput T=total_s prefill_s>0 decode_s>0 "
                       "channels.gpu.busy_s channels.cpu.busy_s %s",
                       cases[i].figures);
        CU_ASSERT_DOUBLE_EQUAL(number(json, "prefill_s") + decode, total, 1e-6);
        CU_ASSERT_DOUBLE_EQUAL(number(json, "generation_throughput") * total, bls * n, 1e-3);
        CU_ASSERT_DOUBLE_EQUAL(number(json, "decode_throughput") * decode, bls * (n - 1), 1e-3);
        for (int t = 0; t < NTIERS; t++) {
            const cJSON *tier = item(item(json, "tiers"), tier_name[t]);
            CU_ASSERT(number(tier, "planned_bytes") >= number(tier, "peak_bytes"));
        }
        for (int c = 0; c < NCHANNELS; c++)
            assert_figures(item(item(json, "channels"), channel_name[c]), "moved_bytes busy_s");
        if (out) {
            CU_ASSERT(shows(r.out, out));
        } else {
            CU_ASSERT(!item(json, "predicted") && !strstr(r.err, "predicted"));
        }
    }
}

/* Four machines: a line for each, and in --json the same figures. */
TEST(the_sim_runs_a_pipeline_of_machines) {
    static const int layers[] = {8, 8, 10, 6};
    const Result r = flexgen_done("bench --model opt-6.7b --device sim" ON_T4
                                  " --nodes 4 --stages 8,8,10,6 --flights 5 "
                                  "--net 1.25G,0.1ms --json @stages.json");
    CU_ASSERT(shows(r.out, "stage 0: layers 0 to 7; ... GPU waits ... stage 3: layers 26 to 31; ... stage 3 waits"));
    const cJSON *json = json_of("stages.json");
    CU_ASSERT_EQUAL(cJSON_GetArraySize(item(json, "stages")), 4);
    assert_figures(json, "flights=5");
    for (int s = 0; s < 4; s++) {
        const cJSON *stage = cJSON_GetArrayItem(item(json, "stages"), s);
        const double idle = cJSON_GetArrayItem(item(json, "waiting"), s)->valuedouble;
        assert_figures(stage, "layers=%d busy_share>0 busy_share<1 gpu_waits>0 gpu_waits<1 planned_bytes.GPU>1e9",
                       layers[s]);
        CU_ASSERT(idle > 0 && idle < number(stage, "gpu_waits") + 1e-9 && idle < 1 - number(stage, "busy_share") + 1e-9);
    }
    CU_ASSERT_PTR_NULL(item(json, "predicted")); /* the formulas are for equal stages */
}

/* Left to itself the diagonal schedule takes as many batches as are worth it, and is faster than the others where the CPU
 * has room for few sequences. The JSON of --json has what was expected beside what the clock says. */
TEST(the_diagonal_schedule_finds_its_number_of_batches) {
    static const char *const schedule[] = {"row", "zigzag", "diagonal"};
    static const char *const lengths[] = {"--prompt-len 32 --gen-len 64", "--prompt-len 512 --gen-len 4"};
    for (int i = 0; i < 2; i++) {
        double rate[3];
        for (int w = 0; w < 3; w++) {
            const cJSON *json =
                FIGURES("bench --model opt-125m --device sim" LAPTOP
                        " --percent 0 100 0 100 100 0 --cpu-mem 600M --num-prompts 400 --json - %s --schedule %s",
                        lengths[i], schedule[w]);
            assert_figures(json, "schedule=%s num_gpu_batches>%d", schedule[w], w == 2);
            rate[w] = number(json, "throughput");
            CU_ASSERT_DOUBLE_EQUAL(number(json, "predicted.throughput") / rate[w], 1, .1);
        }
        CU_ASSERT(rate[2] > rate[1] && rate[1] >= rate[0]);
    }
}

/* The wait for a slowed link is a lower bound of the time, and lengths between two limits are all wanted. */
TEST(a_slowed_link_and_mixed_lengths_show_in_the_figures) {
    const cJSON *json = FIGURES("bench" TINY
                                " --prompt-len 4-20 --gen-len 2-6 --num-prompts 9 --gpu-batch-size 2 "
                                "--num-gpu-batches 2 --percent 0 100 100 0 100 0 --link ctog=200M --json -");
    const double total = number(json, "total_s"), tokens = number(json, "throughput") * total;
    CU_ASSERT(total >= .9 * number(json, "lanes.load weights.moved_bytes") / 200e6);
    assert_figures(json,
                   "n=6 'lanes.load weights.moved_bytes>0' 'channels.ctog.moved_bytes>lanes.load weights.moved_bytes'");
    CU_ASSERT(tokens >= 9 * 2 && tokens <= 9 * 6);
}

/* Found by the search, for the sim: in --json the expected figures stand beside those of the clock, and are near them. */
TEST(bench_says_what_was_expected) {
    static const char *const names[] = {"T", "T_pre", "T_gen", "throughput"};
    const Result r = flexgen_done("bench --model opt-1.3b --device sim" LAPTOP
                                  " --prompt-len 128 --gen-len 16 --gpu-mem 1G --num-prompts 64 --json -");
    const cJSON *json = figures_of(r), *predicted = item(json, "predicted");
    for (int i = 0; i < 4; i++) CU_ASSERT_DOUBLE_EQUAL(number(predicted, names[i]) / number(json, names[i]), 1, .15);
    CU_ASSERT(shows(r.err, "predicted ... measured ... throughput (token/s)"));
    for (int t = 0; t < NTIERS; t++) {
        const cJSON *tier = item(item(json, "tiers"), tier_name[t]);
        const double expected = number(item(predicted, "peak_bytes"), tier_name[t]);
        char line[100];
        CU_ASSERT_EQUAL(number(tier, "planned_bytes"), expected);
        snprintf(line, sizeof line, "%-4s peak (MiB) %18s %12.2f %12.2f\n", tier_name[t], "", expected / 0x1p20,
                 number(tier, "peak_bytes") / 0x1p20);
        CU_ASSERT_PTR_NOT_NULL(strstr(r.err, line));
    }
}

/* Returns the digest that bench prints of what it generates. */
static uint64_t digest_of(const char *flags) {
    const cJSON *json =
        FIGURES("bench" TINY ALL_GPU " --prompt-len 8 --gpu-batch-size 2 --num-gpu-batches 2 --json - %s", flags);
    CU_ASSERT_EQUAL(strlen(string(json, "digest")), 16);
    return strtoull(string(json, "digest"), NULL, 16);
}

/* The same for every schedule, another for other prompts. Two prompts generate one token each: the second adds the hash of
 * its number and its token to the digest of the first, so that both tokens can be told from the digests. */
TEST(bench_tells_the_tokens_of_each_prompt_by_their_digest) {
#define SIX "--num-prompts 6 --gen-len 6 "
    enum { VOCAB = 4096 };
    const uint64_t digest = digest_of(SIX "--schedule zigzag"), first = digest_of("--num-prompts 1 --gen-len 1"),
                   second = digest_of("--num-prompts 2 --gen-len 1") - first;
    int token[2] = {-1, -1};
    CU_ASSERT(digest == digest_of(SIX "--schedule diagonal") && digest != digest_of(SIX "--seed 5"));
    for (int32_t t = 0; t < VOCAB; t++)
        for (int i = 0; i < 2; i++)
            if (hash_bytes((uint64_t)HASH_START + (uint64_t)i, &t, sizeof t) == (i ? second : first)) token[i] = t;
    CU_ASSERT(token[0] >= 0 && token[1] >= 0 && token[0] != token[1]);
}

#define ON_SIM "bench --model opt-125m --device sim" ON_T4 " --prompt-len 64 --json - "
#define FROM_CPU "--percent 0 100 50 50 100 0 "

/* T_pre and T_gen are seconds of a layer, in sweeps with a prefill and in the others: so many of these make up T, and where
 * batches enter one by one, some whole number. Without --num-prompts there is one block for each flight. */
TEST(t_pre_and_t_gen_make_up_t) {
    for (int diagonal = 0; diagonal < 2; diagonal++) {
        const cJSON *json = FIGURES(ON_SIM FROM_CPU
                                    "--gen-len 16 --gpu-batch-size 2 --num-gpu-batches 4 --num-prompts 16 "
                                    "--schedule %s",
                                    diagonal ? "diagonal" : "zigzag");
        const double l = 12, T = number(json, "T"), T_pre = number(json, "T_pre"), T_gen = number(json, "T_gen");
        const double prefills = (T / l - number(json, "sweeps") * T_gen) / (T_pre - T_gen);
        CU_ASSERT_DOUBLE_EQUAL(prefills, round(prefills), 1e-6);
        CU_ASSERT(diagonal ? prefills > 2 : round(prefills) == 2);
    }
    const cJSON *json = FIGURES(ON_SIM FROM_CPU "--gen-len 8 --gpu-batch-size 2 --num-gpu-batches 2 --flights 3");
    CU_ASSERT_DOUBLE_EQUAL(number(json, "throughput") * number(json, "T"), 2 * 2 * 3 * 8, 1e-6);
}

/* What one place says of the lane that loads weights is what another says. test_paper.c has that the parts add up. */
TEST(the_figures_of_a_lane_agree_with_each_other) {
    const cJSON *json = FIGURES(ON_SIM FROM_CPU "--gen-len 8 --gpu-batch-size 2 --num-gpu-batches 2 --num-prompts 8");
    const double loads =
        number(json, "breakdown.prefill.weight (R).busy_s") + number(json, "breakdown.decode.weight (R).busy_s");
    CU_ASSERT_DOUBLE_EQUAL(loads, number(json, "lanes.load weights.busy_s"), 1e-6 * loads);
}

// ---- flexgen policy -------------------------------------------------------------------------------------------------

TEST(the_papers_cost_model_places_opt_30b) {
    assert_figures(FIGURES(ON_PAPER " --json -"),
                   "wg~0.203194 wc wd cg cc cd hg hc hd T~309.121 T_pre T_gen throughput gbs=48 num_gpu_batches=3 bls=144 "
                   "s=512 n=32");
}

#define ON_LAPTOP "policy --model opt-1.3b" LAPTOP " --prompt-len 128 --gen-len 16 --gpu-mem 1G"

/* A policy and what it promises, whose numbers agree with each other. The best one is also in the object itself. */
TEST(policy_lists_the_ten_best_or_the_frontier_under_the_papers_names) {
    const cJSON *one, *json = FIGURES(ON_LAPTOP " --num-prompts 96 --json -"),
                      *frontier = FIGURES(ON_LAPTOP " --num-prompts 96 --frontier --json -"),
                      *lists[] = {item(json, "best"), item(frontier, "frontier")};
    const Result text = flexgen_done(ON_LAPTOP " --num-prompts 96");
    double before = INFINITY;
    assert_figures(json, "s=128 n=16 model=opt-1.3b");
    CU_ASSERT(shows(string(json, "hardware"), "RTX 4060"));
    CU_ASSERT(cJSON_GetArraySize(lists[0]) == 10 && cJSON_GetArraySize(lists[1]) > 3);
    for (int i = 0; i < 2; i++) {
        cJSON_ArrayForEach(one, lists[i]) {
            assert_figures(one, "wg wc wd cg cc cd hg hc hd T T_pre T_gen throughput latency gbs>0");
            CU_ASSERT_DOUBLE_EQUAL(number(one, "wg") + number(one, "wc") + number(one, "wd"), 1, 1e-9);
            CU_ASSERT_DOUBLE_EQUAL(number(one, "cg") + number(one, "cc") + number(one, "cd"), 1, 1e-9);
            CU_ASSERT_DOUBLE_EQUAL(number(one, "hg") + number(one, "hc") + number(one, "hd"), 1, 1e-9);
            const double batches = strcmp(string(one, "schedule"), "row") ? number(one, "num_gpu_batches") : 1;
            CU_ASSERT_EQUAL(number(one, "bls"), number(one, "gbs") * batches);
            CU_ASSERT(cJSON_IsBool(item(one, "cpu_cache_compute")) && string(one, "bound.T_gen"));
        }
    }
    cJSON_ArrayForEach(one, lists[0]) {
        CU_ASSERT(number(one, "throughput") <= before);
        before = number(one, "throughput");
        CU_ASSERT_DOUBLE_EQUAL(before * number(one, "T"), 96 * 16, 1e-3);
        CU_ASSERT(number(one, "peak_bytes.GPU") <= 0x1p30);
    }
    cJSON_ArrayForEach(one, cJSON_GetArrayItem(lists[0], 0)) CU_ASSERT(cJSON_Compare(one, item(json, one->string), true));
    CU_ASSERT_EQUAL(count_lines(text.out), 12); /* two lines of heading */
    CU_ASSERT(shows(text.out, "opt-1.3b ... RTX 4060 ... token/s ... T_pre ... bound by ... zigzag"));
}

/* What is given is an order: shares, the size of a batch, and who attends. */
TEST(the_search_keeps_to_what_is_given) {
    static const char *const given[][2] = {
        {ON_LAPTOP " --num-prompts 32 --percent 12.3 - - 33.3 - - --gpu-batch-size 8 --cpu-cache-compute",
         "wg=0.123 cc=0.333 gbs=8 cpu_cache_compute=true hg=1"}, /* what is left open, hg, goes where it is best */
        {"policy --model opt-1.3b" ON_T4 " --prompt-len 64 --gen-len 8 --num-prompts 8 --cpu-cache-compute",
         "cpu_cache_compute=true"}}; /* of these the GPU would attend in the best */
    for (int i = 0; i < 2; i++) {
        const cJSON *one, *best = item(FIGURES("%s --json -", given[i][0]), "best");
        CU_ASSERT(cJSON_GetArraySize(best) > 1);
        cJSON_ArrayForEach(one, best) assert_figures(one, "%s", given[i][1]);
    }
}

TEST(policy_compresses_where_it_is_allowed_to) {
    const cJSON *before = FIGURES(ON_LAPTOP " --num-prompts 32 --json -"),
                *json = FIGURES(ON_LAPTOP " --num-prompts 32 --json - --allow-compression");
    assert_figures(before, "compress_weight=false");
    assert_figures(json, "compress_weight=true");
    CU_ASSERT(number(json, "throughput") > number(before, "throughput"));
    CU_ASSERT(shows(flexgen_done(ON_LAPTOP " --num-prompts 32 --allow-compression").out, "bits ... CPU  4  4 "));
}

/* Returns the throughput that a command reports of a task on a T4. */
static double rate_of(const char *command, const char *flags) {
    return number(FIGURES("%s" ON_T4 " --prompt-len 64 --gen-len 8 --num-prompts 8 --json - %s", command, flags),
                  "throughput");
}

/* A wire that is given as what is meant where none is given; a link that is slowed, and one that could not be so fast. */
TEST(wires_and_links_are_as_fast_as_they_are_given) {
    static const char pipeline[] = "bench --model opt-125m --device sim --nodes 2",
                      best[] = "policy --model opt-1.3b --percent 0 100 0 100 100 0";
    CU_ASSERT_EQUAL(rate_of(pipeline, "--net 1.25G,0.1ms"), rate_of(pipeline, ""));
    const double usual = rate_of(best, ""), slow = rate_of(best, "--link ctog=1G");
    CU_ASSERT(rate_of(best, "--link ctog=900G") == usual && slow < .5 * usual);
    CU_ASSERT_EQUAL(rate_of(best, "--with ctog_bdw=1e9"), slow);
}

/* By both cost models and on the sim. */
TEST(a_number_of_the_machine_is_changed_wherever_it_is_read) {
    static const char paper[] = "policy --model opt-1.3b --cost-model paper --gpu-batch-size 4 --num-gpu-batches 2";
    static const char sim[] =
        "bench --model opt-1.3b --device sim --percent 0 100 0 100 100 0 --gpu-batch-size 4 --num-gpu-batches 2";
    /* what does not fit the GPU must pass the link */
    CU_ASSERT(rate_of(paper, "--with gmem=1e9 --with ctog_bdw=1e8") < .01 * rate_of(paper, ""));
    CU_ASSERT(rate_of(sim, "--with ctog_bdw=1e8") < .1 * rate_of(sim, ""));
}

/* Without --hardware it is this machine: the one that was measured before, if there is one. */
TEST(the_machine_that_was_measured_before_is_used) {
    Hardware h;
    Error err;
    Checkpoint *checkpoint = opens("models/opt-tiny");
    ProfileSize size;
    ASSERT_OK(profile_size(&size, NULL, &checkpoint->config, (size_t)1 << 40, &err));
    open_directories();
    ASSERT_OK(hardware_read(&h, "hardware/laptop.json", &err));
    strcpy(h.name, "measured before");
    profile_keep(&h, &size, &(ThisMachine){.offload_dir = offload, .threads = host_set_threads(0)});
    checkpoint_close(checkpoint);
    assert_figures(FIGURES("policy" TINY " --prompt-len 8 --gen-len 4 --json -"), "'hardware=measured before'");
    CU_ASSERT(shows(flexgen_done("generate" TINY " --prompt Once --max-tokens 3").err, "predicted ... measured"));
}

/* Of a longer block it is said what it would bring, as predicted, where that is anything: with zigzag it is not. */
TEST(what_a_longer_block_would_bring_is_at_least_a_percent) {
#define FIVE_PROMPTS \
    "generate" TINY " --prompts models/prompts.txt --max-tokens 5 --hardware hardware/t4-fitted.json --no-rehearsal"
    static const char would[] = " would bring ";
    const char *said = strstr(flexgen_done(FIVE_PROMPTS).err, would);
    CU_ASSERT(said && atoi(said + strlen(would)) >= 1);
    CU_ASSERT_PTR_NULL(strstr(flexgen_done(FIVE_PROMPTS " --schedule zigzag").err, would));
}

// ---- eval -----------------------------------------------------------------------------------------------------------

/* The policy searched for, and one that leaves nothing on the GPU. */
TEST(eval_gives_the_same_perplexity_under_every_policy) {
    const Result r = flexgen_done(STORIES " --limit 5");
    CU_ASSERT(strstr(r.err, "T (s)") && !strstr(r.err, "throughput")); /* nothing was generated */
    const cJSON *given = FIGURES(STORIES ALL_DISK " --limit 5 --gpu-batch-size 2 --num-gpu-batches 2");
    assert_figures(given, "bits_per_byte T wg bls windows=5 window=64 tokens=%d perplexity>5 perplexity<100", 5 * 63);
    CU_ASSERT_DOUBLE_EQUAL(number(given, "perplexity"), exp(number(given, "nll")), 1e-6);
    CU_ASSERT_EQUAL(number(figures_of(r), "nll"), number(given, "nll"));
}

TEST(eval_knows_which_last_words_are_right) {
    give("words",
         "{\"text\": \"Once upon a time, there was a little girl named Lily. Once upon a time\"}\n"
         "{\"text\": \"Once upon a hippopotamus\"}\n{\"text\": \"not read\"}\n");
    const cJSON *json = FIGURES(EVAL " --last-word @words --limit 2 --json -");
    assert_figures(json, "lines=2 last_word_accuracy=0.5 perplexity>10");
    CU_ASSERT_PTR_NULL(item(json, "windows"));
}

/* Lines of two windows, too, and one whose prompt is cut. Killed between two sweeps, the job goes on under another policy;
 * with other lines, with rounded weights or as another command it does not. */
TEST(scores_of_lines_are_a_job_that_goes_on) {
#define SCORE EVAL " --score @pairs --gpu-batch-size 1 --num-gpu-batches 1 "
    enum { PAIRS = 8, SOME_SCORES = 560 /* bytes of a journal, with the scores of the first line */ };
    static char pairs[60000];
    char *end = pairs;
    for (int i = 0; i < PAIRS; i++) {
        end += sprintf(end, "{\"id\": \"%c\", \"prompt\": \"%s", 'a' + i, i ? "Once upon a time" : "");
        for (int n = i == 3 ? 530 : 0; n; n--) end += sprintf(end, " dog");
        end += sprintf(end, "\", \"completion\": \" there was");
        for (int n = i ? i : 530; n; n--) end += sprintf(end, " cat");
        end += sprintf(end, "\"}\n");
    }
    give("pairs", pairs);
    const Result plain = flexgen_done(SCORE ALL_GPU);
    for (int i = 0; i < PAIRS; i++) {
        const cJSON *line = json_line(plain.out, i);
        assert_figures(line, "logprob<0 tokens=%d", 2 + (i ? i : 530));
        CU_ASSERT(string(line, "id")[0] == 'a' + i && cJSON_IsBool(item(line, "greedy")) && cJSON_GetArraySize(line) == 4);
    }
    CU_ASSERT(shows(plain.err, "1 of 8 prompts cut short: the model has 512 positions ... "));
    CU_ASSERT(shows(plain.err, "8 prompts, 574 tokens scored in "));
    const Result killed = stop_at(SOME_SCORES, SIGKILL, "scores", SCORE ALL_CPU " --link ctog=50M");
    CU_ASSERT_EQUAL(killed.status, 1000 + SIGKILL);
    assert_ends(flexgen(SCORE ALL_GPU " --resume --output @scores --compress-weight --bits 3"), EXIT_USAGE,
                OTHER "bits of weights is 0, and here it is 3");
    assert_ends(flexgen(SCORE ALL_GPU " --resume --output @scores --limit 5"), EXIT_USAGE, OTHER "prompts is \"9, ");
    const Result other = flexgen(GENERATE " --prompts @pairs --resume --output @scores");
    CU_ASSERT(other.status == EXIT_USAGE && shows(other.err, "\"completion\" is not known ... " OTHER "prompts is \"9, "));
    const Result rest = flexgen_done(SCORE ALL_DISK " --resume --output @scores");
    CU_ASSERT(shows(rest.err, "8 prompts, 574 tokens scored, the rest of them in "));
    CU_ASSERT_STRING_EQUAL(text_of("scores"), plain.out);
    CU_ASSERT(shows(flexgen_done(SCORE ALL_GPU " --resume --output @scores").err, "nothing is left to do"));
}

TEST(a_line_that_cannot_be_scored_has_an_error) {
    give("pairs", "{\"prompt\": \"One\", \"completion\": \" day\"}\n{\"prompt\": \"One\"}\n{\"text\": \"One day\"}\n");
    const Result r = flexgen(SCORE ALL_GPU);
    CU_ASSERT(r.status == EXIT_FAILED && shows(r.err, "flexgen: 1 of 3 prompts could not be scored; look for \"error\""));
    assert_figures(json_line(r.out, 1), "id=1");
    CU_ASSERT(shows(string(json_line(r.out, 1), "error"), "line 2: \"text\" is nothing; expected a string, or"));
    CU_ASSERT_EQUAL(number(json_line(r.out, 0), "logprob"), number(json_line(r.out, 2), "logprob"));
}

/* Rounding to 8 bits costs less than to 2; 4 bits are packed. test_eval.c has that it does not matter where they rest. */
TEST(a_study_rounds_and_says_so) {
    double loss[3];
    static const int bits[] = {8, 4, 2};
    for (int i = 0; i < 3; i++) {
        const cJSON *json = FIGURES(STORIES ALL_GPU " --limit 2 --compress-weight --bits %d", bits[i]);
        const cJSON *study = item(json, "study");
        loss[i] = number(json, "perplexity");
        CU_ASSERT_EQUAL(!study, bits[i] == 4);
        assert_figures(json, "compress_weight=%s", study ? "false" : "true");
        if (study) assert_figures(study, "bits=%d group=64 weights=true cache=false", bits[i]);
    }
    CU_ASSERT(loss[0] < loss[1] && loss[1] < loss[2]);
}

// ---- The GPU: without one, and with the emulation where the Makefile could build it ---------------------------------

#define DOG GENERATE " --prompt 'The dog' --max-tokens 6 "

TEST(without_a_gpu_the_default_is_the_host_device_and_says_so) {
    assert_ends(flexgen(DOG "--device cuda"), EXIT_USAGE, "CUDA");
    const Result r = flexgen_done(DOG), quiet = flexgen_done(DOG "--device host");
    CU_ASSERT(shows(r.err, "running on the host device ... CUDA"));
    CU_ASSERT_PTR_NULL(strstr(quiet.err, "running on the host device"));
    CU_ASSERT_STRING_EQUAL(r.out, quiet.out);
}

const char *test_missing(const char *name) {
    const bool on_gpu = strstr(name, "gpu") && !strstr(name, "without a gpu");
    return on_gpu && !getenv("FLEXGEN_EMULATED") ? "the emulated GPU, which needs the CUDA toolkit's headers" : NULL;
}

/* And two cores are left to its lanes. */
TEST(the_gpu_writes_what_the_host_writes) {
    static const char *const flags[] = {"", "--threads 2", "--percent 30 40 0 50 20 40 --cpu-cache-compute"};
    const Result host = flexgen_done(DOG);
    const int all = host_set_threads(0), left = imax(all - 2, (all + 1) / 2), threads[] = {left, 2, left};
    for (int i = 0; i < 3; i++) {
        char said[60];
        with.emulated = true;
        const Result gpu = flexgen_done(DOG "%s", flags[i]);
        snprintf(said, sizeof said, " %d thread%s", threads[i], threads[i] == 1 ? "" : "s");
        CU_ASSERT(shows(gpu.err, "emulated GPU") && shows(gpu.err, said));
        CU_ASSERT_STRING_EQUAL(gpu.out, host.out);
    }
}

TEST(trouble_with_the_gpu_is_one_line_that_says_what_to_do) {
    static const struct {
        const char *variable, *flags;
        int status;
        const char *said;
    } cases[] = {
        {"CUDA_CPU_NO_DEVICE=1", "--device cuda", 2, "driver ... install"},
        {"CUDA_CPU_NO_DEVICE=2", "--device cuda", 2, "finds none ... nvidia-smi"},
        {"CUDA_CPU_ARCH=61", "--device cuda", 2, "sm_61 ... too old"},
        {"CUDA_CPU_MEM_MB=64", "--device cuda", 1, "MiB free ... end other programs"},
        {"CUDA_CPU_MEM_MB=100", "--device cuda", 2, "GPU tier ... --gpu-mem"},
        {"CUDA_CPU_LAUNCH_FAILS=1", "--device cuda", 1, "the GPU ... compute-sanitizer"},
        {"CUDA_CPU_LAUNCH_FAILS=30", "--device cuda", 1, "the GPU ... compute-sanitizer"},
        {"CUDA_CPU_GRAPH_FAILS=1", "--device cuda --percent 100 0 100 0 100 0 --gpu-batch-size 1 --num-gpu-batches 1", 0,
         "every kernel is launched by itself: the GPU, making a graph ... --gpu-mem"},
        {"CUDA_CPU_ARCH=61", "", 0, "running on the host device ... too old"},
        {"CUDA_CPU_PIN_FAILS=1", ALL_CPU, 0, "cannot pin ... ulimit -l"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        with = (With){.emulated = true, .set = {cases[i].variable}};
        assert_ends(flexgen(DOG "%s", cases[i].flags), cases[i].status, cases[i].said);
    }
}

/* By the GPU's own account nothing goes beyond --gpu-mem, workspaces included. */
TEST(the_gpu_keeps_to_its_limit) {
    static const int limits[] = {245, 300};
    for (int i = 0; i < 2; i++) {
        with.emulated = true;
        const cJSON *json =
            FIGURES("bench" TINY LAPTOP " --prompt-len 8 --gen-len 2 --num-prompts 4 --gpu-mem %dM --json -", limits[i]);
        const cJSON *tier = item(json, "tiers.GPU");
        assert_figures(tier, "planned_bytes=peak_bytes grown_bytes spare_bytes=%d", 128 << 20); /* of a small card */
        CU_ASSERT(number(tier, "in_use_bytes") >= number(tier, "planned_bytes"));
        CU_ASSERT(number(tier, "in_use_bytes") <= limits[i] * 0x1p20);
        CU_ASSERT(number(tier, "grown_bytes") <= number(tier, "spare_bytes")); /* of a GPU that loads nothing */
    }
}

#define BENCH_GPU "bench" TINY ALL_CPU " --prompt-len 8 --gen-len 2 --gpu-batch-size 2 --num-gpu-batches 2 "

/* A trace takes the GPU's time, so what is measured has none: the task runs a second time for it. Seconds of the GPU's
 * lanes are known of that one only. */
TEST(bench_on_the_gpu_measures_before_it_traces) {
    double moved[2], decoded[2];
    for (int traced = 0; traced < 2; traced++) {
        with.emulated = true;
        const Result r = flexgen_done(BENCH_GPU "--json @gpu.json %s", traced ? "--trace @gpu-trace.json" : "");
        const cJSON *json = json_of("gpu.json");
        CU_ASSERT(!strstr(r.out, "breakdown") == !traced && !item(json, "breakdown") == !traced);
        CU_ASSERT_PTR_NULL(item(json, "channels.gpu.busy_s"));
        assert_figures(json, traced ? "channels.cpu.busy_s traced.channels.gpu.busy_s>0" : "channels.cpu.busy_s");
        moved[traced] = number(json, "channels.ctog.moved_bytes");
        decoded[traced] = number(json, "decode_throughput") * number(json, "decode_s");
    }
    CU_ASSERT(moved[0] > 0 && moved[0] == moved[1]); /* the second run counts for nothing */
    CU_ASSERT_DOUBLE_EQUAL(decoded[0], decoded[1], 1e-6);
    CU_ASSERT(cJSON_GetArraySize(item(json_of("gpu-trace.json"), "traceEvents")) > 2 * 2 * 4); /* sweeps, batches, layers */
}

/* 1,200 rows of a prefill, of 1,024 numbers in the MLP: together where a GPU has room for them, else in pieces of 1,000 or
 * less. */
TEST(a_gpu_with_room_takes_prompts_in_larger_pieces) {
    static const char *const where[] = {"cuda", "host"};
    static const double mlp[] = {2.34, 4}; /* MiB, F16 and F32 */
    for (int i = 0; i < 2; i++) {
        with = (With){.emulated = true, .set = {"CUDA_CPU_LAUNCH_FAILS=1"}}; /* the plan is enough */
        const Result r = flexgen("bench" TINY ALL_GPU
                                 " --prompt-len 100 --gen-len 1 --gpu-batch-size 12 "
                                 "--num-gpu-batches 1 --gpu-mem 1G --device %s",
                                 where[i]);
        const char *line = strstr(r.err, "workspace: mlp");
        CU_ASSERT(line && strtod(line + strlen("workspace: mlp"), NULL) == mlp[i]);
    }
}

/* A launch that fails once the measured run is over: without --trace it would never have been. */
TEST(what_was_measured_on_a_gpu_is_written_before_the_second_run) {
    char fails[40];
    for (int n = 60; n < 1000000; n += n / 2) {
        snprintf(fails, sizeof fails, "CUDA_CPU_LAUNCH_FAILS=%d", n);
        with = (With){.emulated = true, .set = {fails}};
        if (!flexgen(BENCH_GPU).status) break;
    }
    with = (With){.emulated = true, .set = {fails}};
    const Result r = flexgen(BENCH_GPU "--json @early.json --trace @early-trace.json");
    CU_ASSERT_EQUAL(r.status, EXIT_FAILED);
    CU_ASSERT(strstr(r.out, "generation throughput") && strstr(r.err, "in use on the GPU") && !strstr(r.out, "breakdown"));
    assert_figures(json_of("early.json"), "throughput>0");
}

// ---- flexgen quantize -----------------------------------------------------------------------------------------------

/* Packed when it is loaded or read from a packed copy, the model writes the same; not what it writes in F16. */
TEST(a_packed_copy_writes_what_compress_weight_does) {
#define FORTY_TOKENS " --prompt 'Once upon a time' --max-tokens 40 "
    const Result made = flexgen_done("quantize" TINY " --output @packed"), plain = flexgen_done(GENERATE FORTY_TOKENS),
                 same = flexgen_done(GENERATE FORTY_TOKENS "--compress-weight --percent 0 50 100 0 100 0"),
                 from = flexgen_done("generate --model @packed" LAPTOP FORTY_TOKENS);
    CU_ASSERT_STRING_EQUAL(from.out, same.out);
    CU_ASSERT_STRING_NOT_EQUAL(plain.out, same.out);
    CU_ASSERT(shows(from.err, "packed"));
    CU_ASSERT(made.out_len == 0 && count_lines(made.err) == 1 && is_there("packed/merges.txt"));
}

#define AT_THE_PARK " --prompt 'Tom and Sue went to the park to play.' --max-tokens 20 "
#define COUNTED_HEAD "bench" TINY " --prompt-len 10 --gen-len 3 --gpu-batch-size 2 --num-gpu-batches 2 --json - "

/* With the head packed, too: when it is loaded, on the tier where the table rests, or in the copy. A copy without it may
 * get it when it is loaded. */
TEST(a_copy_with_the_head_writes_what_compress_head_does) {
    const Result made = flexgen_done("quantize" TINY " --output @head --compress-head"),
                 plain = flexgen_done(GENERATE AT_THE_PARK "--compress-weight"),
                 same = flexgen_done(GENERATE AT_THE_PARK "--compress-weight --compress-head"),
                 disk = flexgen_done("generate --model @head" LAPTOP AT_THE_PARK
                                     "--percent 0 0 0 0 0 0 --gpu-mem 1.7M "
                                     "--cpu-mem 1.3M --gpu-batch-size 1 --num-gpu-batches 1 --verbose"),
                 from = flexgen_done("generate --model @head" LAPTOP AT_THE_PARK);
    CU_ASSERT(shows(made.err, "4.50 in the matrices of the layers and the head\n"));
    CU_ASSERT_STRING_EQUAL(from.out, same.out);
    CU_ASSERT_STRING_EQUAL(disk.out, same.out);
    CU_ASSERT_STRING_NOT_EQUAL(plain.out, same.out);
    CU_ASSERT(shows(from.err, "packed with the head") && !strstr(plain.err, "the head"));
    CU_ASSERT(shows(disk.err, "embeddings (checkpoint) ... 0.56"));
#define TOO_SMALL LAPTOP AT_THE_PARK "--percent 0 100 0 100 0 100 --gpu-mem 1.2M --cpu-mem 1M "
    assert_ends(flexgen("generate" TINY TOO_SMALL "--compress-weight"), EXIT_USAGE,
                "embeddings with ... MiB: give --compress-weight and --compress-head, or use a smaller model, or raise");
    assert_ends(flexgen("generate --model @head" TOO_SMALL), EXIT_USAGE,
                "embeddings with ... MiB: use a smaller model, or raise");
    assert_figures(FIGURES(COUNTED_HEAD "--compress-weight --compress-head"), "compress_weight=true compress_head=true");
    CU_ASSERT(!json_get(FIGURES(COUNTED_HEAD "--compress-weight"), "compress_head"));
}

/* The counters of what is packed, and of what sparse attention reads. */
TEST(bench_counts_packed_bytes_and_the_v_that_is_read) {
#define COUNTED                                                                                         \
    "bench" TINY                                                                                        \
    " --prompt-len 100 --gen-len 3 --gpu-batch-size 2 --num-gpu-batches 2 --percent 0 100 0 100 100 0 " \
    "--cpu-cache-compute --json - "
    static const char loaded[] = "lanes.load weights.moved_bytes";
    const cJSON *plain = FIGURES(COUNTED),
                *packed = FIGURES(COUNTED "--attn-sparsity 0.1 --compress-weight --compress-cache");
    const double k = number(packed, "lanes.attend.k_bytes");
    assert_figures(plain,
                   "attn_sparsity=1 compress_weight=false compress_cache=false lanes.attend.v_bytes=lanes.attend.k_bytes");
    assert_figures(packed, "attn_sparsity=0.1 compress_weight=true compress_cache=true lanes.attend.v_bytes<%g", .12 * k);
    CU_ASSERT_EQUAL(k, number(plain, "lanes.attend.k_bytes") * 4.5 / 16);
    CU_ASSERT(number(packed, loaded) < .29 * number(plain, loaded)); /* and what stays F16 */
}

/* Stopped while it is made, or by a disk that is full. */
TEST(a_copy_that_is_stopped_leaves_nothing) {
    const char *dir = keep(xstrdup(temp_dir()));
    for (int i = 0; i < 3; i++) {
        const int before = count_files(dir);
        const pid_t pid = start_flexgen("quantize" TINY " --output %s/%d --threads 1", dir, i);
        while (program_runs(pid) && count_files(dir) == before) usleep(1000); /* it has begun */
        kill(pid, SIGTERM);
        const Result r = finish(pid);
        if (r.status) assert_ends(r, 128 + SIGTERM, "stopped by SIGTERM ... no copy");
        CU_ASSERT_EQUAL(count_files(dir), before + !r.status); /* or it was too late */
    }
    const int before = count_files(dir);
    with.file = 100000;
    assert_ends(flexgen("quantize" TINY " --output %s/full", dir), EXIT_FAILED,
                "full ... model.safetensors ... File too large ... make room");
    CU_ASSERT_EQUAL(count_files(dir), before);
}

// ---- Installation ---------------------------------------------------------------------------------------------------

/* Runs a command of the shell in the folder of the program's sources. $D is a directory of this suite's, and $TINY the
 * shipped model. */
__attribute__((format(printf, 1, 2))) static Result shell(const char *format, ...) {
    char *line;
    va_list list;
    va_start(list, format);
    CHECK(vasprintf(&line, format, list) >= 0);
    va_end(list);
    return finish(start_program((const char *const[]){"sh", "-c", keep(line), NULL}));
}

/* The program and its libraries are those that the suites have, and -o says that they need not be built. */
#define MAKE                                                                                                       \
    "unset MAKEFLAGS MAKELEVEL; B=$D/build; make NVCC= MPICC= PREFIX=/usr DESTDIR=$D/root BUILD=$B -o $B/flexgen " \
    "-o $B/flexgen_cuda.so -o $B/flexgen_mpi.so MPI_SO=$(ls $B/flexgen_mpi.so) "
/* It is started where there is no hardware/. */
#define INSTALLED "cd / && $D/root/usr/bin/flexgen "
#define ON_A_GPU "generate --device cuda --model $TINY --prompt x --max-tokens 1 --gpu-batch-size 1 --num-gpu-batches 1"
#define HERE "generate --model $TINY" LAPTOP " --prompt a"
#define FOR_MACHINE "policy --model opt-125m --prompt-len 8 --gen-len 2 --num-prompts 4 --hardware "

TEST(an_installed_program_has_its_libraries_and_machines_and_uninstall_leaves_none) {
    const bool emulated = getenv("FLEXGEN_EMULATED") != NULL;
    open_directories();
    setenv("D", temp_dir(), 1);
    setenv("TINY", keep(realpath("models/opt-tiny", NULL)), 1);
    went_well(shell("mkdir $D/build && cp $FLEXGEN_BIN $D/build/flexgen"));
    const bool mpi = shell("cp ${FLEXGEN_BIN}_mpi.so $D/build/flexgen_mpi.so").status == 0;
    if (emulated) went_well(shell("cp ${FLEXGEN_EMULATED}_cuda.so $D/build/flexgen_cuda.so"));
    went_well(shell(MAKE "CUDA_SO=$(ls $B/flexgen_cuda.so) install"));
    Result r = went_well(shell(INSTALLED "--version"));
    CU_ASSERT(shows(r.out, emulated ? ", sim, cuda\n" : ", sim\n") &&
              shows(r.out, mpi ? "sim, MPI\n" : "pipelines: sim\n"));
    if (emulated) CU_ASSERT(shows(went_well(shell(INSTALLED ON_A_GPU ALL_GPU)).err, "emulated GPU"));
    r = went_well(shell(INSTALLED HERE));
    CU_ASSERT_STRING_EQUAL(r.out, flexgen_done(GENERATE " --prompt a").out);
    CU_ASSERT(shows(went_well(shell(INSTALLED FOR_MACHINE "hardware/t4.json")).out, "on: T4 16 GB"));
    assert_ends(shell(INSTALLED FOR_MACHINE "hardware/t4.json --json $D/root/usr/lib/flexgen/hardware/t4.json"), EXIT_USAGE,
                "--json: is the file of --hardware");
    assert_ends(shell(INSTALLED FOR_MACHINE "hardware/none.json"), EXIT_USAGE, ": hardware/none.json: cannot open");
    assert_ends(shell(INSTALLED FOR_MACHINE "/hardware/t4.json"), EXIT_USAGE, ": /hardware/t4.json: cannot open");
    CU_ASSERT_EQUAL(shell("cmp docs/flexgen.1 $D/root/usr/share/man/man1/flexgen.1").status, 0);
    /* a library of an earlier installation goes */
    went_well(shell(MAKE "CUDA_SO= install"));
    CU_ASSERT(shows(went_well(shell(INSTALLED "--version")).out, ", sim\n"));
    went_well(shell(MAKE "uninstall"));
    CU_ASSERT_STRING_EQUAL(shell("find $D/root ! -type d -o -name 'flexgen*'").out, "");
}

/* Replaces the escapes of roff in a text. */
static char *without_roff(char *text) {
    char *to = text;
    for (const char *from = text; *from; from++)
        if (*from != '\\')
            *to++ = *from;
        else
            *to++ = *++from == 'e' ? '\\' : *from;
    *to = 0;
    return text;
}

/* Returns true if a text has this line, or a line that begins so; otherwise prints it. */
__attribute__((format(printf, 2, 3))) static bool has_line(const char *text, const char *format, ...) {
    char line[500] = "\n";
    va_list list;
    va_start(list, format);
    vsnprintf(line + 1, sizeof line - 1, format, list);
    va_end(list);
    const bool has = strstr(text, line) != NULL;
    if (!has) fprintf(stderr, "\n    there is no line \"%s\"\n", line + 1);
    return has;
}

TEST(the_manual_page_has_every_command_and_flag_of_the_help_and_no_other) {
    const char *page = without_roff(keep(contents("docs/flexgen.1", NULL))), *help = flexgen_done("--help").out, *does;
    char name[40], text[400];
    int flags = 0, said = 0;
    for (const char *at = help; (at = strstr(at, "\n  ")); at++) {
        if (sscanf(at, " --%39s %*s %399[^\n]", name, text) == 2) {
            CU_ASSERT(has_line(page, ".BR --%s ", name) && has_line(page, "%s\n", text));
            flags++;
        } else if (sscanf(at, " flexgen %39s %399[^\n]", name, text) == 2) {
            does = text;
            for (const char *gap = text; (gap = strstr(gap, "  ")); gap++) does = gap + 2;
            CU_ASSERT(has_line(page, ".B flexgen %s", name) && has_line(page, "%s\n", does));
        }
    }
    for (const char *at = page; (at = strstr(at, "--")); said++) {
        const size_t len = strspn(at, "abcdefghijklmnopqrstuvwxyz-");
        CU_ASSERT(has_line(help, "  %.*s ", (int)len, at));
        at += len;
    }
    for (const char *at = page; (at = strstr(at, "\n.B flexgen ")); at++)
        if (sscanf(at, " .B flexgen %39s", name) == 1) CU_ASSERT(has_line(help, "  flexgen %s ", name));
    CU_ASSERT(flags > 40 && said > flags);
}
