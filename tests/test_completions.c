/* test_completions.c: what becomes of a job. Its lines are read back as strict JSON, and it goes on from every byte of its
 * journal and of its output. test_job.c has how prompts come in, test_cli.c what the program does when it is stopped, and
 * test_faults.c what it does when memory runs out. The pieces are those of tests/golden/tokenizer, where a character such
 * as an emoji is several tokens. */
#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "started.h"
#include "written.h"

#define HEAD "{\"" JOURNAL_VERSION "\":true"
enum { VOCAB = 1024, POSITIONS = 2048, N = 1000 };

static const OptConfig config = {
    .vocab = VOCAB, .max_pos = POSITIONS, .eos = 2, .more_eos = {VOCAB - 2}, .nmore = 1, .name = "a \"b"};
static Tokenizer *tokenizer;
static cJSON *head; /* of its journal */
static Error err;
static char output[400], journal[420]; /* paths, in suite_dir */

/* The job of a test. The next test frees it. */
static Job job;
static Options options;
static Completions *completions;
static bool finished; /* True if the job had ended before it was started here. */
static bool runs;     /* True if it has begun and not ended. */

static int end_as(int status) {
    runs = false;
    return completions_end(completions, status, &err);
}

static void drop(void) {
    if (runs) end_as(-1);
    completions_free(completions);
    completions = NULL;
    job_free(&job);
}

/* Reads these prompts, for an output that is not there. */
static void read_prompts(const char *lines) {
    if (!tokenizer) {
        snprintf(output, sizeof output, "%s/out", suite_dir());
        snprintf(journal, sizeof journal, "%s.journal", output);
        tokenizer = tokenizer_open("tests/golden/tokenizer", VOCAB, &err);
        ASSERT_OK(!tokenizer);
        head = cJSON_Parse(HEAD ",\"--temperature\":0}");
    }
    drop();
    unlink(output), unlink(journal);
    job = (Job){.config = &config, .max_tokens = N, .tokenizer = tokenizer};
    options = (Options){.output = output};
    write_file(suite_dir(), "prompts", lines, strlen(lines));
    ASSERT_OK(job_read(&job, in_dir(suite_dir(), "prompts"), &err));
}

/* Opens the output, goes on with what is there, and begins. False: refused. */
static bool start(void) {
    finished = false;
    completions = completions_open(&job, &options, &err);
    if (!completions || completions_resume(completions, head, &finished, &err)) return false;
    if (finished) return true;
    job_rest(&job);
    runs = !completions_begin(completions, head, &err);
    return runs;
}

static void begin(const char *lines) {
    read_prompts(lines);
    CU_ASSERT_FATAL(start());
}

/* Gives each prompt that has not ended its next score: of -1/8 for each token that is known, and for each prompt before it.
 * The second of a prompt is no greedy choice if its place is odd. */
static bool give_scores(void) {
    const Listener listener = completions_listener(completions);
    bool more = false;
    for (int p = 0; p < job.task.count; p++) {
        const int place = job.task.prompts[p].place;
        const Request *r = &job.request[place];
        if (r->ended) continue;
        const int at = r->s + r->known;
        listener.scored(listener.ctx, p, at, -.125f * (float)(r->known + place), r->ids[at] + (r->known == 1 && place % 2));
        more |= !r->ended;
    }
    return more;
}

/* Gives each prompt that has not ended the next token of what it is to say, texts[place]. False: all have ended. */
static bool give_tokens(const char *const *texts) {
    const Listener listener = completions_listener(completions);
    bool more = false;
    for (int p = 0; p < job.task.count; p++) {
        const int place = job.task.prompts[p].place;
        const Request *r = &job.request[place];
        int32_t *ids;
        if (r->ended) continue;
        const int n = tokenizer_encode(tokenizer, texts[place], strlen(texts[place]), &ids, &err);
        const int32_t token = r->known < n ? ids[r->known] : config.eos;
        const bool stopped = listener.token(listener.ctx, p, &token, 1); /* the newest is all that it looks at */
        CU_ASSERT_EQUAL(stopped, r->stopped);
        more |= !r->ended;
        free(ids);
    }
    return more;
}

/* Sweeps until all have ended, at most so many times. Returns 0 if every sweep went well. */
static int sweep(const char *const *texts, int most) {
    const Listener listener = completions_listener(completions);
    const RunStats stats = {.total_s = 1};
    int status = 0;
    for (bool more = true; more && most > 0; most--) {
        more = job.task.scored ? give_scores() : give_tokens(texts);
        status |= listener.sweep(listener.ctx, &stats, &err);
    }
    return status;
}

/* Gives a job of one prompt these tokens, until it ends. */
static void give_ids(const int32_t *ids, int n) {
    const Listener listener = completions_listener(completions);
    for (int i = 0; i < n && !job.request[0].ended; i++) {
        const bool stopped = listener.token(listener.ctx, 0, ids + i, 1);
        CU_ASSERT_EQUAL(stopped, job.request[0].stopped);
    }
}

static bool is_there(const char *path) { return !access(path, F_OK); }

/* A file, kept to the end of the suite. */
static Text text_of(const char *path) {
    Text t;
    t.text = keep(contents(path, &t.len));
    return t;
}

