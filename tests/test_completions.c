/* test_completions.c: what becomes of a job: its lines, read back as strict JSON, and its journal, killed at every byte.
 * The pieces are those of tests/golden/tokenizer, where a character such as an emoji is several tokens. */
#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <malloc.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests.h"

#define PIECES "tests/golden/tokenizer"
enum { VOCAB = 1024, POSITIONS = 2048, N = 1000, SIZE = 1 << 16 };

static const OptConfig config = {.vocab = VOCAB, .max_pos = POSITIONS, .eos = 2};
static Tokenizer *tokenizer;
static Error err;
static char dir[300], output[400], journal[420]; /* paths */

/* A job of these plain lines, and an output that is not there. */
static Job new_job(const char *lines) {
    Job job = {.config = &config, .max_tokens = N};
    if (!dir[0]) snprintf(dir, sizeof dir, "%s", temp_dir());
    if (!tokenizer) tokenizer = tokenizer_open(PIECES, VOCAB, &err);
    if (!tokenizer) CU_FAIL_FATAL(err.text);
    job.tokenizer = tokenizer;
    snprintf(output, sizeof output, "%s/prompts", dir);
    write_file(dir, "prompts", lines, strlen(lines));
    ASSERT_OK(job_read(&job, output, &err));
    snprintf(output, sizeof output, "%s/out", dir);
    snprintf(journal, sizeof journal, "%s.journal", output);
    unlink(output), unlink(journal);
    return job;
}

/* The head of every job here. */
static cJSON *head(void) {
    cJSON *json = cJSON_CreateObject();
    cJSON_AddTrueToObject(json, JOURNAL_VERSION);
    cJSON_AddNumberToObject(json, "--temperature", 0);
    return json;
}

/* Opens the output, goes on with what is there, and begins. NULL: refused. */
static Completions *begin(Job *job, const Options *o, bool *finished) {
    Completions *c = completions_open(job, o, &err);
    cJSON *mine = head();
    int status = c ? completions_resume(c, mine, finished, &err) : -1;
    if (!status && !*finished) {
        job_rest(job);
        status = completions_begin(c, mine, &err);
    }
    cJSON_Delete(mine);
    if (!status) return c;
    completions_free(c);
    return NULL;
}

/* One sweep: every prompt that has not ended gets the next of its tokens, texts[place] being what it is to say. False when
 * all have ended. */
static bool give_tokens(Job *job, const Listener *listener, const char *const *texts) {
    bool more = false;
    for (int p = 0; p < job->task.count; p++) {
        const int place = job->task.prompts[p].place;
        const Request *r = &job->request[place];
        int32_t *ids;
        const int n = tokenizer_encode(tokenizer, texts[place], strlen(texts[place]), &ids, &err);
        if (!r->ended) {
            const int32_t token = r->known < n ? ids[r->known] : config.eos;
            const bool stopped = listener->token(listener->ctx, p, &token, 1); /* the newest is all that it looks at */
            CU_ASSERT_EQUAL(stopped, r->stopped);
            more = more || !r->ended;
        }
        free(ids);
    }
    return more;
}

/* Sweeps, at most so many. */
static void sweep(Job *job, Completions *c, const char *const *texts, int most) {
    const Listener listener = completions_listener(c);
    const RunStats stats = {.total_s = 1};
    for (bool more = true; more && most > 0; most--) {
        more = give_tokens(job, &listener, texts);
        ASSERT_OK(listener.sweep(listener.ctx, &stats, &err));
    }
}

/* The output of a job of one prompt that says this text, malloc'ed. */
static char *written(const char *prompt, const char *text, const Texts *stop, size_t *len) {
    Job job = new_job(prompt);
    const Options o = {.output = output, .stop = *stop};
    bool finished;
    Completions *c = begin(&job, &o, &finished);
    CU_ASSERT_PTR_NOT_NULL_FATAL(c);
    sweep(&job, c, (const char *const[]){text}, N);
    ASSERT_OK(completions_end(c, 0, &err));
    completions_free(c);
    job_free(&job);
    CU_ASSERT(access(journal, F_OK) != 0);
    return contents(output, len);
}

/* As into a file. */
static void a_line_longer_than_a_pipe_takes_at_once_is_whole(void) {
    const Texts none = {0};
    char text[N], path[40];
    int ends[2];
    size_t len;
    for (int i = 0; i < N; i++) text[i] = (char)('!' + i % 90);
    text[N - 1] = 0;
    char *line = written(text, text, &none, &len), *got = xcalloc(2, len);
    CU_ASSERT_FATAL(len > PIPE_BUF && len < SIZE);
    CHECK(!pipe2(ends, O_CLOEXEC));
    snprintf(path, sizeof path, "/dev/fd/%d", ends[1]);
    Job job = new_job(text);
    const Options o = {.output = path};
    bool finished;
    Completions *c = begin(&job, &o, &finished);
    CU_ASSERT_PTR_NOT_NULL_FATAL(c);
    sweep(&job, c, (const char *const[]){text}, N);
    ASSERT_OK(completions_end(c, 0, &err));
    completions_free(c);
    CU_ASSERT(read(ends[0], got, 2 * len) == (ssize_t)len && !memcmp(got, line, len));
    close(ends[0]), close(ends[1]);
    free(line), free(got), job_free(&job);
}

