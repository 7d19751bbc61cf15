/* test_job.c: prompts as they come in. The pieces are those of tests/golden/tokenizer. */
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests.h"

#define PIECES "tests/golden/tokenizer"
enum { VOCAB = 1024, POSITIONS = 32, N = 8 };

static const OptConfig config = {.vocab = VOCAB, .max_pos = POSITIONS, .eos = 2};
static Tokenizer *tokenizer;
static Error err;

static void open_pieces(void) {
    if (!tokenizer) tokenizer = tokenizer_open(PIECES, VOCAB, &err);
    if (!tokenizer) CU_FAIL_FATAL(err.text);
}

// ---------------------------------------------------------------------------------------------------------------
// Prompts in
// ---------------------------------------------------------------------------------------------------------------

static Job empty_job(bool strict, const char *format) {
    open_pieces();
    return (Job){.tokenizer = tokenizer, .config = &config, .max_tokens = N, .strict = strict, .format = format};
}

/* Writes a prompt file of these bytes, under a name that says nothing. */
static const char *prompt_file(const char *bytes, size_t len) {
    static char dir[300], path[320];
    if (!dir[0]) snprintf(dir, sizeof dir, "%s", temp_dir());
    snprintf(path, sizeof path, "%s/prompts", dir);
    write_file(dir, "prompts", bytes, len);
    return path;
}

static Job read_text(const char *text, bool strict) {
    Job job = empty_job(strict, NULL);
    ASSERT_OK(job_read(&job, prompt_file(text, strlen(text)), &err));
    return job;
}

/* The prompts of a file are these texts with these ids, up to NULL. */
static void assert_prompts(const char *file, const char *const *texts, const char *const *ids) {
    Job job = read_text(file, true);
    int n = 0;
    for (; texts[n] && n < job.count; n++) {
        CU_ASSERT_STRING_EQUAL(job.request[n].text, texts[n]);
        CU_ASSERT_STRING_EQUAL(job.request[n].id, ids[n]);
    }
    CU_ASSERT_PTR_NULL(texts[n]);
    CU_ASSERT_EQUAL(job.count, n);
    job_free(&job);
}
#define LIST(...) ((const char *const[]){__VA_ARGS__, NULL})

static bool says(const char *text, const char *part) {
    if (!strstr(text, part)) fprintf(stderr, "\n    no \"%s\" in: %s\n", part, text);
    return strstr(text, part) && !strchr(text, '\n');
}

/* The file is refused in one line that has the part, and the job can still be freed. */
static void assert_refused(const char *bytes, size_t len, int code, bool strict, const char *part) {
    Job job = empty_job(strict, NULL);
    memset(&err, 0, sizeof err);
    CU_ASSERT_EQUAL(job_read(&job, prompt_file(bytes, len), &err), -1);
    CU_ASSERT_EQUAL(err.code, code);
    CU_ASSERT(says(err.text, part) && strstr(err.text, "prompts"));
    job_free(&job);
}

/* One prompt of the file is impossible: with `strict` the job is refused, without the prompt alone, in the same words but
 * for the file's name: a job may go on with a copy of the file elsewhere. */
static void assert_impossible(const char *bytes, size_t len, const char *part) {
    Job job = empty_job(false, NULL);
    int errors = 0;
    assert_refused(bytes, len, EXIT_FAILED, true, part);
    ASSERT_OK(job_read(&job, prompt_file(bytes, len), &err));
    for (int i = 0; i < job.count; i++) {
        const Request *r = &job.request[i];
        CU_ASSERT(!r->error == (r->text && r->ids));
        CU_ASSERT_PTR_NOT_NULL(r->id);
        if (!r->error) continue;
        errors++;
        CU_ASSERT(says(r->error, part) && !strstr(r->error, prompt_file(bytes, len)));
    }
    CU_ASSERT_EQUAL(errors, 1);
    job_rest(&job);
    CU_ASSERT_EQUAL(job.task.count, job.count - 1);
    job_free(&job);
}
#define IMPOSSIBLE(bytes, part) assert_impossible(bytes, sizeof bytes - 1, part)
#define REFUSED(bytes, code, part) assert_refused(bytes, sizeof bytes - 1, code, false, part)

