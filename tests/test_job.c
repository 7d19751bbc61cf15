/* test_job.c: prompts as they come in, and completions as they go out, read back as strict JSON. The pieces are those of
 * tests/golden/tokenizer, where a character such as an emoji is several tokens. */
#include <cjson/cJSON.h>
#include <errno.h>
#include <sys/stat.h>
#include <sys/syscall.h>
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

/* Reads a prompt file of these bytes. */
static int read_bytes(Job *job, const char *bytes, size_t len) {
    static char dir[300], path[320];
    open_pieces();
    if (!dir[0]) snprintf(dir, sizeof dir, "%s", temp_dir());
    snprintf(path, sizeof path, "%s/prompts", dir);
    write_file(dir, "prompts", bytes, len);
    *job = (Job){0};
    return job_read(job, path, N, tokenizer, &config, &err);
}

static Job read_text(const char *text) {
    Job job;
    ASSERT_OK(read_bytes(&job, text, strlen(text)));
    return job;
}

/* The prompts of a file are these texts with these ids, up to NULL. */
static void assert_prompts(const char *file, const char *const *texts, const char *const *ids) {
    Job job = read_text(file);
    int n = 0;
    for (; texts[n] && n < job.task.count; n++) {
        CU_ASSERT_STRING_EQUAL(job.text[n], texts[n]);
        CU_ASSERT_STRING_EQUAL(job.id[n], ids[n]);
    }
    CU_ASSERT_PTR_NULL(texts[n]);
    CU_ASSERT_EQUAL(job.task.count, n);
    job_free(&job);
}
#define LIST(...) ((const char *const[]){__VA_ARGS__, NULL})

/* The file is refused in one line that has the part, and the job can still be freed. */
static void assert_refused(const char *bytes, size_t len, const char *part) {
    Job job;
    memset(&err, 0, sizeof err);
    CU_ASSERT_EQUAL(read_bytes(&job, bytes, len), -1);
    CU_ASSERT_EQUAL(err.code, EXIT_FAILED);
    if (!strstr(err.text, part)) fprintf(stderr, "\n    no \"%s\" in: %s\n", part, err.text);
    CU_ASSERT(strstr(err.text, part) && strstr(err.text, "prompts") && !strchr(err.text, '\n'));
    job_free(&job);
}
#define REFUSED(bytes, part) assert_refused(bytes, sizeof bytes - 1, part)