static const char *string(const cJSON *line, const char *name) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(line, name);
    CU_ASSERT_FATAL(cJSON_IsString(item));
    return item->valuestring;
}

/* The completion of text under these stop texts, and why it ended; its tokens make it, and no shorter ones do. */
static void assert_completion(const char *text, const char *const *stops, const char *expected, const char *reason) {
    size_t len, size;
    Texts stop = {.text = (char **)stops};
    int32_t ids[N];
    while (stops && stops[stop.n]) stop.n++;
    char *line = written("a prompt", text, &stop, &len);
    CU_ASSERT(len && memchr(line, '\n', len) == line + len - 1); /* one line */
    cJSON *json = json_parse(line, len, &err);
    if (!json) CU_FAIL_FATAL(err.text);
    CU_ASSERT_STRING_EQUAL(string(json, "completion"), expected);
    CU_ASSERT_STRING_EQUAL(string(json, "finish_reason"), reason);
    int n = 0;
    for (const cJSON *id = json_get(json, "tokens")->child; id; id = id->next) ids[n++] = id->valueint;
    char *made = tokenizer_decode(tokenizer, ids, n, &size), *less = tokenizer_decode(tokenizer, ids, n ? n - 1 : 0, &size);
    CU_ASSERT(!strncmp(made, expected, strlen(expected)));
    CU_ASSERT(!stops || !n || strncmp(less, expected, strlen(expected)) != 0);
    free(made), free(less), free(line);
    cJSON_Delete(json);
}
#define LIST(...) ((const char *const[]){__VA_ARGS__, NULL})

static void a_completion_has_exactly_its_five_fields(void) {
    static const char *const names[] = {"id", "prompt", "completion", "tokens", "finish_reason"};
    const Texts none = {0};
    size_t len;
    char *line =
        written("{\"id\": \"\\\"x\\n\", \"prompt\": \"T\\\"\\\\\\t\\u0001\\u007f\\ud83d\\ude00\"}\n", " two", &none, &len);
    cJSON *json = json_parse(line, len, &err);
    if (!json) CU_FAIL_FATAL(err.text);
    const cJSON *item = json->child;
    for (int i = 0; i < 5 && item; i++, item = item->next) CU_ASSERT_STRING_EQUAL(item->string, names[i]);
    CU_ASSERT_EQUAL(cJSON_GetArraySize(json), 5);
    CU_ASSERT_STRING_EQUAL(string(json, "id"), "\"x\n");
    CU_ASSERT_STRING_EQUAL(string(json, "prompt"), "T\"\\\t\x01\x7F\xF0\x9F\x98\x80");
    CU_ASSERT_STRING_EQUAL(string(json, "completion"), " two");
    cJSON_Delete(json);
    free(line);
}

static void every_character_of_a_completion_survives(void) {
    char text[300];
    int n = 0;
    for (int c = 1; c < 128; c++) text[n++] = (char)c;
    text[n] = 0;
    strcat(text, "\"\\/ \xC3\xA9 \xE2\x80\xA8 \xF0\x9F\x98\x80 \xF4\x8F\xBF\xBF \xEF\xBF\xBD");
    assert_completion(text, NULL, text, "stop");
}

/* \u0000 is JSON, but json_parse refuses it, so the bytes are looked at. */
static void a_nul_byte_in_a_completion_is_escaped(void) {
    const char text[] = {'a', 0, 'b'};
    int32_t *ids;
    Job job = new_job("p");
    const Options o = {.output = output};
    bool finished;
    Completions *c = begin(&job, &o, &finished);
    CU_ASSERT_PTR_NOT_NULL_FATAL(c);
    const Listener listener = completions_listener(c);
    const int n = tokenizer_encode(tokenizer, text, 3, &ids, &err);
    for (int i = 0; i < n; i++) CU_ASSERT(!listener.token(listener.ctx, 0, ids, i + 1));
    CU_ASSERT(listener.token(listener.ctx, 0, &config.eos, 1));
    ASSERT_OK(completions_end(c, 0, &err));
    completions_free(c);
    size_t len;
    char *line = contents(output, &len);
    CU_ASSERT_PTR_NOT_NULL(strstr(line, "\"completion\": \"a\\u0000b\""));
    CU_ASSERT_PTR_NOT_NULL(strstr(line, "\"finish_reason\": \"stop\"}"));
    free(line), free(ids);
    job_free(&job);
}

static void the_first_stop_text_cuts_the_completion(void) {
    assert_completion("one two three two", LIST("two"), "one ", "stop");
    assert_completion("one two three", LIST("three", "two"), "one ", "stop");
    assert_completion("one two three", LIST("two", "wo"), "one ", "stop");
    assert_completion("one two three", LIST("wo", "two"), "one ", "stop");
    assert_completion("one two three", LIST("four"), "one two three", "stop");
    assert_completion("one two", LIST("one two"), "", "stop");
    assert_completion("a\n\nb", LIST("\n\n"), "a", "stop");
    assert_completion("aab", LIST("ab"), "a", "stop");
}

