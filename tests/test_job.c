/* test_job.c: prompts as they come in: which of a file's lines are prompts, which are impossible, and what is said of them.
 * test_json.c has what is JSON and how files are read, and test_completions.c what becomes of the prompts. The pieces are
 * those of tests/golden/tokenizer. */
#include "tests.h"
#include "written.h"

enum { VOCAB = 1024, POSITIONS = 32, N = 8 };

#define BATCH(body) \
    "{\"custom_id\": \"r-1\", \"method\": \"POST\", \"url\": \"/v1/completions\", \"body\": {\"model\": \"m\", " body "}}"

static const OptConfig config = {.vocab = VOCAB, .max_pos = POSITIONS, .eos = 2};
static Tokenizer *tokenizer;
static Error err;

static Job empty_job(bool strict, const char *format) {
    if (!tokenizer) tokenizer = tokenizer_open("tests/golden/tokenizer", VOCAB, &err);
    ASSERT_OK(!tokenizer);
    return (Job){.tokenizer = tokenizer, .config = &config, .max_tokens = N, .strict = strict, .format = format};
}

static const char *prompt_file(const char *name, const char *bytes, size_t len) {
    write_file(suite_dir(), name, bytes, len);
    return in_dir(suite_dir(), name);
}

static Job read_text(const char *text, bool strict) {
    Job job = empty_job(strict, NULL);
    ASSERT_OK(job_read(&job, prompt_file("prompts", text, strlen(text)), &err));
    return job;
}

/* The file is refused in one line that has the part, and the job can still be freed. */
static void assert_refused(const char *bytes, size_t len, bool strict, const char *part) {
    Job job = empty_job(strict, NULL);
    CU_ASSERT_EQUAL(job_read(&job, prompt_file("prompts", bytes, len), &err), -1);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "prompts"));
    said(&err, strict ? EXIT_FAILED : EXIT_USAGE, part);
    job_free(&job);
}