static void plain_lines_are_prompts_with_the_numbers_of_their_lines(void) {
    assert_prompts("one\ntwo\n", LIST("one", "two"), LIST("0", "1"));
    assert_prompts("one\ntwo", LIST("one", "two"), LIST("0", "1"));
    assert_prompts("one\r\n\r\n  two \r\n", LIST("one", "  two "), LIST("0", "2"));
    assert_prompts("\n \t \n\nonly", LIST("only"), LIST("3"));
    assert_prompts("\xEF\xBB\xBFone\n", LIST("one"), LIST("0"));
    assert_prompts("a\rb\n\"c\"\n[1]\n", LIST("a\rb", "\"c\"", "[1]"), LIST("0", "1", "2"));
    assert_prompts("plain\n{\"prompt\": \"not read\"}\n", LIST("plain", "{\"prompt\": \"not read\"}"), LIST("0", "1"));
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

static void number_ids_come_back_as_given(void) {
    assert_prompts(
        "{\"id\": 1000000000000000, \"prompt\": \"\"}\n{\"id\": -3, \"prompt\": \"\"}\n{\"id\": 9007199254740991, "
        "\"prompt\": \"\"}",
        LIST("", "", ""), LIST("1000000000000000", "-3", "9007199254740991"));
    REFUSED("{\"id\": 9007199254740993, \"prompt\": \"\"}", "below 2^53"); /* a double makes it ...992 */
    REFUSED("{\"id\": 12345678901234567890, \"prompt\": \"\"}", "line 1: \"id\" is another number");
    REFUSED("{\"id\": 1e300, \"prompt\": \"\"}", "\"id\"");
    REFUSED("{\"id\": 1e400, \"prompt\": \"\"}", "line 1");
    REFUSED("{\"id\": 1.5, \"prompt\": \"\"}", "put it in quotes");
    REFUSED("{\"id\": null, \"prompt\": \"\"}", "\"id\" is neither");
    REFUSED("{\"id\": [1], \"prompt\": \"\"}", "\"id\" is neither");
}

static void two_prompts_with_one_id_are_refused(void) {
    REFUSED("{\"id\": 7, \"prompt\": \"a\"}\n{\"id\": 7.0, \"prompt\": \"b\"}", "two prompts have the id 7;");
    REFUSED("{\"id\": 1, \"prompt\": \"a\"}\n{\"prompt\": \"b\"}", "two prompts have the id 1;");
    REFUSED("{\"id\": \"\\u0061\", \"prompt\": \"a\"}\n\n{\"id\": \"a\", \"prompt\": \"b\"}",
            "two prompts have the id \"a\";");
}

static void max_tokens_of_a_prompt_is_kept_and_cut_where_positions_end(void) {
    Job job = read_text(
        "{\"prompt\": \"ab\"}\n{\"prompt\": \"ab\", \"max_tokens\": 3}\n{\"prompt\": \"ab\", \"max_tokens\": 1000000000}");
    CU_ASSERT_EQUAL_FATAL(job.task.count, 3);
    for (int i = 0; i < 3; i++) {
        const Prompt *p = &job.task.prompts[i];
        CU_ASSERT_EQUAL(p->ids[0], 2);
        CU_ASSERT_EQUAL(p->n, i == 0 ? N : i == 1 ? 3 : POSITIONS - p->s + 1);
    }
    job_free(&job);
    REFUSED("{\"prompt\": \"\"}\n{\"prompt\": \"\", \"max_tokens\": 0}", "line 2: \"max_tokens\"");
    REFUSED("{\"prompt\": \"\", \"max_tokens\": -1}", "\"max_tokens\"");
    REFUSED("{\"prompt\": \"\", \"max_tokens\": 1.5}", "\"max_tokens\"");
    REFUSED("{\"prompt\": \"\", \"max_tokens\": 1e10}", "\"max_tokens\"");
    REFUSED("{\"prompt\": \"\", \"max_tokens\": \"8\"}", "\"max_tokens\"");
    REFUSED("{\"prompt\": \"\", \"max_tokens\": null}", "\"max_tokens\"");
}

static void a_prompt_may_fill_the_positions_but_not_more(void) {
    static const char line[] = "There are a few tokens here";
    Job job = {0};
    int32_t *ids;
    open_pieces();
    int n = tokenizer_encode(tokenizer, line, strlen(line), &ids, &err);
    free(ids);
    OptConfig exact = config, less = config;
    exact.max_pos = n + 1, less.max_pos = n; /* </s> takes one */
    ASSERT_OK(job_add(&job, line, strlen(line), "0", N, tokenizer, &exact, "here", &err));
    ASSERT_OK(job_add(&job, line, strlen(line), "1", 2, tokenizer, &exact, "here", &err));
    for (int i = 0; i < 2; i++) CU_ASSERT(job.task.prompts[i].s == n + 1 && job.task.prompts[i].n == 1);
    CU_ASSERT_EQUAL(job_add(&job, line, strlen(line), "2", N, tokenizer, &less, "here", &err), -1);
    CU_ASSERT(!strncmp(err.text, "here: ", 6) && strstr(err.text, "shorten"));
    CU_ASSERT_EQUAL(job.task.count, 2);
    job_free(&job);
}

static void what_is_no_prompt_is_refused_with_its_line(void) {
    REFUSED("fine\nno\0ne\n", "line 2: a NUL byte");
    REFUSED("\0\n", "line 1: a NUL byte");
    REFUSED("fine\n\n\xED\xA0\x80\n", "line 3: the prompt is not valid UTF-8");
    REFUSED("{\"prompt\": \"a\\u0000\"}", "line 1: byte 13");
    REFUSED("{\"prompt\": \"a\0\"}", "line 1: byte 13");
    REFUSED("{\"prompt\": \"\xFF\"}", "line 1: byte 12");
    REFUSED("{\"prompt\": \"\\ud83d\"}", "surrogate");
    REFUSED("{\"prompt\": \"a\"}\nplain\n", "line 2: byte 0");
    REFUSED("{\"prompt\": \"a\"}\n[]\n", "line 2: expected a JSON object");
    REFUSED("{\"prompt\": \"a\"} {\"prompt\": \"b\"}", "nothing after the value");
    REFUSED("{\"prompt\": \"a\", \"prompt\": \"b\"}", "twice");
    REFUSED("{\"prompt\": \"a\"", "the text ends here");
    REFUSED("{\"Prompt\": \"a\"}", "\"prompt\" is missing");
    REFUSED("{\"prompt\": null}", "\"prompt\" is not a string");
    REFUSED("{\"prompt\": 1e400}", "line 1");
}

static void a_file_without_prompts_is_an_empty_job(void) {
    static const char *const empty[] = {"", "\n", "\r\n \t\n\n", "\xEF\xBB\xBF", "\xEF\xBB\xBF\n"};
    for (size_t i = 0; i < sizeof empty / sizeof *empty; i++) {
        Job job = read_text(empty[i]);
        CU_ASSERT_EQUAL(job.task.count, 0);
        job_free(&job);
    }
}

static void a_prompt_file_that_is_none_is_refused(void) {
    char dir[300], path[320];
    Job job = {0};
    open_pieces();
    snprintf(dir, sizeof dir, "%s", temp_dir());
    CU_ASSERT_EQUAL(job_read(&job, dir, N, tokenizer, &config, &err), -1);
    CU_ASSERT(strstr(err.text, dir) && strstr(err.text, "directory"));
    snprintf(path, sizeof path, "%s/none", dir);
    CU_ASSERT_EQUAL(job_read(&job, path, N, tokenizer, &config, &err), -1);
    CU_ASSERT(strstr(err.text, path) && strstr(err.text, "No such file"));
    CHECK(mkfifo(path, 0600) == 0);
    CU_ASSERT_EQUAL(job_read(&job, path, N, tokenizer, &config, &err), -1); /* and does not wait for a writer */
    CU_ASSERT(strstr(err.text, path) && strstr(err.text, "special file"));
    job_free(&job);
}

// ---------------------------------------------------------------------------------------------------------------
// Completions out
// ---------------------------------------------------------------------------------------------------------------

static bool has_stop(const int32_t *ids, int n, const char *const *stops) {
    size_t len;
    bool found = false;
    char *text = tokenizer_decode(tokenizer, ids, n, &len);
    for (; stops && *stops; stops++) found |= memmem(text, len, *stops, strlen(*stops)) != NULL;
    free(text);
    return found;
}

/* Gives text's tokens to the listener one by one, as a sweep would, and returns what it wrote, strictly parsed. *taken
 * becomes the number of tokens after which it ended. */
static cJSON *complete(Job *job, int prompt, const char *text, size_t len, const char *const *stops, int *taken) {
    int32_t *ids;
    char *out = NULL;
    size_t size = 0;
    open_pieces();
    int n = tokenizer_encode(tokenizer, text, len, &ids, &err), nstops = 0;
    while (stops && stops[nstops]) nstops++;
    Completions c = {
        .job = job, .tokenizer = tokenizer, .out = tmpfile(), .out_name = "x", .stop = (char **)stops, .nstops = nstops};
    CHECK(c.out);
    Listener listener = completions_listener(&c);
    bool stop = false;
    for (*taken = 0; *taken < n && !stop;) {
        ++*taken;
        stop = listener.token(listener.ctx, prompt, ids, *taken);
        CU_ASSERT_EQUAL(stop, has_stop(ids, *taken, stops)); /* neither too early nor too late */
    }
    ASSERT_OK(listener.done(listener.ctx, prompt, ids, *taken, stop ? FINISH_STOP : FINISH_LENGTH, &err));
    size = (size_t)ftell(c.out);
    out = xcalloc(size + 1, 1);
    rewind(c.out);
    CHECK(fread(out, 1, size, c.out) == size && fclose(c.out) == 0);
    CU_ASSERT(size && memchr(out, '\n', size) == out + size - 1); /* one line */
    cJSON *line = json_parse(out, size, "a completion", &err);
    if (!line) CU_FAIL_FATAL(err.text);
    const cJSON *tokens = cJSON_GetObjectItem(line, "tokens"), *id = tokens ? tokens->child : NULL;
    CU_ASSERT_EQUAL(cJSON_GetArraySize(tokens), *taken);
    for (int i = 0; id && i < *taken; i++, id = id->next) CU_ASSERT_EQUAL(id->valueint, ids[i]);
    free(ids), free(out);
    return line;
}

static const char *string(const cJSON *line, const char *name) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(line, name);
    CU_ASSERT_FATAL(cJSON_IsString(item));
    return item->valuestring;
}