static void a_stop_text_of_several_tokens_is_seen_in_its_last_one(void) {
    static const char text[] = "The qzxj end. qzxk And more, much more of it.", stop[] = "qzxk";
    int32_t *ids;
    Job job = new_job("p");
    job_free(&job);
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

/* "xab" with so many special tokens inside the stop text "ab". Behind more of them than a window holds it is not seen while
 * tokens come, and the completion reaches its length; that is then not why it ends where it does. */
static void a_stop_text_with_special_tokens_inside_cuts_the_completion(void) {
    enum { MOST = 40, PAD = 1 };
    bool seen_early = false, seen_late = false;
    for (int pads = 0; pads < MOST - 2; pads += 4) {
        Job job = new_job("{\"id\": 0, \"prompt\": \"p\", \"max_tokens\": 40}");
        const Options o = {.output = output, .stop = {(char *[]){"ab"}, 1}};
        bool finished;
        size_t len;
        int32_t *ids;
        char expected[100];
        Completions *c = begin(&job, &o, &finished);
        CU_ASSERT_PTR_NOT_NULL_FATAL(c);
        const Listener listener = completions_listener(c);
        CU_ASSERT_EQUAL_FATAL(tokenizer_encode(tokenizer, "x\na\nb", 5, &ids, &err), 5);
        const int32_t x = ids[0], a = ids[2], b = ids[4], pad = PAD;
        for (int i = 0; !job.request[0].ended; i++)
            listener.token(listener.ctx, 0, i == 1 ? &a : i == 2 + pads ? &b : i > 1 && i < 2 + pads ? &pad : &x, 1);
        seen_early |= job.request[0].known < MOST, seen_late |= job.request[0].known == MOST;
        ASSERT_OK(completions_end(c, 0, &err));
        completions_free(c);
        char *line = contents(output, &len);
        snprintf(expected, sizeof expected, "\"completion\": \"x\", \"tokens\": [%d], \"finish_reason\": \"stop\"}\n", x);
        CU_ASSERT_PTR_NOT_NULL(strstr(line, expected));
        free(line), free(ids);
        job_free(&job);
    }
    CU_ASSERT(seen_early && seen_late);
}

// ---------------------------------------------------------------------------------------------------------------
// Journals
// ---------------------------------------------------------------------------------------------------------------

static const char three[] = "one\ntwo\nno\xFFthree\nfour\n"; /* the third is impossible */
static const char *const says[] = {" a b c d e f g h i j", " x", "", " 1 2 3 4 5 6"};
static const Texts stop_at_5 = {(char *[]){"5"}, 1};
static long whole_tokens; /* in the lines of the whole job */

/* Makes the output of the whole job, and how its journal looks like before the end. */
static void whole_job(char **out, size_t *out_len, char **record, size_t *record_len) {
    Job job = new_job(three);
    const Options o = {.output = output, .stop = stop_at_5};
    bool finished;
    Completions *c = begin(&job, &o, &finished);
    CU_ASSERT_PTR_NOT_NULL_FATAL(c);
    sweep(&job, c, says, N);
    CU_ASSERT_EQUAL(completions_end(c, -1, &err),
                    -1); /* as if it had failed after its last sweep, so that the journal stays */
    whole_tokens = completions_tokens(c);
    completions_free(c);
    *record = contents(journal, record_len), *out = contents(output, out_len);
    unlink(journal), unlink(output);
    job_free(&job);
}

/* Goes on with a journal and an output of so many bytes. The job ends as if it had not been broken. */
static void assert_goes_on(const char *record, size_t record_len, const char *part, size_t part_len, const char *out,
                           size_t out_len) {
    Job job = new_job(three);
    const Options o = {.output = output, .stop = stop_at_5, .resume = true};
    bool finished;
    size_t len;
    write_file(dir, "out", part, part_len), write_file(dir, "out.journal", record, record_len);
    Completions *c = begin(&job, &o, &finished);
    if (!c) CU_FAIL_FATAL(err.text);
    sweep(&job, c, says, N);
    ASSERT_OK(completions_end(c, 0, &err));
    CU_ASSERT_EQUAL(completions_tokens(c), whole_tokens); /* of lines that were there, were cut and are new */
    completions_free(c);
    char *text = contents(output, &len);
    CU_ASSERT(len == out_len && !memcmp(text, out, len));
    CU_ASSERT(access(journal, F_OK) != 0);
    free(text);
    job_free(&job);
}

static void a_job_goes_on_from_any_byte_of_its_journal_and_output(void) {
    char *out, *record;
    size_t out_len, record_len;
    whole_job(&out, &out_len, &record, &record_len);
    for (size_t cut = (size_t)(strchr(record, '\n') - record) + 1; cut <= record_len; cut++)
        assert_goes_on(record, cut, out, cut * 31 % (out_len + 1), out, out_len);
    for (size_t cut = 0; cut <= out_len; cut += 3) assert_goes_on(record, record_len, out, cut, out, out_len);
    free(out), free(record);
}

/* A job that was killed while it wrote its journal's first line had done nothing: it begins anew. */
static void a_journal_that_ends_in_its_first_line_is_begun_anew(void) {
    char *out, *record;
    size_t out_len, record_len;
    whole_job(&out, &out_len, &record, &record_len);
    for (size_t cut = 0; record[cut] != '\n'; cut++) assert_goes_on(record, cut, "", 0, out, out_len);
    free(out), free(record);
}

/* Whatever a journal has become, it is refused, or the job ends right. */
/* After a loss of power a file may be as long as it was and end in zeros. */
static void zeros_at_the_end_of_an_output_never_reached_the_disk(void) {
    char *out, *record, *part;
    size_t out_len, record_len;
    whole_job(&out, &out_len, &record, &record_len);
    part = xcalloc(out_len + 4096, 1);
    for (size_t whole = 0; whole <= out_len; whole += 7) {
        memcpy(part, out, whole);
        assert_goes_on(record, record_len, part, out_len, out, out_len);
        assert_goes_on(record, record_len, part, out_len + 4096, out, out_len);
    }
    free(out), free(record), free(part);
}

static void a_damaged_journal_never_makes_a_wrong_output(void) {
    char *out, *record;
    size_t out_len, record_len;
    whole_job(&out, &out_len, &record, &record_len);
    for (size_t at = (size_t)(strchr(record, '\n') - record) + 1; at < record_len; at++) {
        record[at] ^= (char)(1 << at % 8);
        assert_goes_on(record, record_len, out, 0, out, out_len);
        record[at] ^= (char)(1 << at % 8);
    }
    free(out), free(record);
}

/* begin() refuses what is there: -1 and a line with that part; and changes nothing. */
static void assert_refused(const char *prompts, const char *out, const char *record, const Options *flags,
                           const char *part) {
    Job job = new_job(prompts);
    Options o = *flags;
    bool finished = false;
    size_t len;
    o.output = output;
    if (out) write_file(dir, "out", out, strlen(out));
    if (record) write_file(dir, "out.journal", record, strlen(record));
    Completions *c = begin(&job, &o, &finished);
    CU_ASSERT_PTR_NULL(c);
    if (!c && !strstr(err.text, part)) fprintf(stderr, "\n    no \"%s\" in: %s\n", part, err.text);
    CU_ASSERT(!c && err.code == EXIT_USAGE && strstr(err.text, part));
    completions_free(c);
    char *text = out ? contents(output, &len) : NULL;
    CU_ASSERT(out ? !strcmp(text, out) : access(output, F_OK) != 0);
    free(text), text = record ? contents(journal, &len) : NULL;
    CU_ASSERT(record ? !strcmp(text, record) : access(journal, F_OK) != 0);
    free(text);
    job_free(&job);
}

static void an_output_that_is_there_is_never_lost_by_accident(void) {
    static const char mine[] = "{\"" JOURNAL_VERSION "\":true,\"--temperature\":0}\n",
                      other[] = "{\"" JOURNAL_VERSION "\":true,\"--temperature\":1}\n";
    const Options plain = {0}, resume = {.resume = true};
    assert_refused("p\n", "something\n", NULL, &plain, "--resume, or lose it with --overwrite");
    assert_refused("p\n", NULL, mine, &plain, "--resume, or lose it with --overwrite");
    assert_refused("p\n", "something\n", NULL, &resume, "has no journal");
    assert_refused("p\n", "{\"id\": 0, \"prompt\": \"q\", \"completion", NULL, &resume, "has no journal");
    assert_refused("p\nq\n", "{\"id\": 0, \"prompt\": \"p\", \"completion\": \"\"}\n", NULL, &resume,
                   "has no journal and only 1 of the 2 lines of this job; bring back ");
    assert_refused("p\n", "{\"id\": 0, \"prompt\": \"p\", \"completion\": \"\"", NULL, &resume, "has no journal");
    assert_refused("p\n", NULL, other, &resume, "its --temperature is 1, and here it is 0");
    assert_refused("p\n", NULL, "{\"" JOURNAL_VERSION "\":true}\n", &resume, "its --temperature is missing");
    assert_refused("p\n", NULL, "dear diary", &plain, "is no journal");
    assert_refused("p\n", NULL, "{}\n", &resume, "is no journal");
    assert_refused("p\n", NULL, "{\"" JOURNAL_VERSION "\": [\n", &resume, "is no journal");
}

static void lines_that_are_not_the_journals_are_refused(void) {
    char *out, *record;
    size_t out_len, record_len, len;
    whole_job(&out, &out_len, &record, &record_len);
    Job job = new_job(three);
    const Options o = {.output = output, .stop = stop_at_5, .resume = true};
    bool finished;
    out[out_len / 2] ^= 1;
    write_file(dir, "out", out, out_len), write_file(dir, "out.journal", record, record_len);
    CU_ASSERT_PTR_NULL(begin(&job, &o, &finished));
    CU_ASSERT(strstr(err.text, "is not what") && !strstr(err.text, "--overwrite")); /* which would lose the journal */
    char *text = contents(output, &len);
    CU_ASSERT(len == out_len && !memcmp(text, out, out_len));
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "move the output away, and --resume writes it anew"));
    out[out_len / 2] ^= 1;
    assert_goes_on(record, record_len, "", 0, out, out_len);
    free(text), free(out), free(record);
    job_free(&job);
}