/* Ends the job. Of its journal the head stays, with what the output has become. */
static void end(void) {
    ASSERT_OK(end_as(0));
    const Text left = text_of(journal);
    CU_ASSERT(strcspn(left.text, "\n") + 1 == left.len && strstr(left.text, ",\"" JOURNAL_ENDED "\":\""));
}

TEST(a_completion_has_exactly_its_five_fields) {
    begin("{\"id\": \"\\\"x\\n\", \"prompt\": \"T\\\"\\\\\\t\\u0001\\u007f\\ud83d\\ude00\"}\n");
    ASSERT_OK(sweep((const char *[]){" two"}, N));
    end();
    static const char beginning[] =
        "{\"id\": \"\\\"x\\n\", \"prompt\": \"T\\\"\\\\\\t\\u0001\\u007f\xF0\x9F\x98\x80\", \"completion\": \" two\", "
        "\"tokens\": [";
    const char *line = text_of(output).text;
    CU_ASSERT(!strncmp(line, beginning, strlen(beginning)));
    CU_ASSERT(shows(line, "\"tokens\": [ ... ], \"finish_reason\": \"stop\"}\n"));
}

#define ANSWER(id, n) "{\"id\": \"batch_req_" n "\", \"custom_id\": " id ", \"response\": "
#define BODY(n) "{\"status_code\": 200, \"request_id\": \"req_" n "\", \"body\": {\"id\": \"cmpl-" n "\", "

/* Ids are strings there, and the tokens of a completion do not count </s>. */
TEST(an_output_for_openai_has_the_form_of_its_batches) {
    static const char lines[] =
        "{\"custom_id\": \"r\\n\", \"body\": {\"prompt\": \"one\", \"stop\": [\"2\"]}}\n{\"prompt\": 3}\n"
        "{\"prompt\": \"\", \"max_tokens\": 2}\n";
    read_prompts(lines);
    options.format = "openai";
    CU_ASSERT_FATAL(start());
    ASSERT_OK(sweep((const char *[]){"\n1\n2\n", "", "\n\n\n\n"}, N));
    end();
    static const char expected[] = ANSWER("\"r\\n\"", "0") BODY("0")
        "\"object\": \"text_completion\", \"model\": \"a \\\"b\", \"choices\": [{\"index\": 0, \"text\": \"\\n1\\n\", "
        "\"finish_reason\": \"stop\"}], \"usage\": {\"prompt_tokens\": 2, \"completion_tokens\": 3, \"total_tokens\": 5}}}, "
        "\"error\": null}\n" ANSWER("\"1\"", "1")
        "null, \"error\": {\"code\": \"invalid_request\", \"message\": \"line 2: \\\"prompt\\\" is 3; expected a "
        "string\"}}\n" ANSWER("\"2\"", "2") BODY("2")
        "\"object\": \"text_completion\", \"model\": \"a \\\"b\", \"choices\": [{\"index\": 0, \"text\": \"\\n\\n\", "
        "\"finish_reason\": \"length\"}], \"usage\": {\"prompt_tokens\": 1, \"completion_tokens\": 2, \"total_tokens\": 3}}}, "
        "\"error\": null}\n";
    CU_ASSERT_STRING_EQUAL(text_of(output).text, expected);
}

/* test_json.c has more of them. \u0000 is JSON, but json_parse refuses it, so the bytes are looked at. */
TEST(odd_characters_of_a_completion_survive) {
    static const char text[] = "a\0\"\\/\n\t\x1f\x7f\xC3\xA9 \xE2\x80\xA8 \xF4\x8F\xBF\xBF";
    int32_t *ids;
    begin("p");
    const int n = tokenizer_encode(tokenizer, text, sizeof text - 1, &ids, &err);
    give_ids(ids, n);
    give_ids(&config.eos, 1);
    end();
    CU_ASSERT(
        shows(text_of(output).text,
              "\"completion\": \"a\\u0000\\\"\\\\/\\n\\t\\u001f\\u007f\xC3\xA9 \\u2028 \xF4\x8F\xBF\xBF\", \"tokens\""));
    free(ids);
}

TEST(each_of_several_tokens_ends_a_completion_and_is_not_in_it) {
    for (int i = 0; i < 2; i++) {
        const int32_t ids[] = {300, 301, i ? config.more_eos[0] : config.eos, 302};
        begin("p");
        give_ids(ids, COUNT(ids));
        end();
        CU_ASSERT(shows(text_of(output).text, "\"tokens\": [300, 301], \"finish_reason\": \"stop\"}"));
    }
}

#define A "\xF0\x9F\xA6\x95" /* characters of several tokens */
#define B "\xF0\x9F\xA6\x96"
#define LONG_STOP A B A B " qqzzqqzzqqzz" /* is longer than any token */
#define TIMES_8(text) text text text text text text text text