/* The completion of text under these stop texts, and why it ended. */
static void assert_completion(const char *text, const char *const *stops, const char *expected, const char *reason) {
    Job job = read_text("a prompt");
    int taken;
    cJSON *line = complete(&job, 0, text, strlen(text), stops, &taken);
    CU_ASSERT_STRING_EQUAL(string(line, "completion"), expected);
    CU_ASSERT_STRING_EQUAL(string(line, "finish_reason"), reason);
    cJSON_Delete(line);
    job_free(&job);
}

static void a_completion_has_exactly_its_five_fields(void) {
    static const char *const names[] = {"id", "prompt", "completion", "tokens", "finish_reason"};
    Job job = read_text(
        "{\"id\": 5, \"prompt\": \"One\"}\n{\"id\": \"\\\"x\\n\", \"prompt\": "
        "\"T\\\"\\\\\\t\\u0001\\u007f\\ud83d\\ude00\"}\n");
    int taken;
    cJSON *first = complete(&job, 0, " two", 4, NULL, &taken), *second = complete(&job, 1, "", 0, NULL, &taken);
    const cJSON *item = first->child;
    for (int i = 0; i < 5 && item; i++, item = item->next) CU_ASSERT_STRING_EQUAL(item->string, names[i]);
    CU_ASSERT_EQUAL(cJSON_GetArraySize(first), 5);
    CU_ASSERT_EQUAL(cJSON_GetObjectItem(first, "id")->valuedouble, 5);
    CU_ASSERT_STRING_EQUAL(string(first, "prompt"), "One");
    CU_ASSERT_STRING_EQUAL(string(first, "completion"), " two");
    CU_ASSERT_STRING_EQUAL(string(second, "id"), "\"x\n");
    CU_ASSERT_STRING_EQUAL(string(second, "prompt"), "T\"\\\t\x01\x7F\xF0\x9F\x98\x80");
    CU_ASSERT_STRING_EQUAL(string(second, "completion"), "");
    CU_ASSERT_STRING_EQUAL(string(second, "finish_reason"), "length");
    cJSON_Delete(first), cJSON_Delete(second);
    job_free(&job);
}