static void a_job_that_has_ended_has_nothing_left_to_do(void) {
    char *out, *record;
    size_t out_len, record_len;
    whole_job(&out, &out_len, &record, &record_len);
    Job job = new_job(three);
    const Options o = {.output = output, .stop = stop_at_5, .resume = true};
    bool finished = false;
    write_file(dir, "out", out, out_len);
    Completions *c = begin(&job, &o, &finished);
    CU_ASSERT(c && finished);
    completions_free(c);
    CU_ASSERT(access(journal, F_OK) != 0);
    free(out), free(record);
    job_free(&job);
}

static void two_jobs_never_share_an_output(void) {
    Job job = new_job("p\n");
    const Options o = {.output = output, .overwrite = true};
    bool finished;
    Completions *c = begin(&job, &o, &finished);
    CU_ASSERT_PTR_NOT_NULL_FATAL(c);
    CU_ASSERT_PTR_NULL(completions_open(&job, &o, &err));
    CU_ASSERT(err.code == EXIT_USAGE && strstr(err.text, "another job"));
    CU_ASSERT(access(journal, F_OK) == 0); /* the first one's is still there */
    CU_ASSERT_EQUAL(completions_end(c, -1, &err), -1);
    completions_free(c);
    Completions *next = completions_open(&job, &o, &err); /* the lock died with its owner */
    CU_ASSERT_PTR_NOT_NULL(next);
    completions_free(next);
    job_free(&job);
}