TEST(lines_are_prompts_with_their_ids_or_the_numbers_of_their_lines) {
    static const struct {
        const char *file, *prompts; /* each as ID|TEXT; */
    } cases[] = {
        {"", ""},
        {"one\ntwo\n", "0|one;1|two;"},
        {"\n \t \n\nonly", "3|only;"},
        {"a\rb\n\"c\"\n[1]\n", "0|a\rb;1|\"c\";2|[1];"},
        {"[1] is a note\n{brace\n", "0|[1] is a note;1|{brace;"},
        {"{\"prompt\": \"a\\n\\u00e9\\\"\"}\n{\"prompt\": \"\", \"more\": [null]}", "0|a\n\xC3\xA9\";1|;"},
        {"\xEF\xBB\xBF \t{\"prompt\": \"a\"}\r\n\n{\"prompt\": \"b\"}\r\n", "0|a;2|b;"},
        {"{\"id\": \"x\\\"\\u00e9\", \"prompt\": \"a\"}\n{\"id\": \"\", \"prompt\": \"b\"}", "\"x\\\"\xC3\xA9\"|a;\"\"|b;"},
        {"{\"id\": \"1\", \"prompt\": \"a\"}\n{\"id\": 1, \"prompt\": \"b\"}", "\"1\"|a;1|b;"},
        {"{\"id\": \"\xE2\x80\xA8 \\u0085\", \"prompt\": \"a\"}\n", "\"\\u2028 \\u0085\"|a;"},
        {"{\"id\": 1000000000000000, \"prompt\": \"\"}\n{\"id\": -3, \"prompt\": \"\"}\n{\"id\": 9007199254740991, "
         "\"prompt\": \"\"}",
         "1000000000000000|;-3|;9007199254740991|;"},
        /* an id that is not given is nobody else's */
        {"{\"id\": 1, \"prompt\": \"a\"}\n{\"prompt\": \"b\"}", "1|a;2|b;"},
        {"{\"prompt\": \"a\"}\n\n{\"prompt\": \"b\"}\n{\"id\": 0, \"prompt\": \"c\"}\n{\"id\": 5, \"prompt\": \"d\"}",
         "6|a;2|b;0|c;5|d;"},
        {"{\"id\": \"0\", \"prompt\": \"a\"}\n{\"id\": null, \"prompt\": \"b\"}", "\"0\"|a;1|b;"},
        /* of OpenAI's batches */
        {BATCH("\"prompt\": \"a\", \"n\": 1, \"stream\": false, \"echo\": null"), "\"r-1\"|a;"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        Job job = read_text(cases[i].file, true);
        char all[200] = "";
        for (int n = 0; n < job.count; n++)
            snprintf(all + strlen(all), sizeof all - strlen(all), "%s|%s;", job.request[n].id, job.request[n].text);
        CU_ASSERT_STRING_EQUAL(all, cases[i].prompts);
        job_free(&job);
    }
}

/* One prompt of each file is impossible: with `strict` the job is refused, without the prompt alone, in the same words but
 * for the file's name: a job may go on with a copy of the file elsewhere. */
TEST(a_prompt_that_is_impossible_is_an_error_with_its_line) {
    static const struct {
        const char *file, *part; /* ~ stands for a NUL byte */
    } cases[] = {
        {"fine\nno~ne\n", "line 2: a NUL byte"},
        {"fine\n\n\xED\xA0\x80\n", "line 3: text: invalid UTF-8 at byte 0"},
        {"{\"prompt\": \"a~\"}", "line 1: byte 13"},
        {"{\"prompt\": \"a\"}\nplain\n", "line 2: byte 0"},
        {"{\"prompt\": \"a\"}\n[]\n", "line 2: holds no JSON object; expected {"},
        {"{\"prompt\": \"a\"} {\"prompt\": \"b\"}", "nothing after the value"},
        {"{\"Prompt\": \"a\"}", "\"prompt\" is nothing; expected a string"},
        {"{\"prompt\": null}", "\"prompt\" is null; expected a string"},
        {"{\"id\": 9007199254740993, \"prompt\": \"\"}", "below 2^53"}, /* a double makes it ...992 */
        {"{\"id\": 12345678901234567890, \"prompt\": \"\"}",
         "line 1: \"id\" is 1.2345678901234567e+19"}, /* the nearest double */
        {"{\"id\": 1.5, \"prompt\": \"\"}", "\"id\" is 1.5; expected a string, or a whole number below 2^53"},
        {"{\"id\": [1], \"prompt\": \"\"}", "\"id\" is a list; expected a string, or"},
        {"{\"id\": true, \"prompt\": \"\"}", "\"id\" is true; expected a string, or"},
        {"{\"prompt\": \"\"}\n{\"prompt\": \"\", \"max_tokens\": 0}",
         "line 2: max_tokens 0: expected a whole number from 1 to 1000000000"},
        {"{\"prompt\": \"\", \"max_tokens\": 1e10}", "line 1: max_tokens 1"},
        {"{\"prompt\": \"\", \"max_tokens\": \"8\"}", "line 1: max_tokens \"8\": expected a whole number"},
        {"{\"prompt\": \"\", \"max_new_tokens\": 1.5}", "max_new_tokens 1.5: expected a whole number from 1 to"},
        {"{\"prompt\": \"\", \"max_tokens\": 2, \"max_new_tokens\": 2}",
         "line 1: \"max_tokens\" and \"max_new_tokens\" are"},
        {"{\"prompt\": \"\", \"temperature\": -1}", "temperature -1: expected a number from 0 to 1e+06"},
        {"{\"prompt\": \"\", \"temperature\": \"0.7\"}", "temperature \"0.7\": expected a number"},
        {"{\"prompt\": \"\", \"temperature\": true}", "temperature true: expected a number"},
        {"{\"prompt\": \"\", \"top_p\": 1.1}", "top_p 1.1: expected a number from 1e-06 to 1"},
        {"{\"prompt\": \"\", \"top_k\": [3]}", "top_k a list: expected a whole number from 0"},
        {"{\"prompt\": \"\", \"seed\": -1}", "seed -1: expected a whole number from 0"},
        {"{\"prompt\": \"\", \"stop\": 3}", "\"stop\" is 3; expected a text that is not empty, or a list of them"},
        {"{\"prompt\": \"\", \"stop\": [\"a\", \"\"]}", "\"stop\" is \"\"; expected a text"},
        {"{\"prompt\": \"\", \"stop\": [[\"a\"]]}", "\"stop\" is a list; expected a text"},
        {"{\"prompt\": \"\", \"n\": 2}", "line 1: \"n\" asks for what this program does not do"},
        {"{\"prompt\": \"\", \"logprobs\": 1}", "\"logprobs\" asks for"},
        {BATCH("\"prompt\": \"\", \"echo\": true"), "\"echo\" asks for"},
        {BATCH("\"prompt\": \"\", \"stream\": true"), "\"stream\" asks for"},
        {BATCH("\"messages\": [{\"role\": \"user\"}]"), "line 1: \"messages\" asks for"},
        {BATCH("\"prompt\": [\"a\"]"), "\"prompt\" is a list; expected a string"},
        {BATCH("\"prompt\": \"\", \"top_p\": 0"), "line 1: top_p 0: expected"},
        {"{\"custom_id\": \"r-1\", \"prompt\": \"a\"}", "\"body\" is nothing; expected an object"},
        /* of two prompts with one id the first is possible */
        {"{\"id\": 7, \"prompt\": \"a\"}\n{\"id\": 7.0, \"prompt\": \"b\"}", "line 2: the id 7 is that of line 1"},
        {"{\"id\": 0, \"prompt\": \"a\"}\n{\"id\": -0, \"prompt\": \"b\"}", "line 2: the id 0 is that of line 1"},
        {"{\"id\": \"\\u0061\", \"prompt\": \"a\"}\n\n{\"id\": \"a\", \"prompt\": \"b\"}",
         "line 3: the id \"a\" is that of line 1"},
    };
    for (size_t c = 0; c < COUNT(cases); c++) {
        Job job = empty_job(false, NULL);
        char file[200];
        const size_t len = strlen(strcpy(file, cases[c].file));
        int errors = 0;
        for (char *nul = file; (nul = memchr(nul, '~', len - (size_t)(nul - file)));) *nul = 0;
        assert_refused(file, len, true, cases[c].part);
        const char *path = prompt_file("prompts", file, len);
        ASSERT_OK(job_read(&job, path, &err));
        for (int i = 0; i < job.count; i++) {
            const Request *r = &job.request[i];
            CU_ASSERT(!r->error == (r->text && r->ids) && r->id);
            CU_ASSERT(!r->error || (strstr(r->error, cases[c].part) && !strstr(r->error, path)));
            errors += r->error != NULL;
        }
        CU_ASSERT_EQUAL(errors, 1);
        job_rest(&job);
        CU_ASSERT_EQUAL(job.task.count, job.count - 1);
        job_free(&job);
    }
}

/* The word would be one of a million letters. */
TEST(a_prompt_that_is_far_too_long_is_refused_before_it_is_encoded) {
    enum { LONG = 1000000 };
    char *text = xcalloc(LONG + 1, 1);
    memset(text, 'q', LONG);
    assert_refused(text, LONG, true, "the prompt has at least ");
    free(text);
}

/* They keep their ids, and the others their places. */
TEST(impossible_prompts_keep_their_ids_and_places) {
    static const struct {
        const char *id, *error;
    } requests[] = {{"1", NULL},
                    {"5", NULL},
                    {"1", "line 3: the id 1 is that of line 1"},
                    {"1", "line 4: \"prompt\" is 4"},
                    {"4", "line 5: byte 0"},
                    {"7", NULL}, /* 5 was given to another */
                    {"1", "line 7: the id 1 is that of line 1"}};
    Job job = read_text(
        "{\"id\": 1, \"prompt\": \"a\"}\n{\"id\": 5, \"prompt\": \"b\"}\n{\"id\": 1, \"prompt\": \"c\"}\n"
        "{\"id\": 1, \"prompt\": 4}\nbroken\n{\"prompt\": \"e\"}\n{\"id\": 1, \"prompt\": \"d\"}",
        false);
    CU_ASSERT_EQUAL_FATAL(job.count, 7);
    for (int i = 0; i < 7; i++) {
        const Request *e = &job.request[i];
        const char *error = requests[i].error;
        CU_ASSERT(error ? e->error && strstr(e->error, error) && !e->s && !e->text : !e->error && e->s);
        CU_ASSERT_STRING_EQUAL(e->id, requests[i].id);
    }
    job_rest(&job);
    CU_ASSERT_EQUAL_FATAL(job.task.count, 3);
    for (int i = 0; i < 3; i++) CU_ASSERT_EQUAL(job.task.prompts[i].place, i == 2 ? 5 : i);
    job_free(&job);
}

TEST(max_tokens_of_a_prompt_is_kept_and_cut_where_positions_end) {
    Job job = read_text(
        "{\"prompt\": \"ab\"}\n{\"prompt\": \"ab\", \"max_tokens\": 3}\n{\"prompt\": \"ab\", \"max_tokens\": 1000000000}\n"
        "{\"prompt\": \"ab\", \"max_tokens\": null}",
        true);
    CU_ASSERT_EQUAL_FATAL(job.count, 4);
    for (int i = 0; i < 4; i++) {
        const Request *p = &job.request[i];
        const int n[] = {N, 3, POSITIONS - p->s + 1, N};
        CU_ASSERT(p->ids[0] == config.eos && p->n == n[i] && p->cut == (i == 2));
    }
    job_free(&job);
}

/* What a line does not say is as the flags have it. */
TEST(a_line_says_how_its_prompt_is_completed) {
    static const Sampling flags = {.temperature = .5f, .top_p = .9f, .top_k = 7, .seed = 3};
    static const struct {
        const char *fields;
        Sampling sampling;
        int n;
        const char *stop; /* each text with a | */
    } cases[] = {
        {"\"stop\": null, \"seed\": null, \"top_p\": null", flags, N, ""},
        {"\"temperature\": 0, \"max_new_tokens\": 5", {0, .9f, 7, 3, false}, 5, ""},
        {"\"temperature\": 0.25, \"top_p\": 0.75, \"top_k\": 0, \"max_tokens\": 6", {.25f, .75f, 0, 3, false}, 6, ""},
        {"\"seed\": 9007199254740992", {.5f, .9f, 7, 1ull << 53, true}, N, ""},
        {"\"seed\": 0, \"stop\": \"x\\n\"", {.5f, .9f, 7, 0, true}, N, "x\n|"},
        {"\"stop\": [\"a\", \"bc\"], \"id\": 8", flags, N, "a|bc|"},
        {"\"stop\": []", flags, N, ""},
    };
    for (size_t i = 0; i < 2 * COUNT(cases); i++) {
        const Sampling *wanted = &cases[i / 2].sampling;
        Job job = empty_job(true, NULL);
        char text[300], stops[100] = "";
        job.sampling = flags;
        snprintf(text, sizeof text, i % 2 ? BATCH("\"prompt\": \"ab\", %s") : "{\"prompt\": \"ab\", %s}",
                 cases[i / 2].fields);
        ASSERT_OK(job_read(&job, prompt_file("prompts", text, strlen(text)), &err));
        job_rest(&job);
        const Request *r = &job.request[0];
        const Sampling *s = &job.task.prompts[0].sampling;
        CU_ASSERT(s->temperature == wanted->temperature && s->top_p == wanted->top_p && s->top_k == wanted->top_k);
        CU_ASSERT(s->seed == wanted->seed && s->placeless == wanted->placeless && job.task.sampled == (s->temperature > 0));
        CU_ASSERT_EQUAL(r->n, cases[i / 2].n);
        for (const char *stop = r->stop.text; stop && *stop; stop += strlen(stop) + 1) strcat(strcat(stops, stop), "|");
        CU_ASSERT_STRING_EQUAL(stops, cases[i / 2].stop);
        CU_ASSERT_EQUAL(r->stop.len > 0, strstr(cases[i / 2].fields, "stop") && !strstr(cases[i / 2].fields, "null"));
        job_free(&job);
    }
}

/* Of five tokens and one in front: all stay while three more fit. Then the last ones stay, and always one. */
TEST(a_truncated_prompt_keeps_its_last_tokens) {
    static const char line[] = "a\nb\nc";
    for (int i = 0; i < 20; i++) {
        const int most = i / 2 + 1;
        Tokenizer *t = tokenizer_open(i % 2 ? "tests/golden/forms/no-bos" : "tests/golden/forms/published", 330, &err);
        Job job = empty_job(false, NULL);
        OptConfig own = config;
        int32_t *ids;
        ASSERT_OK(!t);
        const int s = text_encode(&ids, line, strlen(line), t, &err), front = !(i % 2), full = 5 + front;
        CU_ASSERT_EQUAL_FATAL(s, full);
        own.max_pos = most;
        job.config = &own, job.tokenizer = t, job.max_tokens = 3, job.truncate = true;
        job_add(&job, &(Lines){.line = line, .size = strlen(line), .number = 1, .where = "here"}, false);
        const Request *r = job.request;
        const int kept = most - 2 >= full ? full : most - 2 > 1 + front ? most - 2 : 1 + front;
        if (most < 1 + front)
            CU_ASSERT(r->error != NULL)
        else {
            CU_ASSERT_FATAL(!r->error && r->s == kept && r->truncated == (kept < full));
            CU_ASSERT(!memcmp(r->ids + front, ids + s - (kept - front), (size_t)(kept - front) * sizeof *ids));
            CU_ASSERT(r->ids[0] == (front ? ids[0] : ids[s - kept]) && r->n == (most - kept + 1 < 3 ? most - kept + 1 : 3));
            CU_ASSERT_STRING_EQUAL(r->text, line);
        }
        free(ids);
        job_free(&job);
        tokenizer_close(t);
    }
}

TEST(a_prompt_may_fill_the_positions_but_not_more) {
    static const char line[] = "There are a few tokens here";
    for (int less = 0; less < 2; less++) {
        Job job = empty_job(true, NULL);
        OptConfig own = config;
        int32_t *ids;
        const int n = tokenizer_encode(tokenizer, line, strlen(line), &ids, &err);
        own.max_pos = n + 1 - less; /* </s> takes one */
        job.config = &own;
        job_add(&job, &(Lines){.line = line, .size = strlen(line), .number = 1, .where = "here"}, false);
        CU_ASSERT_EQUAL(job_settle(&job, "", &err), -less);
        const Request *r = job.request;
        if (less)
            CU_ASSERT(!strncmp(err.text, "here: ", 6) && strstr(err.text, "shorten"))
        else
            CU_ASSERT(r->s == n + 1 && r->n == 1);
        free(ids);
        job_free(&job);
    }
}

/* Where the tokenizer puts no token in front, an empty prompt has none. */
TEST(a_prompt_begins_with_the_token_that_the_tokenizer_puts_in_front_or_with_none) {
    static const char *const forms[] = {"published", "bos-4", "no-bos"};
    static const int32_t fronts[] = {2, 0, -1};
    Job own = empty_job(false, NULL);
    for (size_t f = 0; f < COUNT(forms); f++) {
        char dir[100];
        snprintf(dir, sizeof dir, "tests/golden/forms/%s", forms[f]);
        Tokenizer *t = tokenizer_open(dir, 330, &err);
        ASSERT_OK(!t);
        Job job = own;
        job.tokenizer = t;
        for (int full = 0; full < 2; full++) {
            const char *line = full ? "{\"prompt\": \"a\"}" : "{\"prompt\": \"\"}";
            job_add(&job, &(Lines){.line = line, .size = strlen(line), .number = 1 + full, .where = "here"}, true);
        }
        const Request *empty = &job.request[0], *one = &job.request[1];
        const int n = fronts[f] >= 0;
        CU_ASSERT(!one->error && one->s == 1 + n && (!n || one->ids[0] == fronts[f]) && one->ids[n] > 3);
        CU_ASSERT(n ? !empty->error && empty->s == 1 && empty->ids[0] == fronts[f]
                    : empty->error && strstr(empty->error, "here: the prompt has no tokens"));
        job_free(&job);
        tokenizer_close(t);
    }
}

/* What an earlier run has chosen of a prompt is behind its tokens now, and so much less is asked for. */
TEST(a_job_that_goes_on_asks_for_what_is_left) {
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

TEST(a_file_is_json_lines_or_plain_as_a_whole) {
    static const char lines[] = "{\"prompt\": \"a\"}\n";
    static const struct {
        const char *name, *format, *text; /* NULL: by its name it is plain, and then it is not */
    } cases[] = {{"x", NULL, "a"},
                 {"x.jsonl", NULL, "a"},
                 {"x.jsonl", "text", "{\"prompt\": \"a\"}"},
                 {"x.txt", "jsonl", "a"},
                 {"x.txt", NULL, NULL}};
    static const char *const refused[][2] = {
        {"plain\n{\"prompt\": \"not read\"}\n", "line 2: is a JSON object in a file of plain lines"},
        {"\n[\n {\"prompt\": \"a\"},\n {\"prompt\": \"b\"}\n]\n", "is one JSON value"},
        {"{\n \"prompt\": \"a\"\n}\n", "is one JSON value"}};
    for (size_t i = 0; i < COUNT(cases); i++) {
        Job job = empty_job(true, cases[i].format);
        const bool read = !job_read(&job, prompt_file(cases[i].name, lines, strlen(lines)), &err);
        CU_ASSERT_EQUAL_FATAL(read, cases[i].text != NULL);
        CU_ASSERT(read ? !strcmp(job.request[0].text, cases[i].text) : strstr(err.text, "--format jsonl") != NULL);
        job_free(&job);
    }
    for (size_t r = 0; r < COUNT(refused); r++) assert_refused(refused[r][0], strlen(refused[r][0]), false, refused[r][1]);
}

/* Beyond 16 MiB nobody looks whether a file is one JSON value: its name decides. */
TEST(a_long_file_that_is_named_as_lines_is_read_by_its_lines) {
    static const struct {
        const char *name, *first, *other;
    } cases[] = {{"plain.txt", "[Verse] Once", "Tom"},
                 {"damaged.jsonl", "{\"prompt\": \"Once upon", "{\"prompt\": \"Tom\"}"}};
    enum { LINES = 3, SPACES = 8 << 20 };
    for (size_t i = 0; i < COUNT(cases); i++) {
        const size_t n = strlen(cases[i].first), m = strlen(cases[i].other);
        char *text = xcalloc(n + 1 + LINES * (size_t)(m + SPACES + 1) + 1, 1), *at = text;
        at += sprintf(at, "%s\n", cases[i].first);
        for (int l = 0; l < LINES; l++) {
            memset(at, ' ', SPACES);
            at += SPACES + sprintf(at + SPACES, "%s\n", cases[i].other);
        }
        Job job = empty_job(false, NULL);
        const bool read = !job_read(&job, prompt_file(cases[i].name, text, at - text), &err);
        if (!read) fprintf(stderr, "\n    %s\n", err.text);
        CU_ASSERT(read && job.count == LINES + 1);
        job_free(&job);
        free(text);
    }
}

/* Two jobs share a digest only if all that was asked for is the same. */
TEST(the_digest_changes_with_every_prompt) {
    static const char *const files[] = {"a\nb\n",
                                        "b\na\n",
                                        "a\nb\nc\n",
                                        "ab\n",
                                        "{\"prompt\": \"a\"}\n{\"prompt\": \"b\", \"id\": 5}\n",
                                        "{\"prompt\": \"a\", \"max_tokens\": 5}\n{\"prompt\": \"b\"}\n",
                                        "{\"prompt\": \"a\", \"seed\": 5}\n{\"prompt\": \"b\"}\n",
                                        "{\"prompt\": \"a\", \"top_k\": 5}\n{\"prompt\": \"b\"}\n",
                                        "{\"prompt\": \"a\", \"stop\": \"5\"}\n{\"prompt\": \"b\"}\n",
                                        "{\"prompt\": \"a\", \"stop\": []}\n{\"prompt\": \"b\"}\n"};
    enum { N_FILES = COUNT(files) };
    uint64_t digest[N_FILES + 1];
    for (int i = 0; i <= N_FILES; i++) {
        Job job = read_text(files[i % N_FILES], true);
        for (int e = 0; e < i; e++) CU_ASSERT_EQUAL(digest[e] == job.digest, i == N_FILES && e == 0);
        digest[i] = job.digest;
        job_free(&job);
    }
}

TEST(prompts_come_through_a_pipe) {
    char command[400];
    const char *path = in_dir(temp_dir(), "pipe");
    Job job = empty_job(true, NULL);
    snprintf(command, sizeof command, "mkfifo %s; { printf 'one\ntw'; sleep .01; echo o; } >%s &", path, path);
    CHECK(!system(command));
    ASSERT_OK(job_read(&job, path, &err));
    CU_ASSERT_EQUAL_FATAL(job.count, 2);
    CU_ASSERT_STRING_EQUAL(job.request[1].text, "two");
    job_free(&job);
}