static void every_character_of_a_completion_survives(void) {
    char text[300];
    int n = 0;
    for (int c = 1; c < 128; c++) text[n++] = (char)c;
    text[n] = 0;
    strcat(text, "\"\\/ \xC3\xA9 \xE2\x80\xA8 \xF0\x9F\x98\x80 \xF4\x8F\xBF\xBF \xEF\xBF\xBD");
    assert_completion(text, NULL, text, "length");
}

/* \u0000 is JSON, but json_parse refuses it, so the bytes are looked at. */
static void a_nul_byte_in_a_completion_is_escaped(void) {
    char text[4] = {'a', 0, 'b', 0}, line[500];
    int32_t *ids;
    Job job = read_text("p");
    int n = tokenizer_encode(tokenizer, text, 3, &ids, &err);
    Completions c = {.job = &job, .tokenizer = tokenizer, .out = tmpfile(), .out_name = "x"};
    Listener listener = completions_listener(&c);
    ASSERT_OK(listener.done(listener.ctx, 0, ids, n, FINISH_STOP, &err));
    rewind(c.out);
    CU_ASSERT_PTR_NOT_NULL(fgets(line, sizeof line, c.out));
    CU_ASSERT_PTR_NOT_NULL(strstr(line, "\"completion\": \"a\\u0000b\""));
    CU_ASSERT_PTR_NOT_NULL(strstr(line, "\"finish_reason\": \"stop\"}"));
    fclose(c.out);
    free(ids);
    job_free(&job);
}