/* A job whose output somebody disturbs between two sweeps stops, and its journal stays: nothing is lost. */
static void an_output_that_is_disturbed_is_an_error_and_loses_nothing(void) {
    char *out, *record, aside[420];
    size_t out_len, record_len;
    whole_job(&out, &out_len, &record, &record_len);
    free(record);
    snprintf(aside, sizeof aside, "%s/aside", dir);
    for (int way = 0; way < 4; way++) {
        Job job = new_job(three);
        const Options o = {.output = output, .stop = stop_at_5};
        bool finished;
        Completions *c = begin(&job, &o, &finished);
        CU_ASSERT_PTR_NOT_NULL_FATAL(c);
        sweep(&job, c, says, 3);
        if (way == 1) write_file(dir, "aside", "", 0);
        if (way == 2) write_file(dir, "out", "somebody else's\n", 16);
        CHECK((way == 0 ? unlink(output) : way == 1 ? rename(aside, output) : way == 3 ? truncate(output, 1) : 0) == 0);
        const Listener listener = completions_listener(c);
        while (give_tokens(&job, &listener, says)) continue;
        CU_ASSERT_EQUAL(completions_end(c, 0, &err), -1);
        CU_ASSERT(strstr(err.text, "was changed while the job wrote it: ") && strstr(err.text, "--resume"));
        completions_free(c);
        job_free(&job);
        char *left = contents(journal, &record_len);
        assert_goes_on(left, record_len, "", 0, out, out_len);
        free(left);
    }
    free(out);
}

/* Whatever lies at the journal's name when a job ends is removed only if it is the journal. */
static void what_replaced_a_journal_is_not_removed_with_it(void) {
    Job job = new_job("p\n");
    const Options o = {.output = output};
    bool finished;
    size_t len;
    Completions *c = begin(&job, &o, &finished);
    CU_ASSERT_PTR_NOT_NULL_FATAL(c);
    CHECK(unlink(journal) == 0);
    write_file(dir, "out.journal", "mine", 4);
    sweep(&job, c, says, N);
    ASSERT_OK(completions_end(c, 0, &err));
    completions_free(c);
    char *text = contents(journal, &len);
    CU_ASSERT_STRING_EQUAL(text, "mine");
    free(text);
    job_free(&job);
}

/* By a link of either kind, and beside a journal that is not there any more. */
static void an_output_with_two_names_is_one_output(void) {
    for (int way = 0; way < 3; way++) {
        char other[420];
        snprintf(other, sizeof other, "%s/name%d", dir, way);
        Job job = new_job("p\n"), second = new_job("p\n");
        const Options o = {.output = output}, by_other = {.output = way < 2 ? other : output, .overwrite = true};
        bool finished;
        write_file(dir, "out", "", 0);
        Completions *c = begin(&job, &o, &finished);
        CU_ASSERT_PTR_NOT_NULL_FATAL(c);
        CHECK((way == 0 ? symlink("out", other) : way == 1 ? link(output, other) : unlink(journal)) == 0);
        CU_ASSERT_PTR_NULL(begin(&second, &by_other, &finished));
        CU_ASSERT(err.code == EXIT_USAGE && strstr(err.text, "another job is writing there"));
        CU_ASSERT_PTR_NOT_NULL(strstr(err.text, way == 0 ? "out.journal" : "--output")); /* a link leads to the one */
        ASSERT_OK(completions_end(c, 0, &err));
        completions_free(c);
        if (way < 2) CHECK(unlink(other) == 0);
        job_free(&job), job_free(&second);
    }
}