/* The tokens of a line make its completion, and no shorter ones do. */
TEST(the_first_stop_text_cuts_the_completion) {
    static const struct {
        const char *text, *stops[2], *expected;
    } cases[] = {
        {"one two three two", {"two"}, "one "},
        {"one two three", {"three", "two"}, "one "},
        {"one two three", {"two", "wo"}, "one "},
        {"one two three", {"four"}, "one two three"},
        {"one two", {"one two"}, ""},
        {"a\n\nb", {"\n\n"}, "a"},
        {"aab", {"ab"}, "a"},
        {A "." B, {"."}, A}, /* between characters, and of one */
        {"a" A "z" B "b", {B}, "a" A "z"},
        {A A A "!", {A "!"}, A A},
        {"The qzxj end. qzxk And more, much more of it.", {"qzxk"}, "The qzxj end. "},
        /* far into a completion: the window of on_token must reach back far enough */
        {TIMES_8(TIMES_8(A " x ")) LONG_STOP " and what is never made", {LONG_STOP}, TIMES_8(TIMES_8(A " x "))},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        const char *const *stops = cases[i].stops, *expected = cases[i].expected;
        size_t size;
        int32_t ids[N];
        int n = 0;
        read_prompts("a prompt");
        options.stop = (Texts){(char **)stops, stops[1] ? 2 : 1};
        CU_ASSERT_FATAL(start());
        ASSERT_OK(sweep(&cases[i].text, N));
        end();
        const Text line = text_of(output);
        cJSON *json = json_parse(line.text, line.len, &err);
        ASSERT_OK(!json);
        CU_ASSERT_STRING_EQUAL(cJSON_GetStringValue(json_get(json, "completion")), expected);
        CU_ASSERT_STRING_EQUAL(cJSON_GetStringValue(json_get(json, "finish_reason")), "stop");
        for (const cJSON *id = json_get(json, "tokens")->child; id; id = id->next) ids[n++] = id->valueint;
        const char *made = keep(tokenizer_decode(tokenizer, ids, n, &size)),
                   *less = n ? keep(tokenizer_decode(tokenizer, ids, n - 1, &size)) : NULL;
        CU_ASSERT_PTR_EQUAL(strstr(made, expected), made);
        CU_ASSERT(!less || strstr(less, expected) != less);
        cJSON_Delete(json);
    }
    int32_t *ids;
    CU_ASSERT(tokenizer_encode(tokenizer, "qzxk", 4, &ids, &err) > 1); /* or its row would say nothing */
    free(ids);
}

/* Each line ends by its own texts, or by those of --stop if it has none; an empty list is one's own. */
TEST(a_line_has_stop_texts_of_its_own) {
    static const char lines[] =
        "{\"prompt\": \"a\", \"stop\": \"4\"}\n{\"prompt\": \"b\"}\n{\"prompt\": \"c\", \"stop\": [\"9\", \"3\", \"5\"]}\n"
        "{\"prompt\": \"d\", \"stop\": []}\n";
    static const char *const text = " 1 2 3 4 5", *const expected[] = {" 1 2 3 ", " 1 ", " 1 2 ", " 1 2 3 4 5"};
    char *stop = "2";
    read_prompts(lines);
    options.stop = (Texts){&stop, 1};
    CU_ASSERT_FATAL(start());
    ASSERT_OK(sweep((const char *[]){text, text, text, text}, N));
    end();
    const char *line = text_of(output).text;
    for (int i = 0; i < 4; i++, line = strchr(line, '\n') + 1) {
        char part[100];
        snprintf(part, sizeof part, "\"completion\": \"%s\", ", expected[i]);
        CU_ASSERT(shows(line, part) && strstr(line, part) < strchr(line, '\n'));
    }
}

/* "xab" with so many special tokens inside the stop text "ab". Behind more of them than a window holds it is not seen while
 * tokens come, and the completion reaches its length; that is then not why it ends where it does. */
TEST(a_stop_text_with_special_tokens_inside_cuts_the_completion) {
    enum { MOST = 40, PAD = 1 };
    bool seen_early = false, seen_late = false;
    for (int pads = 0; pads < MOST - 2; pads += 4) {
        char expected[100];
        int32_t *ids, chosen[MOST];
        read_prompts("{\"id\": 0, \"prompt\": \"p\", \"max_tokens\": 40}");
        char *stop = "ab";
        options.stop = (Texts){&stop, 1};
        CU_ASSERT_FATAL(start());
        CU_ASSERT_EQUAL_FATAL(tokenizer_encode(tokenizer, "x\na\nb", 5, &ids, &err), 5);
        for (int i = 0; i < MOST; i++)
            chosen[i] = i == 1 ? ids[2] : i == 2 + pads ? ids[4] : i > 1 && i < 2 + pads ? PAD : *ids;
        give_ids(chosen, MOST);
        seen_early |= job.request[0].known < MOST, seen_late |= job.request[0].known == MOST;
        end();
        snprintf(expected, sizeof expected, "\"completion\": \"x\", \"tokens\": [%d], \"finish_reason\": \"stop\"}\n",
                 *ids);
        CU_ASSERT_PTR_NOT_NULL(strstr(text_of(output).text, expected));
        free(ids);
    }
    CU_ASSERT(seen_early && seen_late);
}

// ---- Journals -------------------------------------------------------------------------------------------------------

static const char *const says[] = {" a b c d e f g h i j", " x", "", " 1 2 3 4 5 6"};
static bool scores;        /* the job is scored */
static Text whole, record; /* the output of a job with these prompts, and its journal before the end */
static long whole_tokens;  /* in its lines */