static void the_first_stop_text_cuts_the_completion(void) {
    assert_completion("one two three two", LIST("two"), "one ", "stop");
    assert_completion("one two three", LIST("three", "two"), "one ", "stop");
    assert_completion("one two three", LIST("two", "wo"), "one ", "stop");
    assert_completion("one two three", LIST("wo", "two"), "one ", "stop");
    assert_completion("one two three", LIST("four"), "one two three", "length");
    assert_completion("one two", LIST("one two"), "", "stop");
    assert_completion("a\n\nb", LIST("\n\n"), "a", "stop");
    assert_completion("aab", LIST("ab"), "a", "stop");
}

/* The tokens that made the stop text are reported with the others. */
static void a_stop_text_of_several_tokens_is_seen_in_its_last_one(void) {
    static const char text[] = "The qzxj end. qzxk And more, much more of it.", stop[] = "qzxk";
    int32_t *ids;
    open_pieces();
    CU_ASSERT(tokenizer_encode(tokenizer, stop, strlen(stop), &ids, &err) > 1); /* or the test would say nothing */
    free(ids);
    assert_completion(text, LIST(stop), "The qzxj end. ", "stop");
}

static void a_stop_text_between_or_of_split_characters_is_found_whole(void) {
    assert_completion("\xF0\x9F\xA6\x95.\xF0\x9F\xA6\x96", LIST("."), "\xF0\x9F\xA6\x95", "stop");
    assert_completion(
        "a\xF0\x9F\xA6\x95z\xF0\x9F\xA6\x96"
        "b",
        LIST("\xF0\x9F\xA6\x96"), "a\xF0\x9F\xA6\x95z", "stop");
    assert_completion("\xF0\x9F\xA6\x95\xF0\x9F\xA6\x95\xF0\x9F\xA6\x95!", LIST("\xF0\x9F\xA6\x95!"),
                      "\xF0\x9F\xA6\x95\xF0\x9F\xA6\x95", "stop");
}

/* A long completion whose stop text is longer than any token: the window of on_token must reach back far enough. */
static void a_long_stop_text_far_into_a_completion_is_found(void) {
    char text[2000] = "", stop[] = "\xF0\x9F\xA6\x95\xF0\x9F\xA6\x96\xF0\x9F\xA6\x95\xF0\x9F\xA6\x96 qqzzqqzzqqzz";
    for (int i = 0; i < 60; i++) strcat(text, "\xF0\x9F\xA6\x95 x ");
    char *expected = xstrdup(text);
    strcat(text, stop);
    strcat(text, " and what is never made");
    assert_completion(text, LIST(stop), expected, "stop");
    free(expected);
}