/* Another process has the lock, and ends soon. */
static void a_job_goes_on_as_soon_as_the_one_before_has_ended(void) {
    Job job = new_job("p\n");
    const Options o = {.output = output, .resume = true};
    bool finished;
    int ready[2], status;
    char byte;
    CHECK(pipe(ready) == 0);
    const pid_t pid = fork();
    if (!pid) {
        const int fd = open(journal, O_RDWR | O_CREAT, 0600);
        if (fd < 0 || flock(fd, LOCK_EX) || write(ready[1], "", 1) != 1) _exit(1);
        usleep(200000);
        _exit(0);
    }
    CHECK(read(ready[0], &byte, 1) == 1);
    Completions *c = begin(&job, &o, &finished);
    if (!c) CU_FAIL_FATAL(err.text);
    CU_ASSERT(waitpid(pid, &status, WNOHANG) == pid && status == 0);
    ASSERT_OK(completions_end(c, 0, &err));
    completions_free(c);
    close(ready[0]), close(ready[1]);
    job_free(&job);
}

/* In this program instead of libc's. */
static int unlink_error;
int unlink(const char *path) { return unlink_error ? errno = unlink_error, -1 : unlinkat(AT_FDCWD, path, 0); }

static void a_journal_that_cannot_be_removed_is_an_error(void) {
    Job job = new_job("p\n");
    const Options o = {.output = output};
    bool finished;
    Completions *c = begin(&job, &o, &finished);
    CU_ASSERT_PTR_NOT_NULL_FATAL(c);
    sweep(&job, c, says, N);
    unlink_error = EIO;
    CU_ASSERT_EQUAL(completions_end(c, 0, &err), -1);
    unlink_error = 0;
    CU_ASSERT(err.code == EXIT_FAILED && strstr(err.text, "out.journal: cannot remove: Input/output error"));
    completions_free(c);
    CU_ASSERT(access(journal, F_OK) == 0);
    job_free(&job);
}

#if !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__ /* they take terabytes of it */
/* Bytes that this process can write to. */
static size_t data_space(void) {
    char line[200];
    unsigned long kib = 0;
    FILE *f = fopen("/proc/self/status", "r");
    CHECK(f);
    while (!kib && fgets(line, sizeof line, f)) (void)!sscanf(line, "VmData: %lu", &kib);
    fclose(f);
    return kib * 1024;
}

/* Two prompts whose ids have a million letters, and from hardly any memory to enough. */
static void memory_that_runs_out_loses_no_line(void) {
    enum { LONG = 1 << 20, ROOM = 3 * LONG };
    char *prompts = xcalloc(ROOM, 1), *id = xcalloc(LONG, 1);
    int done = 0, stopped = 0;
    mallopt(M_MMAP_THRESHOLD, 1 << 17); /* what is freed is given back */
    memset(id, 'i', LONG - 1);
    snprintf(prompts, ROOM, "{\"id\": \"a%s\", \"prompt\": \"p\"}\n{\"id\": \"b%s\", \"prompt\": \"q\"}\n", id, id);
    for (size_t room = 0; room < 8 * LONG && done < 3; room += LONG / 4) {
        Job job = new_job(prompts);
        const Options o = {.output = output};
        bool finished;
        int status;
        size_t len;
        fflush(NULL);
        const pid_t pid = fork();
        if (!pid) {
            CHECK(freopen("/dev/null", "w", stderr));
            Completions *c = begin(&job, &o, &finished);
            setrlimit(RLIMIT_DATA, &(struct rlimit){data_space() + room, RLIM_INFINITY});
            sweep(&job, c, (const char *const[]){"x", "y"}, N);
            _exit(completions_end(c, 0, &err) ? EXIT_FAILED : EXIT_OK);
        }
        CU_ASSERT(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) <= EXIT_FAILED);
        char *text = file_read(output, ROOM, &len, &err);
        CU_ASSERT_FATAL(text != NULL);
        CU_ASSERT(!len || (len > LONG && text[len - 1] == '\n')); /* whole lines */
        CU_ASSERT_EQUAL(status == 0, len > 2 * LONG);
        CU_ASSERT_EQUAL(status == 0, access(journal, F_OK) != 0);
        status ? stopped++ : done++;
        free(text);
        job_free(&job);
    }
    CU_ASSERT(done && stopped);
    free(prompts), free(id);
}
#else
static void memory_that_runs_out_loses_no_line(void) {}
#endif

/* In this program instead of libc's: notes how much of a file is on the disk, and fails for one where it is told to. */
static struct {
    off_t journal, output; /* bytes */
    bool ahead;            /* the output was synced when the journal was not, whole */
    const char *fails;     /* the file's path; NULL: none */
} synced;

static off_t size_of(const char *path) {
    struct stat st;
    return stat(path, &st) ? -1 : st.st_size;
}