static void plain_lines_are_prompts_with_the_numbers_of_their_lines(void) {
    assert_prompts("one\ntwo\n", LIST("one", "two"), LIST("0", "1"));
    assert_prompts("one\ntwo", LIST("one", "two"), LIST("0", "1"));
    assert_prompts("one\r\n\r\n  two \r\n", LIST("one", "  two "), LIST("0", "2"));
    assert_prompts("\n \t \n\nonly", LIST("only"), LIST("3"));
    assert_prompts("\xEF\xBB\xBFone\n", LIST("one"), LIST("0"));
    assert_prompts("a\rb\n\"c\"\n[1]\n", LIST("a\rb", "\"c\"", "[1]"), LIST("0", "1", "2"));
    assert_prompts("[1] is a note\n{brace\n", LIST("[1] is a note", "{brace"), LIST("0", "1"));
}

static void json_lines_are_prompts_with_their_own_ids(void) {
    assert_prompts("{\"prompt\": \"a\\n\\u00e9\\\"\"}\n{\"prompt\": \"\", \"more\": [null]}", LIST("a\n\xC3\xA9\"", ""),
                   LIST("0", "1"));
    assert_prompts("\xEF\xBB\xBF \t{\"prompt\": \"a\"}\r\n\n{\"prompt\": \"b\"}\r\n", LIST("a", "b"), LIST("0", "2"));
    assert_prompts("{\"id\": \"x\\\"\\u00e9\", \"prompt\": \"a\"}\n{\"id\": \"\", \"prompt\": \"b\"}", LIST("a", "b"),
                   LIST("\"x\\\"\xC3\xA9\"", "\"\""));
    assert_prompts("{\"id\": \"1\", \"prompt\": \"a\"}\n{\"id\": 1, \"prompt\": \"b\"}", LIST("a", "b"),
                   LIST("\"1\"", "1"));
}

static void ids_keep_to_their_lines(void) {
    assert_prompts("{\"id\": \"\xE2\x80\xA8 \\u0085\", \"prompt\": \"a\"}\n", LIST("a"), LIST("\"\\u2028 \\u0085\""));
}

/* The word would be one of a million letters. */
static void a_prompt_that_is_far_too_long_is_refused_before_it_is_encoded(void) {
    enum { LONG = 1000000 };
    char *text = xcalloc(LONG + 1, 1);
    memset(text, 'q', LONG);
    assert_refused(text, LONG, EXIT_FAILED, true, "the prompt has at least ");
    free(text);
}

static void number_ids_come_back_as_given(void) {
    assert_prompts(
        "{\"id\": 1000000000000000, \"prompt\": \"\"}\n{\"id\": -3, \"prompt\": \"\"}\n{\"id\": 9007199254740991, "
        "\"prompt\": \"\"}",
        LIST("", "", ""), LIST("1000000000000000", "-3", "9007199254740991"));
    IMPOSSIBLE("{\"id\": 9007199254740993, \"prompt\": \"\"}", "below 2^53"); /* a double makes it ...992 */
    IMPOSSIBLE("{\"id\": 12345678901234567890, \"prompt\": \"\"}",
               "line 1: \"id\" is 1.2345678901234567e+19"); /* the nearest double */
    IMPOSSIBLE("{\"id\": 1e300, \"prompt\": \"\"}", "\"id\"");
    IMPOSSIBLE("{\"id\": 1e400, \"prompt\": \"\"}", "line 1");
    IMPOSSIBLE("{\"id\": 1.5, \"prompt\": \"\"}", "\"id\" is 1.5; expected a string, or a whole number below 2^53");
    IMPOSSIBLE("{\"id\": [1], \"prompt\": \"\"}", "\"id\" is a list; expected a string, or");
    IMPOSSIBLE("{\"id\": true, \"prompt\": \"\"}", "\"id\" is true; expected a string, or");
}