/* A job of four prompts, of which the third is impossible; where it is scored, the second is two windows and a part. */
static void read_four(void) {
    static char *stop = "5";
    static const OptConfig small = {.vocab = VOCAB, .max_pos = 5, .eos = 2};
    if (scores) {
        read_prompts("");
        job = (Job){.config = &small, .tokenizer = tokenizer, .format = "jsonl", .task.scored = true};
        static const char lines[] =
            "{\"prompt\": \"q\", \"completion\": \"zq\"}\n{\"prompt\": \"q\", \"completion\": "
            "\"zqzqzqzqzqzq\"}\n{\"prompt\": 3}\n{\"id\": \"x\", \"text\": \"z q\"}\n";
        write_file(suite_dir(), "prompts", lines, sizeof lines - 1);
        ASSERT_OK(job_read(&job, in_dir(suite_dir(), "prompts"), &err));
        return;
    }
    read_prompts("one\ntwo\nno\xFFthree\nfour\n");
    options.stop = (Texts){&stop, 1};
}

/* Runs the job, unless an earlier test has done so. It fails at its end, so that its journal stays. */
static void make_whole_job(void) {
    if (whole.text) return;
    read_four();
    CU_ASSERT_FATAL(start());
    ASSERT_OK(sweep(says, N));
    CU_ASSERT_EQUAL(end_as(-1), -1);
    whole_tokens = completions_tokens(completions);
    record = text_of(journal);
    whole = text_of(output);
    static const char *const expected[] = {
        " a b c d e f g h i j\" ... {\"id\": 1 ... {\"id\": 2, \"error\" ... \" 1 2 3 4 \"",
        "{\"id\": 0, \"logprob\": -0.125, \"greedy\": true, \"tokens\": 2}\n{\"id\": 1, \"logprob\": -5.25, \"greedy\": "
        "false, "
        "\"tokens\": 12}\n{\"id\": 2, \"error\": \"line 3: ... {\"id\": \"x\", \"logprob\": -1.375, \"greedy\": false, "
        "\"tokens\": 2}\n"};
    CU_ASSERT(shows(whole.text, expected[scores]));
}

/* Goes on with so many bytes of a journal and of an output. The job ends as if it had not been broken. */
static void assert_goes_on(const char *left, size_t left_len, const char *out, size_t len) {
    read_four();
    options.resume = true;
    write_file(suite_dir(), "out.journal", left, left_len);
    write_file(suite_dir(), "out", out, len);
    ASSERT_OK(!start());
    ASSERT_OK(sweep(says, N));
    end();
    CU_ASSERT_EQUAL(completions_tokens(completions), whole_tokens); /* of lines that were there, were cut and are new */
    const Text made = text_of(output);
    CU_ASSERT(made.len == whole.len && !memcmp(made.text, whole.text, whole.len));
}

/* One that was killed while it wrote its journal's first line had done nothing: it begins anew. */
TEST(a_job_goes_on_from_any_byte_of_its_journal_and_output) {
    for (int kind = 1; kind >= 0; kind--) {
        scores = kind;
        whole.text = NULL;
        make_whole_job();
        const size_t head_len = strcspn(record.text, "\n") + 1; /* of the journal's first line */
        for (size_t cut = 0; cut < head_len; cut++) assert_goes_on(record.text, cut, "", 0);
        for (size_t cut = head_len; cut <= record.len; cut++)
            assert_goes_on(record.text, cut, whole.text, cut * 31 % (whole.len + 1));
        for (size_t cut = 0; cut <= whole.len; cut += 3) assert_goes_on(record.text, record.len, whole.text, cut);
    }
}

/* From the first to the last of the vocabulary. */
TEST(a_job_goes_on_with_any_token) {
    static const int32_t ids[] = {0, VOCAB - 1};
    begin("p\n");
    give_ids(ids, 2);
    CU_ASSERT_EQUAL(end_as(-1), -1);
    const Text left = text_of(journal);
    read_prompts("p\n");
    options.resume = true;
    write_file(suite_dir(), "out.journal", left.text, left.len);
    CU_ASSERT_FATAL(start());
    CU_ASSERT(job.request[0].known == 2 && !job.request[0].ended);
    give_ids(&config.eos, 1);
    end();
}

/* After a loss of power a file may be as long as it was and end in zeros. */
TEST(zeros_at_the_end_of_an_output_never_reached_the_disk) {
    make_whole_job();
    char *part = keep(xcalloc(whole.len + 4096, 1));
    for (size_t there = 0; there <= whole.len; there += 7) {
        memcpy(part, whole.text, there);
        assert_goes_on(record.text, record.len, part, whole.len);
        assert_goes_on(record.text, record.len, part, whole.len + 4096);
    }
}

/* Whatever has become of a token, those behind it are not used. */
TEST(a_damaged_journal_never_makes_a_wrong_output) {
    make_whole_job();
    for (size_t at = strcspn(record.text, "\n") + 1; at < record.len; at++) {
        record.text[at] ^= (char)(1 << at % 8);
        assert_goes_on(record.text, record.len, whole.text, 0);
        record.text[at] ^= (char)(1 << at % 8);
    }
}