int fdatasync(int fd) {
    char link[40], path[500] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    CHECK(readlink(link, path, sizeof path - 1) > 0);
    const bool is_journal = strstr(path, ".journal");
    if (synced.fails && is_journal == (synced.fails == journal)) return errno = EIO, -1;
    if (is_journal) synced.journal = size_of(path);
    if (!is_journal) synced.output = size_of(path), synced.ahead |= synced.journal != size_of(journal);
    return (int)syscall(SYS_fdatasync, fd);
}

/* The journal first: what is lost of it would be lost of the output. */
static void a_job_ends_when_its_journal_and_then_its_output_are_on_the_disk(void) {
    Job job = new_job("p\n");
    const Options o = {.output = output};
    bool finished;
    memset(&synced, 0, sizeof synced);
    Completions *c = begin(&job, &o, &finished);
    CU_ASSERT_PTR_NOT_NULL_FATAL(c);
    const off_t head_size = size_of(journal);
    CU_ASSERT(head_size > 0 && synced.journal == head_size);
    sweep(&job, c, says, N);
    ASSERT_OK(completions_end(c, 0, &err));
    CU_ASSERT(synced.journal > head_size && !synced.ahead);
    CU_ASSERT(synced.output > 0 && synced.output == size_of(output));
    completions_free(c);
    job_free(&job);
}

static void what_cannot_be_synced_is_an_error_of_the_job(void) {
    const char *const files[] = {journal, output};
    for (int f = 0; f < 2; f++) {
        Job job = new_job("p\n");
        const Options o = {.output = output};
        bool finished;
        Completions *c = begin(&job, &o, &finished);
        CU_ASSERT_PTR_NOT_NULL_FATAL(c);
        synced.fails = files[f];
        sweep(&job, c, says, N);
        CU_ASSERT_EQUAL(completions_end(c, 0, &err), -1);
        synced.fails = NULL;
        CU_ASSERT(err.code == EXIT_FAILED && strstr(err.text, files[f]) && strstr(err.text, "Input/output error"));
        completions_free(c);
        CU_ASSERT(access(journal, F_OK) == 0); /* it can still go on */
        job_free(&job);
    }
}

/* On a disk that is full anywhere within them, journal and output stay good: no line is cut, and the job can go on. */
static void a_full_disk_cuts_no_line(void) {
    char *out, *record;
    size_t out_len, record_len, len;
    whole_job(&out, &out_len, &record, &record_len);
    host_set_threads(1); /* ThreadSanitizer lets a child start threads only if its parent had none */
    for (rlim_t room = 100; room < (record_len > out_len ? record_len : out_len); room += 41) {
        Job job = new_job(three);
        const Options o = {.output = output, .stop = stop_at_5, .overwrite = true};
        bool finished;
        pid_t pid = fork();
        if (!pid) { /* a limit on file sizes is the same to a file as a full disk */
            signal(SIGXFSZ, SIG_IGN);
            setrlimit(RLIMIT_FSIZE, &(struct rlimit){room, room});
            Completions *c = begin(&job, &o, &finished);
            const Listener listener = completions_listener(c);
            const RunStats stats = {.total_s = 1};
            while (give_tokens(&job, &listener, says)) listener.sweep(listener.ctx, &stats, &err);
            _exit(completions_end(c, 0, &err) && strstr(err.text, "File too large") ? 0 : 1);
        }
        int status;
        CU_ASSERT(waitpid(pid, &status, 0) == pid && status == 0);
        char *part = contents(output, &len);
        CU_ASSERT(len <= out_len && !memcmp(part, out, len) && (!len || part[len - 1] == '\n'));
        char *left = contents(journal, &record_len);
        assert_goes_on(left, record_len, part, len, out, out_len);
        free(part), free(left);
        job_free(&job);
    }
    free(out), free(record);
}

static void the_remaining_time_is_known_early(void) {
    Progress p = {.sweeps = 100, .work = 50 * 20 + 99 * 50}; /* a prefill of 50 prompts of 20 tokens, then 99 tokens each */
    RunStats stats = {0};
    const double a = .3, b = .01;
    for (int i = 0; i < 10; i++) {
        const double rows = i ? 50 : 1000;
        stats.sweeps++, stats.total_s += a + b * rows;
        *(i ? &stats.decoded : &stats.prefill_tokens) += (long)rows;
        progress_show(&p, &stats, 0);
    }
    CU_ASSERT_DOUBLE_EQUAL(progress_left(&p), 90 * (a + b * 50), 1e-6);
}

/* Sweeps of 10 and 20 rows, when two of together 60 are left: their rows take all of the time, or none. */
static void neither_part_of_a_sweeps_time_is_less_than_nothing(void) {
    static const double seconds[][2] = {{1, 4}, {4, 1}}, left[] = {60 * 5. / 30, 2 * 5. / 2};
    for (int i = 0; i < 2; i++) {
        Progress p = {.sweeps = 4, .work = 90};
        RunStats stats = {0};
        for (int s = 0; s < 2; s++) {
            stats.sweeps++, stats.decoded += 10 * (s + 1), stats.total_s += seconds[i][s];
            progress_show(&p, &stats, 0);
        }
        CU_ASSERT_DOUBLE_EQUAL(progress_left(&p), left[i], 1e-9);
    }
}