static void a_write_that_fails_is_said_in_one_line(void) {
    Job job = read_text("p");
    Completions c = {.job = &job, .tokenizer = tokenizer, .out = fopen("/dev/full", "w"), .out_name = "out.jsonl"};
    if (!c.out) return job_free(&job); /* not on every system */
    Listener listener = completions_listener(&c);
    int32_t id = 10;
    CU_ASSERT_EQUAL(listener.done(listener.ctx, 0, &id, 1, FINISH_LENGTH, &err), -1);
    CU_ASSERT(err.code == EXIT_FAILED && strstr(err.text, "out.jsonl") && strstr(err.text, "No space left"));
    fclose(c.out);
    job_free(&job);
}

/* In this program instead of libc's: counts, and fails where it is told to. */
static int syncs, sync_error;
int fdatasync(int fd) {
    syncs++;
    if (sync_error) return errno = sync_error, -1;
    return (int)syscall(SYS_fdatasync, fd);
}

static void a_completion_is_on_the_disk_before_the_next(void) {
    Job job = read_text("p");
    Completions c = {.job = &job, .tokenizer = tokenizer, .out = tmpfile(), .out_name = "out.jsonl"};
    Listener listener = completions_listener(&c);
    int32_t id = 10;
    syncs = 0;
    for (int i = 1; i <= 2; i++) {
        ASSERT_OK(listener.done(listener.ctx, 0, &id, 1, FINISH_LENGTH, &err));
        CU_ASSERT_EQUAL(syncs, i);
    }
    sync_error = EINVAL; /* what cannot be synced, such as a pipe, need not be */
    ASSERT_OK(listener.done(listener.ctx, 0, &id, 1, FINISH_LENGTH, &err));
    sync_error = EIO;
    CU_ASSERT_EQUAL(listener.done(listener.ctx, 0, &id, 1, FINISH_LENGTH, &err), -1);
    CU_ASSERT(err.code == EXIT_FAILED && strstr(err.text, "cannot write out.jsonl: Input/output error"));
    sync_error = 0;
    fclose(c.out);
    job_free(&job);
}

CU_TestInfo tests[] = {
    {"plain lines are prompts with the numbers of their lines", plain_lines_are_prompts_with_the_numbers_of_their_lines},
    {"JSON lines are prompts with their own ids", json_lines_are_prompts_with_their_own_ids},
    {"number ids come back as given", number_ids_come_back_as_given},
    {"two prompts with one id are refused", two_prompts_with_one_id_are_refused},
    {"max_tokens of a prompt is kept, and cut where positions end",
     max_tokens_of_a_prompt_is_kept_and_cut_where_positions_end},
    {"a prompt may fill the positions, but not more", a_prompt_may_fill_the_positions_but_not_more},
    {"what is no prompt is refused with its line", what_is_no_prompt_is_refused_with_its_line},
    {"a file without prompts is an empty job", a_file_without_prompts_is_an_empty_job},
    {"a prompt file that is none is refused", a_prompt_file_that_is_none_is_refused},
    {"a completion has exactly its five fields", a_completion_has_exactly_its_five_fields},
    {"every character of a completion survives", every_character_of_a_completion_survives},
    {"a NUL byte in a completion is escaped", a_nul_byte_in_a_completion_is_escaped},
    {"the first stop text cuts the completion", the_first_stop_text_cuts_the_completion},
    {"a stop text of several tokens is seen in its last one", a_stop_text_of_several_tokens_is_seen_in_its_last_one},
    {"a stop text between or of split characters is found whole",
     a_stop_text_between_or_of_split_characters_is_found_whole},
    {"a long stop text far into a completion is found", a_long_stop_text_far_into_a_completion_is_found},
    {"a write that fails is said in one line", a_write_that_fails_is_said_in_one_line},
    {"a completion is on the disk before the next", a_completion_is_on_the_disk_before_the_next},
    CU_TEST_INFO_NULL,
};