/* The second of them is as impossible as any other prompt that is wrong: the first one and the others go on. */
static void of_two_prompts_with_one_id_the_first_alone_is_possible(void) {
    IMPOSSIBLE("{\"id\": 7, \"prompt\": \"a\"}\n{\"id\": 7.0, \"prompt\": \"b\"}", "line 2: the id 7 is that of line 1");
    IMPOSSIBLE("{\"id\": 0, \"prompt\": \"a\"}\n{\"id\": -0, \"prompt\": \"b\"}", "line 2: the id 0 is that of line 1");
    IMPOSSIBLE("{\"id\": \"\\u0061\", \"prompt\": \"a\"}\n\n{\"id\": \"a\", \"prompt\": \"b\"}",
               "line 3: the id \"a\" is that of line 1");
    Job job = read_text(
        "{\"id\": 1, \"prompt\": \"a\"}\n{\"id\": 5, \"prompt\": \"b\"}\n{\"id\": 1, \"prompt\": \"c\"}\n"
        "{\"id\": 1, \"prompt\": 4}\n{\"id\": 1, \"prompt\": \"d\"}\n{\"prompt\": \"e\"}",
        false);
    static const char *const errors[] = {
        NULL, NULL, "line 3: the id 1 is that of line 1", "line 4: \"prompt\" is not", "line 5: the id 1 is that of line 1",
        NULL};
    CU_ASSERT_EQUAL_FATAL(job.count, 6);
    for (int i = 0; i < 6; i++) {
        const Request *e = &job.request[i];
        CU_ASSERT(errors[i] ? e->error && says(e->error, errors[i]) && !e->s && !e->text : !e->error && e->s);
        CU_ASSERT_STRING_EQUAL(e->id, i == 1 ? "5" : i == 5 ? "6" : "1");
    }
    job_free(&job);
}

static void an_id_that_is_not_given_is_nobody_elses(void) {
    assert_prompts("{\"id\": 1, \"prompt\": \"a\"}\n{\"prompt\": \"b\"}", LIST("a", "b"), LIST("1", "2"));
    assert_prompts(
        "{\"prompt\": \"a\"}\n\n{\"prompt\": \"b\"}\n{\"id\": 0, \"prompt\": \"c\"}\n{\"id\": 5, \"prompt\": \"d\"}",
        LIST("a", "b", "c", "d"), LIST("6", "2", "0", "5"));
    assert_prompts("{\"id\": \"0\", \"prompt\": \"a\"}\n{\"id\": null, \"prompt\": \"b\"}", LIST("a", "b"),
                   LIST("\"0\"", "1"));
}

static void max_tokens_of_a_prompt_is_kept_and_cut_where_positions_end(void) {
    Job job = read_text(
        "{\"prompt\": \"ab\"}\n{\"prompt\": \"ab\", \"max_tokens\": 3}\n{\"prompt\": \"ab\", \"max_tokens\": 1000000000}\n"
        "{\"prompt\": \"ab\", \"max_tokens\": null}",
        true);
    CU_ASSERT_EQUAL_FATAL(job.count, 4);
    for (int i = 0; i < 4; i++) {
        const Request *p = &job.request[i];
        CU_ASSERT_EQUAL(p->ids[0], 2);
        CU_ASSERT_EQUAL(p->n, i % 3 == 0 ? N : i == 1 ? 3 : POSITIONS - p->s + 1);
        CU_ASSERT_EQUAL(p->cut, i == 2);
    }
    job_free(&job);
    IMPOSSIBLE("{\"prompt\": \"\"}\n{\"prompt\": \"\", \"max_tokens\": 0}", "line 2: \"max_tokens\"");
    IMPOSSIBLE("{\"prompt\": \"\", \"max_tokens\": -1}", "\"max_tokens\"");
    IMPOSSIBLE("{\"prompt\": \"\", \"max_tokens\": 1.5}", "\"max_tokens\"");
    IMPOSSIBLE("{\"prompt\": \"\", \"max_tokens\": 1e10}", "\"max_tokens\"");
    IMPOSSIBLE("{\"prompt\": \"\", \"max_tokens\": \"8\"}", "\"max_tokens\"");
}