static int show_sweep(void *ctx, const RunStats *stats, Error *error) {
    Progress *p = ctx;
    (void)error;
    progress_show(p, stats, 0);
    return 0;
}

/* The work that is announced before a run is what its sweeps come to, and then nothing is left of it. */
static void the_work_of_a_run_is_known_before_it(void) {
    enum { PROMPTS = 7 };
    OptConfig small = SMALL_CONFIG(-1);
    const Policy policy = all_gpu(2, 2);
    const Hardware fast = test_fast_machine();
    Checkpoint *model = checkpoint_dummy(&small, 0);
    Prompt prompts[PROMPTS];
    int32_t ids[20] = {0};
    long tokens = 0;
    for (int i = 0; i < PROMPTS; i++)
        prompts[i] = (Prompt){.ids = ids, .s = 5 + 2 * i, .n = 1 + i * 3 % 7}, tokens += prompts[i].n;
    const Task task = {.prompts = prompts, .count = PROMPTS, .sampling = {.top_p = 1}};
    Plan *plan = plan_make(model, &policy, &task, F16, &err);
    Device *sim = sim_open(plan, &fast);
    Progress p = {.on = false};
    RunStats stats = {0};
    progress_open(&p, plan, &task);
    CU_ASSERT_EQUAL(p.tokens, tokens);
    ASSERT_OK(schedule_run(plan, &task, sim, &(Listener){.ctx = &p, .sweep = show_sweep}, &stats, &err));
    CU_ASSERT(stats.sweeps > PROMPTS && p.sweeps == (double)stats.sweeps);
    CU_ASSERT_DOUBLE_EQUAL(p.w, p.work, 1e-9 * p.work);
    CU_ASSERT_DOUBLE_EQUAL(progress_left(&p), 0, 1e-9 * stats.total_s);
    sim->close(sim), plan_free(plan), checkpoint_close(model);
}

CU_TestInfo tests[] = {
    {"a completion has exactly its five fields", a_completion_has_exactly_its_five_fields},
    {"every character of a completion survives", every_character_of_a_completion_survives},
    {"a NUL byte in a completion is escaped", a_nul_byte_in_a_completion_is_escaped},
    {"the first stop text cuts the completion", the_first_stop_text_cuts_the_completion},
    {"a stop text of several tokens is seen in its last one", a_stop_text_of_several_tokens_is_seen_in_its_last_one},
    {"a stop text between or of split characters is found whole",
     a_stop_text_between_or_of_split_characters_is_found_whole},
    {"a long stop text far into a completion is found", a_long_stop_text_far_into_a_completion_is_found},
    {"a stop text with special tokens inside cuts the completion",
     a_stop_text_with_special_tokens_inside_cuts_the_completion},
    {"a job goes on from any byte of its journal and output", a_job_goes_on_from_any_byte_of_its_journal_and_output},
    {"a journal that ends in its first line is begun anew", a_journal_that_ends_in_its_first_line_is_begun_anew},
    {"a damaged journal never makes a wrong output", a_damaged_journal_never_makes_a_wrong_output},
    {"an output that is there is never lost by accident", an_output_that_is_there_is_never_lost_by_accident},
    {"lines that are not the journal's are refused", lines_that_are_not_the_journals_are_refused},
    {"a job that has ended has nothing left to do", a_job_that_has_ended_has_nothing_left_to_do},
    {"two jobs never share an output", two_jobs_never_share_an_output},
    {"zeros at the end of an output never reached the disk", zeros_at_the_end_of_an_output_never_reached_the_disk},
    {"a job goes on as soon as the one before has ended", a_job_goes_on_as_soon_as_the_one_before_has_ended},
    {"a line longer than a pipe takes at once is whole", a_line_longer_than_a_pipe_takes_at_once_is_whole},
    {"a journal that cannot be removed is an error", a_journal_that_cannot_be_removed_is_an_error},
    {"memory that runs out loses no line", memory_that_runs_out_loses_no_line},
    {"a job ends when its journal and then its output are on the disk",
     a_job_ends_when_its_journal_and_then_its_output_are_on_the_disk},
    {"what cannot be synced is an error of the job", what_cannot_be_synced_is_an_error_of_the_job},
    {"an output that is disturbed is an error and loses nothing",
     an_output_that_is_disturbed_is_an_error_and_loses_nothing},
    {"what replaced a journal is not removed with it", what_replaced_a_journal_is_not_removed_with_it},
    {"an output with two names is one output", an_output_with_two_names_is_one_output},
    {"a full disk cuts no line", a_full_disk_cuts_no_line},
    {"the remaining time is known early", the_remaining_time_is_known_early},
    {"neither part of a sweep's time is less than nothing", neither_part_of_a_sweeps_time_is_less_than_nothing},
    {"the work of a run is known before it", the_work_of_a_run_is_known_before_it},
    CU_TEST_INFO_NULL,
};