TEST(an_output_that_is_there_is_never_lost_by_accident) {
    static const struct {
        const char *prompts, *out, *journal; /* NULL: not there */
        bool resume;
        const char *said;
    } cases[] = {
        {"p\n", "something\n", NULL, false, "--resume, or lose it with --overwrite"},
        {"p\n", NULL, HEAD ",\"--temperature\":0}\n", false, "--resume, or lose it with --overwrite"},
        {"p\n", "something\n", NULL, true, "has no journal"},
        {"p\n", "{\"id\": 0, \"prompt\": \"q\", \"completion", NULL, true, "has no journal"},
        {"p\nq\n", "{\"id\": 0, \"prompt\": \"p\", \"completion\": \"\"}\n", NULL, true,
         "has no journal, so that nobody knows what job it is of; bring back "},
        {"p\n", "{\"id\": 0, \"prompt\": \"p\", \"completion\": \"\"", NULL, true, "has no journal"},
        {"p\n", NULL, HEAD ",\"--temperature\":1}\n", true, "its --temperature is 1, and here it is 0"},
        {"p\n", NULL, HEAD "}\n", true, "its --temperature is missing"},
        {"p\n", NULL, "dear diary", false, "is no journal"},
        {"p\n", NULL, "{}\n", true, "is no journal"},
        {"p\n", NULL, "{\"" JOURNAL_VERSION "\": [\n", true, "is no journal"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        const char *out = cases[i].out, *left = cases[i].journal;
        read_prompts(cases[i].prompts);
        options.resume = cases[i].resume;
        if (out) write_file(suite_dir(), "out", out, strlen(out));
        if (left) write_file(suite_dir(), "out.journal", left, strlen(left));
        CU_ASSERT_FALSE(start());
        said(&err, EXIT_USAGE, cases[i].said);
        drop();
        CU_ASSERT(is_there(output) == !!out && is_there(journal) == !!left); /* nothing has changed */
        if (out) CU_ASSERT_STRING_EQUAL(text_of(output).text, out);
        if (left) CU_ASSERT_STRING_EQUAL(text_of(journal).text, left);
    }
}

/* A byte of them is another. */
TEST(lines_that_are_not_the_journals_are_refused) {
    make_whole_job();
    read_four();
    options.resume = true;
    whole.text[whole.len / 2] ^= 1;
    write_file(suite_dir(), "out", whole.text, whole.len);
    write_file(suite_dir(), "out.journal", record.text, record.len);
    CU_ASSERT(!start() && !finished);
    CU_ASSERT_STRING_EQUAL(text_of(output).text, whole.text);
    CU_ASSERT(!strstr(err.text, "--overwrite")); /* or it is lost */
    said(&err, EXIT_USAGE, "; move the output away, and --resume writes it anew");
    whole.text[whole.len / 2] ^= 1;
    drop();
    CU_ASSERT(is_there(journal));
    assert_goes_on(record.text, record.len, "", 0);
}

/* Returns what is left of the journal when the job of four prompts has ended. */
static Text ended_record(void) {
    make_whole_job();
    assert_goes_on(record.text, record.len, "", 0);
    return text_of(journal);
}

/* Nothing is left to do only if the output is still what the job wrote, to the byte. Otherwise both files stay as they are.
 * In the texts $ is a byte of 0. */
TEST(a_finished_output_is_believed_as_it_was_written) {
    static const Fault edits[] = {
        {"", "", NULL},
        {" a b c", " a b d", "was changed"},                 /* another text of the same length */
        {"\"tokens\": [", "\"tokens\": [ ", "was changed"},  /* the same JSON */
        {"\"}\n{\"id\": 1", "$$$$\"id\": 1", "was changed"}, /* what a loss of power leaves */
        {" 1 2 3 4 \"", NULL, "was changed"},                /* cut within a line */
        {"{\"id\": 3", NULL, "was changed"},                 /* cut between lines */
        {"", "{\"id\": 4}\n", "was changed"},                /* another line at the end */
        {"", "$", "was changed"},
    };
    const Text left = ended_record();
    for (size_t i = 0; i < COUNT(edits); i++) {
        const char *from = edits[i].from, *to = edits[i].to ? edits[i].to : "";
        const char *at = *from ? strstr(whole.text, from) : whole.text + whole.len;
        const size_t before = (size_t)(at - whole.text);
        char *text = keep(xcalloc(whole.len + 100, 1));
        size_t len = before + strlen(to);
        CU_ASSERT_PTR_NOT_NULL_FATAL(at);
        memcpy(text, whole.text, before), memcpy(text + before, to, strlen(to));
        if (edits[i].to) {
            const size_t rest = whole.len - before - strlen(from);
            memcpy(text + len, at + strlen(from), rest);
            len += rest;
        }
        for (char *nul = text; (nul = memchr(nul, '$', len - (size_t)(nul - text)));) *nul = 0;
        for (int resume = 0; resume < 2; resume++) {
            read_four();
            options.resume = resume;
            write_file(suite_dir(), "out", text, len), write_file(suite_dir(), "out.journal", left.text, left.len);
            CU_ASSERT_EQUAL(start(), resume && !edits[i].says);
            CU_ASSERT_EQUAL(finished, resume);
            if (edits[i].says || !resume) said(&err, EXIT_USAGE, resume ? "--overwrite" : "is there already");
            const Text out = text_of(output), still = text_of(journal);
            CU_ASSERT(out.len == len && !memcmp(out.text, text, len));
            CU_ASSERT_STRING_EQUAL(still.text, left.text);
        }
    }
}

/* The head of another one, or of an older program, or none at all. */
TEST(a_finished_output_of_another_job_is_refused) {
    const Text left = ended_record();
    static const Fault heads[] = {
        {"\"--temperature\":0", "\"--temperature\":1", "its --temperature is 1, and here it is 0"},
        {",\"" JOURNAL_ENDED "\":\"", ",\"other\":\"", NULL}, /* it has not ended */
        {"journal 2", "journal 1", "is no journal of this version"},
        {NULL, NULL, "has no journal, so that nobody knows"}};
    for (size_t i = 0; i < COUNT(heads); i++) {
        read_four();
        options.resume = true;
        write_file(suite_dir(), "out", whole.text, whole.len);
        if (heads[i].from) {
            write_file(suite_dir(), "out.journal", left.text, left.len);
            spoil(suite_dir(), "out.journal", heads[i].from, heads[i].to);
        }
        CU_ASSERT_EQUAL(start(), !heads[i].says);
        if (heads[i].says) said(&err, EXIT_USAGE, heads[i].says);
        if (runs) end_as(-1);
    }
}

/* Its user has removed it. */
TEST(an_output_that_was_removed_is_made_anew) {
    const Text left = ended_record();
    for (int way = 0; way < 3; way++) {
        read_four();
        options.resume = way == 1;
        options.overwrite = way == 2;
        write_file(suite_dir(), "out.journal", left.text, left.len);
        ASSERT_OK(!start());
        CU_ASSERT(!finished);
        ASSERT_OK(sweep(says, N));
        end();
        CU_ASSERT_STRING_EQUAL(text_of(output).text, whole.text);
    }
}

/* Somebody disturbs the output of a job between two sweeps. The job stops, and its journal stays: nothing is lost. The
 * thread meets the disturbance after a sweep, which a later sweep and the end report; or no sweep follows, and the thread
 * meets it when the job ends. */
TEST(an_output_that_is_disturbed_is_an_error_and_loses_nothing) {
    enum { PATIENCE = 10000 }; /* ms, until a sweep fails because the thread has failed */
    const char *aside = keep(xstrdup(in_dir(suite_dir(), "aside")));
    make_whole_job();
    for (int i = 0; i < 8; i++) {
        const int way = i / 2;
        const bool swept = i % 2;
        int status = 0;
        const char *why = way ? "was changed while the job wrote it: " : "; go on with --resume";
        read_four();
        CU_ASSERT_FATAL(start());
        ASSERT_OK(sweep(says, 3));
        write_file(suite_dir(), way == 2 ? "out" : "aside", "somebody else's\n", 16);
        CHECK((way == 0 ? unlink(output) : way == 1 ? rename(aside, output) : way == 3 ? truncate(output, 1) : 0) == 0);
        for (int ms = 0; swept && !status && ms < PATIENCE; ms++) {
            usleep(1000);
            status = sweep(says, N);
        }
        CU_ASSERT_EQUAL(status, swept ? -1 : 0);
        if (swept) said(&err, EXIT_FAILED, why);
        while (give_tokens(says)) continue;
        CU_ASSERT_EQUAL(end_as(0), -1);
        said(&err, EXIT_FAILED, why);
        drop();
        const Text left = text_of(journal);
        assert_goes_on(left.text, left.len, "", 0);
    }
}

/* Whatever lies at the journal's name when a job ends is replaced only if it is the journal. */
TEST(what_replaced_a_journal_is_not_replaced_at_its_end) {
    begin("p\n");
    CHECK(unlink(journal) == 0);
    write_file(suite_dir(), "out.journal", "mine", 4);
    ASSERT_OK(sweep(says, N));
    ASSERT_OK(end_as(0));
    CU_ASSERT_STRING_EQUAL(text_of(journal).text, "mine");
}

/* By one name, by a link of either kind, and beside a journal that is not there any more. The lock dies with its owner. */
TEST(two_jobs_never_share_an_output) {
    char other[420];
    snprintf(other, sizeof other, "%s/name", suite_dir());
    for (int way = 0; way < 4; way++) {
        begin("p\n");
        CHECK((way == 0 ? symlink("out", other) : way == 1 ? link(output, other) : way == 2 ? unlink(journal) : 0) == 0);
        Job none = {.config = &config};
        const Options same = {.output = way < 2 ? other : output, .overwrite = true};
        Completions *second = completions_open(&none, &same, &err);
        CU_ASSERT_FATAL(!second || completions_begin(second, head, &err));
        CU_ASSERT_PTR_NOT_NULL(strstr(err.text, way % 3 == 0 ? "out.journal" : "--output")); /* a link leads to the one */
        said(&err, EXIT_USAGE, "another job is writing there");
        completions_free(second);
        CU_ASSERT(way == 2 || is_there(journal)); /* the first one's is still there */
        CU_ASSERT_EQUAL(end_as(-1), -1);
        drop();
        second = completions_open(&none, &same, &err);
        CU_ASSERT_PTR_NOT_NULL(second);
        completions_free(second);
        if (way < 2) CHECK(unlink(other) == 0);
    }
}

/* In this program instead of libc's. */
static int rename_error;
int rename(const char *from, const char *to) {
    return rename_error ? errno = rename_error, -1 : renameat(AT_FDCWD, from, AT_FDCWD, to);
}

static const char *unwritten; /* the path of a file; NULL: all can be written */
static size_t written;        /* bytes, in all files */
/* In this program instead of libc's: fails for one file where it is told to. */
ssize_t pwrite(int fd, const void *from, size_t size, off_t at) {
    struct stat file, other;
    if (unwritten && !fstat(fd, &file) && !stat(unwritten, &other) && file.st_ino == other.st_ino) return errno = EIO, -1;
    written += size;
    return pwritev(fd, &(struct iovec){(void *)from, size}, 1, at);
}

/* In this program instead of libc's: syncs nothing, but notes how much of a file would be on the disk, and fails for one
 * where it is told to. */
static struct {
    off_t journal, output; /* bytes */
    bool ahead;            /* the output was synced when the journal was not, whole */
    const char *fails;     /* the file's path; NULL: none */
} synced;

int fdatasync(int fd) {
    struct stat file, record_file = {0};
    CHECK(!fstat(fd, &file));
    stat(journal, &record_file);
    const bool is_journal = file.st_ino == record_file.st_ino;
    if (synced.fails == (is_journal ? journal : output)) return errno = EIO, -1;
    if (!is_journal) synced.ahead |= synced.journal != record_file.st_size;
    *(is_journal ? &synced.journal : &synced.output) = file.st_size;
    return 0;
}

/* The journal first: what is lost of it would be lost of the output. */
TEST(a_job_ends_when_its_journal_and_then_its_output_are_on_the_disk) {
    memset(&synced, 0, sizeof synced);
    begin("p\n");
    const off_t head_size = (off_t)text_of(journal).len;
    CU_ASSERT(head_size > 0 && synced.journal == head_size);
    ASSERT_OK(sweep(says, N));
    end();
    CU_ASSERT(synced.journal > head_size && !synced.ahead);
    CU_ASSERT(synced.output > 0 && synced.output == (off_t)text_of(output).len);
}

/* No sweep follows the tokens, so that only the end of the job can meet the error. */
TEST(what_cannot_be_written_synced_or_replaced_at_the_end_is_an_error_of_the_job) {
    static const struct {
        const char *unwritten, *unsynced, *says; /* both NULL: the journal is not replaced */
    } cases[] = {{journal, NULL, "out.journal: cannot write: Input/output error"},
                 {output, NULL, "/out: Input/output error"},
                 {NULL, journal, "out.journal: cannot write: Input/output error"},
                 {NULL, output, "/out: Input/output error"},
                 {NULL, NULL, "out.journal: Input/output error"}};
    for (size_t i = 0; i < COUNT(cases); i++) {
        begin("p\n");
        unwritten = cases[i].unwritten;
        synced.fails = cases[i].unsynced;
        while (give_tokens(says)) continue;
        rename_error = unwritten || synced.fails ? 0 : EIO;
        CU_ASSERT_EQUAL(end_as(0), -1);
        said(&err, EXIT_FAILED, cases[i].says);
        unwritten = synced.fails = NULL;
        rename_error = 0;
        drop();
        CU_ASSERT(!strstr(text_of(journal).text, JOURNAL_ENDED)); /* it can still go on */
    }
}

/* When a sync has failed, the kernel may keep what was written, and forget that the disk lacks it. So a job that goes on
 * writes all that it goes on from again. */
TEST(what_may_be_in_memory_only_is_written_again) {
    make_whole_job();
    read_four();
    options.resume = true;
    write_file(suite_dir(), "out", whole.text, whole.len);
    write_file(suite_dir(), "out.journal", record.text, record.len);
    memset(&synced, 0, sizeof synced);
    written = 0;
    CU_ASSERT_FATAL(start());
    CU_ASSERT_EQUAL(written, whole.len + record.len);
    CU_ASSERT_EQUAL(synced.journal, (off_t)record.len);
    ASSERT_OK(end_as(0));
    CU_ASSERT_EQUAL(synced.output, (off_t)whole.len);
}

/* A link at the journal's name leads nowhere, or to a file of somebody else. */
TEST(a_link_in_the_place_of_a_journal_is_not_followed) {
    const char *other = in_dir(suite_dir(), "other");
    for (int there = 0; there < 2; there++) {
        read_prompts("p\n");
        if (there) write_file(suite_dir(), "other", "", 0);
        CHECK(!symlink("other", journal));
        CU_ASSERT_FALSE(start());
        said(&err, EXIT_FAILED, "out.journal: cannot open");
        CU_ASSERT(is_there(other) == there && !is_there(output));
        CHECK(!unlink(journal));
    }
}

/* On a disk that is full anywhere within them, journal and output stay good: no line is cut, and the job can go on. */
TEST(a_full_disk_cuts_no_line) {
    make_whole_job();
    host_set_threads(1); /* ThreadSanitizer lets a child start threads only if its parent had none */
    for (rlim_t room = 100; room < record.len || room < whole.len; room += 41) {
        int status;
        read_four();
        pid_t pid = fork();
        if (!pid) { /* a limit on file sizes is the same to a file as a full disk */
            signal(SIGXFSZ, SIG_IGN);
            setrlimit(RLIMIT_FSIZE, &(struct rlimit){room, room});
            start();
            sweep(says, N);
            _exit(end_as(0) && strstr(err.text, "File too large") ? 0 : 1);
        }
        CU_ASSERT(waitpid(pid, &status, 0) == pid && status == 0);
        const Text part = text_of(output), left = text_of(journal);
        CU_ASSERT(part.len <= whole.len && !memcmp(part.text, whole.text, part.len));
        CU_ASSERT(!part.len || part.text[part.len - 1] == '\n');
        assert_goes_on(left.text, left.len, part.text, part.len);
    }
}

// ---- Progress -------------------------------------------------------------------------------------------------------

TEST(the_remaining_time_is_known_early) {
    static const struct {
        Progress run;
        double swept[3][2], left; /* rows and seconds of each sweep, of which the first is a prefill */
    } cases[] = {
        /* 50 prompts of 20 tokens and 99 more: a sweep takes .3 s and .01 s a row */
        {{.sweeps = 100, .work = 50 * 20 + 99 * 50}, {{1000, 10.3}, {50, .8}, {50, .8}}, 97 * .8},
        /* two more sweeps of together 60 rows: rows take all of the time */
        {{.sweeps = 4, .work = 90}, {{10, 1}, {20, 4}}, 60 * 5. / 30},
        /* or none, and not less than nothing */
        {{.sweeps = 4, .work = 90}, {{10, 4}, {20, 1}}, 2 * 5. / 2},
    };
    for (size_t c = 0; c < COUNT(cases); c++) {
        Progress p = cases[c].run;
        RunStats stats = {0};
        for (int i = 0; i < 3 && cases[c].swept[i][1] > 0; i++) {
            *(i ? &stats.decoded : &stats.prefill_tokens) += (long)cases[c].swept[i][0];
            stats.total_s += cases[c].swept[i][1];
            progress_show(&p, &stats, 0);
        }
        CU_ASSERT_DOUBLE_EQUAL(progress_left(&p), cases[c].left, 1e-9);
    }
}

static int show_sweep(void *progress, const RunStats *stats, Error *unused) {
    (void)unused;
    progress_show(progress, stats, stats->generated);
    return 0;
}

/* What a call of progress_show writes to standard error. */
static const char *shown_by(Progress *p, const RunStats *stats, long tokens) {
    const char *path = in_dir(suite_dir(), "shown");
    const int before = dup(STDERR_FILENO), file = open(path, O_CREAT | O_TRUNC | O_WRONLY, 0666);
    CHECK(before >= 0 && file >= 0 && dup2(file, STDERR_FILENO) >= 0);
    progress_show(p, stats, tokens);
    CHECK(dup2(before, STDERR_FILENO) >= 0 && !close(before) && !close(file));
    return text_of(path).text;
}

/* Where there is a terminal the line replaces the one before it; else each is a line, which has the sequences too. */
TEST(progress_is_a_line_a_minute_where_there_is_no_terminal) {
    const RunStats stats = {.total_s = 2, .sweeps = 3, .prefill_tokens = 10, .decoded = 20, .ended = 1};
    Progress p = {.sweeps = 4, .work = 40, .count = 2, .tokens = 50};
    CU_ASSERT_STRING_EQUAL(shown_by(&p, &stats, 30), ""); /* never, as nobody has said how often */
    p.every = 1e-9;
    CU_ASSERT_STRING_EQUAL(shown_by(&p, &stats, 30),
                           "1 of 2 sequences, 3 sweeps, 30 of at most 50 tokens, 15.0 tokens/s, at most 1 s left\n");
    p.every = 1e9;
    CU_ASSERT_STRING_EQUAL(shown_by(&p, &stats, 30), "");
    p.every = 1e-9, p.on = true;
    CU_ASSERT(
        shows(shown_by(&p, &stats, 30), "\r3 sweeps, 30 of at most 50 tokens, 15.0 tokens/s, at most 1 s left\033[K"));
}

/* The work that is announced before a run is what its sweeps come to, and then nothing is left of it. */
TEST(the_work_of_a_run_is_known_before_it) {
    enum { PROMPTS = 7 };
    static const int s[PROMPTS] = {5, 7, 9, 11, 13, 15, 17}, n[PROMPTS] = {1, 4, 7, 3, 6, 2, 5};
    OptConfig small = SMALL_CONFIG(-1);
    const Hardware fast = machine_with("");
    Checkpoint *model = checkpoint_dummy(&small, 0);
    Task task = random_task(PROMPTS, s, n, small.vocab, 0);
    Progress progress = {.on = false}, *p = &progress;
    Rig r = {
        .model = model, .policy = all_gpu(2, 2), .task = &task, .sim = &fast, .hears = {.ctx = p, .sweep = show_sweep}};
    CU_ASSERT_EQUAL_FATAL(rig_open(&r), 0);
    progress_open(p, r.plan, &task);
    CU_ASSERT(p->tokens == 28 && p->count == PROMPTS && p->every == (p->on ? 0.2 : 60));
    CU_ASSERT_EQUAL_FATAL(rig_run(&r), 0);
    CU_ASSERT(r.stats.ended == PROMPTS && r.stats.sweeps > PROMPTS && p->sweeps == (double)r.stats.sweeps);
    CU_ASSERT_DOUBLE_EQUAL(p->w, p->work, 1e-9 * p->work);
    CU_ASSERT_DOUBLE_EQUAL(progress_left(p), 0, 1e-9 * r.stats.total_s);
    rig_close(&r), checkpoint_close(model), free_task(&task);
}