static void a_prompt_may_fill_the_positions_but_not_more(void) {
    static const char line[] = "There are a few tokens here";
    Job job = empty_job(true, NULL);
    int32_t *ids;
    int n = tokenizer_encode(tokenizer, line, strlen(line), &ids, &err);
    free(ids);
    OptConfig exact = config, less = config;
    exact.max_pos = n + 1, less.max_pos = n; /* </s> takes one */
    job.config = &exact;
    job_add(&job, &(Lines){.line = line, .size = strlen(line), .number = 1, .where = "here"}, false);
    ASSERT_OK(job_settle(&job, "", &err));
    CU_ASSERT(job.request[0].s == n + 1 && job.request[0].n == 1);
    job.config = &less;
    job_add(&job, &(Lines){.line = line, .size = strlen(line), .number = 2, .where = "here"}, false);
    CU_ASSERT_EQUAL(job_settle(&job, "", &err), -1);
    CU_ASSERT(!strncmp(err.text, "here: ", 6) && strstr(err.text, "shorten"));
    job_free(&job);
}

static void what_is_no_prompt_is_an_error_with_its_line(void) {
    IMPOSSIBLE("fine\nno\0ne\n", "line 2: a NUL byte");
    IMPOSSIBLE("\0\n", "line 1: a NUL byte");
    IMPOSSIBLE("fine\n\n\xED\xA0\x80\n", "line 3: the prompt is not valid UTF-8");
    IMPOSSIBLE("{\"prompt\": \"a\\u0000\"}", "line 1: byte 13");
    IMPOSSIBLE("{\"prompt\": \"a\0\"}", "line 1: byte 13");
    IMPOSSIBLE("{\"prompt\": \"\xFF\"}", "line 1: byte 12");
    IMPOSSIBLE("{\"prompt\": \"\\ud83d\"}", "surrogate");
    IMPOSSIBLE("{\"prompt\": \"a\"}\nplain\n", "line 2: byte 0");
    IMPOSSIBLE("{\"prompt\": \"a\"}\n[]\n", "line 2: expected a JSON object");
    IMPOSSIBLE("{\"prompt\": \"a\"} {\"prompt\": \"b\"}", "nothing after the value");
    IMPOSSIBLE("{\"prompt\": \"a\", \"prompt\": \"b\"}", "twice");
    IMPOSSIBLE("{\"prompt\": \"a\"", "the text ends here");
    IMPOSSIBLE("{\"Prompt\": \"a\"}", "\"prompt\" is missing");
    IMPOSSIBLE("{\"prompt\": null}", "\"prompt\" is not a string");
    IMPOSSIBLE("{\"prompt\": 1e400}", "line 1");
}

/* An impossible prompt keeps its id, and the others their places. */
static void a_prompt_that_is_impossible_keeps_its_id_and_place(void) {
    Job job =
        read_text("{\"id\": \"x\", \"prompt\": 5}\n{\"id\": 3, \"prompt\": \"a\"}\nbroken\n{\"prompt\": \"b\"}\n", false);
    CU_ASSERT_EQUAL_FATAL(job.count, 4);
    CU_ASSERT(job.request[0].error && !strcmp(job.request[0].id, "\"x\""));
    CU_ASSERT(job.request[2].error && !strcmp(job.request[2].id, "2"));
    CU_ASSERT(!job.request[3].error && !strcmp(job.request[3].id, "4")); /* 3 was given to another */
    job_rest(&job);
    CU_ASSERT_EQUAL_FATAL(job.task.count, 2);
    CU_ASSERT(job.task.prompts[0].place == 1 && job.task.prompts[1].place == 3);
    job_free(&job);
}

/* What an earlier run has chosen of a prompt is behind its tokens now, and so much less is asked for. */
static void a_job_that_goes_on_asks_for_what_is_left(void) {
    Job job = read_text("one\ntwo\nthree\n", true);
    static const int32_t chosen[] = {7, 8, 9};
    for (int i = 0; i < 3; i++) {
        Request *r = &job.request[i];
        r->known = i == 2 ? 3 : i, r->ended = i == 0;
        r->tokens = memcpy(xcalloc(3, sizeof *r->tokens), chosen, sizeof chosen);
    }
    job_rest(&job);
    CU_ASSERT_EQUAL_FATAL(job.task.count, 2);
    for (int i = 0; i < 2; i++) {
        const Request *r = &job.request[i + 1];
        const Prompt *q = &job.task.prompts[i];
        CU_ASSERT(q->place == i + 1 && q->s == r->s + r->known && q->n == N - r->known && q->n < N);
        CU_ASSERT(q->ids[0] == config.eos && !memcmp(q->ids + r->s, chosen, (size_t)r->known * sizeof *chosen));
    }
    job_free(&job);
}

static void a_file_is_json_lines_or_plain_as_a_whole(void) {
    REFUSED("plain\n{\"prompt\": \"not read\"}\n", EXIT_USAGE, "line 2: is a JSON object in a file of plain lines");
    REFUSED("[{\"prompt\": \"a\"}]", EXIT_USAGE, "is one JSON value");
    REFUSED("\n[\n {\"prompt\": \"a\"},\n {\"prompt\": \"b\"}\n]\n", EXIT_USAGE, "is one JSON value");
    REFUSED("{\n \"prompt\": \"a\"\n}\n", EXIT_USAGE, "is one JSON value");
    static const char lines[] = "{\"prompt\": \"a\"}\n";
    static const struct {
        const char *name, *format, *text;
    } cases[] = {{"x", NULL, "a"},
                 {"x.jsonl", NULL, "a"},
                 {"x.jsonl", "text", "{\"prompt\": \"a\"}"},
                 {"x", "text", "{\"prompt\": \"a\"}"},
                 {"x.txt", "jsonl", "a"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char path[400];
        const char *dir = temp_dir();
        Job job = empty_job(true, cases[i].format);
        snprintf(path, sizeof path, "%s/%s", dir, cases[i].name);
        write_file(dir, cases[i].name, lines, strlen(lines));
        ASSERT_OK(job_read(&job, path, &err));
        CU_ASSERT_STRING_EQUAL(job.request[0].text, cases[i].text);
        job_free(&job);
        job = empty_job(true, NULL);
        snprintf(path, sizeof path, "%s/x.txt", dir);
        write_file(dir, "x.txt", lines, strlen(lines));
        CU_ASSERT_EQUAL(job_read(&job, path, &err), -1); /* by its name it is plain, and then it is not */
        CU_ASSERT(strstr(err.text, "--format jsonl") != NULL);
        job_free(&job);
    }
}

/* Two jobs share a digest only if all that was asked for is the same. */
static void the_digest_changes_with_every_prompt(void) {
    static const char *const files[] = {"a\nb\n",
                                        "b\na\n",
                                        "a\nb\nc\n",
                                        "ab\n",
                                        "{\"prompt\": \"a\"}\n{\"prompt\": \"b\", \"id\": 5}\n",
                                        "{\"prompt\": \"a\", \"max_tokens\": 5}\n{\"prompt\": \"b\"}\n"};
    enum { COUNT = sizeof files / sizeof *files };
    uint64_t digest[COUNT];
    for (int i = 0; i < COUNT; i++) {
        Job job = read_text(files[i], true);
        digest[i] = job.digest;
        job_free(&job);
        for (int e = 0; e < i; e++) CU_ASSERT(digest[e] != digest[i]);
    }
    Job again = read_text(files[0], true);
    CU_ASSERT_EQUAL(again.digest, digest[0]);
    job_free(&again);
}

static void a_file_without_prompts_is_an_empty_job(void) {
    static const char *const empty[] = {"", "\n", "\r\n \t\n\n", "\xEF\xBB\xBF", "\xEF\xBB\xBF\n"};
    for (size_t i = 0; i < sizeof empty / sizeof *empty; i++) {
        Job job = read_text(empty[i], true);
        CU_ASSERT_EQUAL(job.count, 0);
        job_free(&job);
    }
}

static void a_prompt_file_that_is_none_is_refused(void) {
    char dir[300], path[320];
    Job job = empty_job(false, NULL);
    snprintf(dir, sizeof dir, "%s", temp_dir());
    CU_ASSERT_EQUAL(job_read(&job, dir, &err), -1);
    CU_ASSERT(strstr(err.text, dir) && strstr(err.text, "directory"));
    snprintf(path, sizeof path, "%s/none", dir);
    CU_ASSERT_EQUAL(job_read(&job, path, &err), -1);
    CU_ASSERT(strstr(err.text, path) && strstr(err.text, "No such file"));
    job_free(&job);
}

static void *write_slowly(void *path) {
    FILE *pipe = fopen(path, "w");
    CHECK(pipe);
    for (const char *c = "one\ntwo\n"; *c; c++) fputc(*c, pipe), fflush(pipe), usleep(1000);
    fclose(pipe);
    return NULL;
}

static void prompts_come_through_a_pipe(void) {
    char path[320];
    pthread_t thread;
    Job job = empty_job(true, NULL);
    snprintf(path, sizeof path, "%s/pipe", temp_dir());
    CHECK(mkfifo(path, 0600) == 0 && pthread_create(&thread, NULL, write_slowly, path) == 0);
    ASSERT_OK(job_read(&job, path, &err));
    pthread_join(thread, NULL);
    CU_ASSERT_EQUAL_FATAL(job.count, 2);
    CU_ASSERT_STRING_EQUAL(job.request[1].text, "two");
    job_free(&job);
}

CU_TestInfo tests[] = {
    {"plain lines are prompts with the numbers of their lines", plain_lines_are_prompts_with_the_numbers_of_their_lines},
    {"JSON lines are prompts with their own ids", json_lines_are_prompts_with_their_own_ids},
    {"ids keep to their lines", ids_keep_to_their_lines},
    {"a prompt that is far too long is refused before it is encoded",
     a_prompt_that_is_far_too_long_is_refused_before_it_is_encoded},
    {"number ids come back as given", number_ids_come_back_as_given},
    {"of two prompts with one id the first alone is possible", of_two_prompts_with_one_id_the_first_alone_is_possible},
    {"a job that goes on asks for what is left", a_job_that_goes_on_asks_for_what_is_left},
    {"an id that is not given is nobody else's", an_id_that_is_not_given_is_nobody_elses},
    {"max_tokens of a prompt is kept, and cut where positions end",
     max_tokens_of_a_prompt_is_kept_and_cut_where_positions_end},
    {"a prompt may fill the positions, but not more", a_prompt_may_fill_the_positions_but_not_more},
    {"what is no prompt is an error with its line", what_is_no_prompt_is_an_error_with_its_line},
    {"a prompt that is impossible keeps its id and place", a_prompt_that_is_impossible_keeps_its_id_and_place},
    {"a file is JSON lines or plain as a whole", a_file_is_json_lines_or_plain_as_a_whole},
    {"the digest changes with every prompt", the_digest_changes_with_every_prompt},
    {"a file without prompts is an empty job", a_file_without_prompts_is_an_empty_job},
    {"a prompt file that is none is refused", a_prompt_file_that_is_none_is_refused},
    {"prompts come through a pipe", prompts_come_through_a_pipe},
    CU_TEST_INFO_NULL,
};
