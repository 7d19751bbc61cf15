/* test_completions.c: what becomes of a job. Its lines are read back as strict JSON, and it goes on from every byte of its
 * journal and of its output. test_job.c has how prompts come in, test_cli.c what the program does when it is stopped, and
 * test_faults.c what it does when memory runs out. The pieces are those of tests/golden/tokenizer, where a character such
 * as an emoji is several tokens. */
#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "started.h"
#include "written.h"

#define PIECES "tests/golden/tokenizer"
#define HEAD "{\"" JOURNAL_VERSION "\":true"
enum { VOCAB = 1024, POSITIONS = 2048, N = 1000 };

static const OptConfig config = {.vocab = VOCAB, .max_pos = POSITIONS, .eos = 2};
static Tokenizer *tokenizer;
static Error err;
static char dir[300], output[400], journal[420]; /* paths */

/* A job that was begun; it stays where it is. */
typedef struct {
    Job job;
    Options o;
    Completions *c; /* NULL: refused */
    bool finished;
} Work;

/* Makes output and journal what an earlier run has left; NULL: they are not there. */
static void leave(const char *out, size_t out_len, const char *record, size_t record_len) {
    unlink(output), unlink(journal);
    if (out) write_file(dir, "out", out, out_len);
    if (record) write_file(dir, "out.journal", record, record_len);
}

static void read_prompts(Work *w, const char *lines) {
    *w = (Work){.o = {.output = output}};
    if (!dir[0]) {
        snprintf(dir, sizeof dir, "%s", temp_dir());
        snprintf(output, sizeof output, "%s/out", dir);
        snprintf(journal, sizeof journal, "%s.journal", output);
        tokenizer = tokenizer_open(PIECES, VOCAB, &err);
        ASSERT_OK(!tokenizer);
    }
    w->job = (Job){.config = &config, .max_tokens = N, .tokenizer = tokenizer};
    write_file(dir, "prompts", lines, strlen(lines));
    ASSERT_OK(job_read(&w->job, in_dir(dir, "prompts"), &err));
    leave(NULL, 0, NULL, 0);
}

/* Opens the output, goes on with what is there, and begins. False: refused. */
static bool start(Work *w) {
    cJSON *head = cJSON_Parse(HEAD ",\"--temperature\":0}");
    w->c = completions_open(&w->job, &w->o, &err);
    int status = w->c ? completions_resume(w->c, head, &w->finished, &err) : -1;
    if (!status && !w->finished) {
        job_rest(&w->job);
        status = completions_begin(w->c, head, &err);
    }
    cJSON_Delete(head);
    if (!status) return true;
    completions_free(w->c), w->c = NULL;
    return false;
}

static void begin(Work *w, const char *lines) {
    read_prompts(w, lines);
    CU_ASSERT_FATAL(start(w));
}

static bool is_there(const char *path) { return !access(path, F_OK); }

static void drop(Work *w) { completions_free(w->c), job_free(&w->job); }

static void end(Work *w) {
    ASSERT_OK(completions_end(w->c, 0, &err));
    drop(w);
}

/* One sweep: every prompt that has not ended gets the next of its tokens, texts[place] being what it is to say. False when
 * all have ended. */
static bool give_tokens(Work *w, const char *const *texts) {
    const Listener listener = completions_listener(w->c);
    bool more = false;
    for (int p = 0; p < w->job.task.count; p++) {
        const int place = w->job.task.prompts[p].place;
        const Request *r = &w->job.request[place];
        int32_t *ids;
        const int n = tokenizer_encode(tokenizer, texts[place], strlen(texts[place]), &ids, &err);
        if (!r->ended) {
            const int32_t token = r->known < n ? ids[r->known] : config.eos;
            const bool stopped = listener.token(listener.ctx, p, &token, 1); /* the newest is all that it looks at */
            CU_ASSERT_EQUAL(stopped, r->stopped);
            more = more || !r->ended;
        }
        free(ids);
    }
    return more;
}

/* Sweeps, at most so many. */
static void sweep(Work *w, const char *const *texts, int most) {
    const Listener listener = completions_listener(w->c);
    const RunStats stats = {.total_s = 1};
    for (bool more = true; more && most > 0; most--) {
        more = give_tokens(w, texts);
        ASSERT_OK(listener.sweep(listener.ctx, &stats, &err));
    }
}

/* Gives a job of one prompt these tokens, until it ends. */
static void give_ids(Work *w, const int32_t *ids, int n) {
    const Listener listener = completions_listener(w->c);
    for (int i = 0; i < n; i++) CU_ASSERT_EQUAL(listener.token(listener.ctx, 0, ids + i, 1), w->job.request[0].stopped);
}

/* The job stops with an error of this sort; its journal stays. */
static void fail_to_end(Work *w, const char *says) {
    CU_ASSERT_EQUAL(completions_end(w->c, 0, &err), -1);
    said(&err, EXIT_FAILED, says);
    drop(w);
    CU_ASSERT(is_there(journal)); /* it can still go on */
}

static Text text_of(const char *path) {
    Text t;
    t.text = contents(path, &t.len);
    return t;
}

/* Whether a file is this text; NULL: whether it is not there. */
static bool holds(const char *path, const char *text, size_t len) {
    if (!text) return !is_there(path);
    const Text there = text_of(path);
    const bool same = there.len == len && !memcmp(there.text, text, len);
    free(there.text);
    return same;
}

/* The output of a job of one prompt that says this text. */
static Text written(const char *prompt, const char *text, const Texts *stop) {
    Work w;
    read_prompts(&w, prompt);
    if (stop) w.o.stop = *stop;
    CU_ASSERT_FATAL(start(&w));
    sweep(&w, &text, N);
    end(&w);
    CU_ASSERT(!is_there(journal));
    return text_of(output);
}

static bool begins(const char *text, const char *prefix) { return !strncmp(text, prefix, strlen(prefix)); }

/* The completion of text under a stop text, or two; its tokens make it, and no shorter ones do. */
static void assert_completion(const char *text, const char *const stops[2], const char *expected) {
    const Texts stop = {.text = (char **)stops, .n = !stops ? 0 : stops[1] ? 2 : 1};
    size_t size;
    int32_t ids[N];
    int n = 0;
    Text line = written("a prompt", text, &stop);
    CU_ASSERT(line.len && memchr(line.text, '\n', line.len) == line.text + line.len - 1); /* one line */
    cJSON *json = json_parse(line.text, line.len, &err);
    ASSERT_OK(!json);
    CU_ASSERT_STRING_EQUAL(cJSON_GetStringValue(json_get(json, "completion")), expected);
    CU_ASSERT_STRING_EQUAL(cJSON_GetStringValue(json_get(json, "finish_reason")), "stop");
    for (const cJSON *id = json_get(json, "tokens")->child; id; id = id->next) ids[n++] = id->valueint;
    char *made = tokenizer_decode(tokenizer, ids, n, &size), *less = tokenizer_decode(tokenizer, ids, n ? n - 1 : 0, &size);
    CU_ASSERT(begins(made, expected) && (!stops || !n || !begins(less, expected)));
    free(made), free(less), free(line.text);
    cJSON_Delete(json);
}

TEST(a_completion_has_exactly_its_five_fields) {
    Text line = written("{\"id\": \"\\\"x\\n\", \"prompt\": \"T\\\"\\\\\\t\\u0001\\u007f\\ud83d\\ude00\"}\n", " two", NULL);
    CU_ASSERT(begins(line.text,
                     "{\"id\": \"\\\"x\\n\", \"prompt\": \"T\\\"\\\\\\t\\u0001\\u007f\xF0\x9F\x98\x80\", "
                     "\"completion\": \" two\", \"tokens\": ["));
    CU_ASSERT(shows(line.text, "\"tokens\": [ ... ], \"finish_reason\": \"stop\"}\n"));
    free(line.text);
}

TEST(every_character_of_a_completion_survives) {
    char text[300];
    for (int c = 1; c < 128; c++) text[c - 1] = (char)c;
    strcpy(text + 127, "\"\\/ \xC3\xA9 \xE2\x80\xA8 \xF0\x9F\x98\x80 \xF4\x8F\xBF\xBF \xEF\xBF\xBD");
    assert_completion(text, NULL, text);
}

/* \u0000 is JSON, but json_parse refuses it, so the bytes are looked at. */
TEST(a_nul_byte_in_a_completion_is_escaped) {
    const char text[] = {'a', 0, 'b'};
    int32_t *ids;
    Work w;
    begin(&w, "p");
    give_ids(&w, ids, tokenizer_encode(tokenizer, text, 3, &ids, &err));
    give_ids(&w, &config.eos, 1);
    end(&w);
    Text line = text_of(output);
    CU_ASSERT_PTR_NOT_NULL(strstr(line.text, "\"completion\": \"a\\u0000b\""));
    free(line.text), free(ids);
}

#define A "\xF0\x9F\xA6\x95" /* characters of several tokens */
#define B "\xF0\x9F\xA6\x96"

TEST(the_first_stop_text_cuts_the_completion) {
    static const struct {
        const char *text, *stops[2], *expected;
    } cases[] = {
        {"one two three two", {"two"}, "one "},
        {"one two three", {"three", "two"}, "one "},
        {"one two three", {"two", "wo"}, "one "},
        {"one two three", {"wo", "two"}, "one "},
        {"one two three", {"four"}, "one two three"},
        {"one two", {"one two"}, ""},
        {"a\n\nb", {"\n\n"}, "a"},
        {"aab", {"ab"}, "a"},
        {A "." B, {"."}, A}, /* between characters, and of one */
        {"a" A "z" B "b", {B}, "a" A "z"},
        {A A A "!", {A "!"}, A A},
        {"The qzxj end. qzxk And more, much more of it.", {"qzxk"}, "The qzxj end. "},
    };
    for (size_t i = 0; i < COUNT(cases); i++) assert_completion(cases[i].text, cases[i].stops, cases[i].expected);
    int32_t *ids;
    CU_ASSERT(tokenizer_encode(tokenizer, "qzxk", 4, &ids, &err) > 1); /* or the last of them would say nothing */
    free(ids);
}

/* A long completion whose stop text is longer than any token: the window of on_token must reach back far enough. */
TEST(a_long_stop_text_far_into_a_completion_is_found) {
    static const char *const stop[2] = {A B A B " qqzzqqzzqqzz"};
    char text[2000] = "";
    for (int i = 0; i < 60; i++) strcat(text, A " x ");
    char *expected = xstrdup(text);
    strcat(strcat(text, stop[0]), " and what is never made");
    assert_completion(text, stop, expected);
    free(expected);
}

/* "xab" with so many special tokens inside the stop text "ab". Behind more of them than a window holds it is not seen while
 * tokens come, and the completion reaches its length; that is then not why it ends where it does. */
TEST(a_stop_text_with_special_tokens_inside_cuts_the_completion) {
    enum { MOST = 40, PAD = 1 };
    bool seen_early = false, seen_late = false;
    for (int pads = 0; pads < MOST - 2; pads += 4) {
        char expected[100];
        int32_t *ids;
        Work w;
        read_prompts(&w, "{\"id\": 0, \"prompt\": \"p\", \"max_tokens\": 40}");
        char *stop = "ab";
        w.o.stop = (Texts){&stop, 1};
        CU_ASSERT_FATAL(start(&w));
        CU_ASSERT_EQUAL_FATAL(tokenizer_encode(tokenizer, "x\na\nb", 5, &ids, &err), 5);
        int32_t chosen[MOST];
        for (int i = 0; i < MOST; i++)
            chosen[i] = i == 1 ? ids[2] : i == 2 + pads ? ids[4] : i > 1 && i < 2 + pads ? PAD : *ids;
        for (int i = 0; !w.job.request[0].ended; i++) give_ids(&w, chosen + i, 1);
        seen_early |= w.job.request[0].known < MOST, seen_late |= w.job.request[0].known == MOST;
        end(&w);
        Text line = text_of(output);
        snprintf(expected, sizeof expected, "\"completion\": \"x\", \"tokens\": [%d], \"finish_reason\": \"stop\"}\n",
                 *ids);
        CU_ASSERT_PTR_NOT_NULL(strstr(line.text, expected));
        free(line.text), free(ids);
    }
    CU_ASSERT(seen_early && seen_late);
}

// ---------------------------------------------------------------------------------------------------------------
// Journals
// ---------------------------------------------------------------------------------------------------------------

static const char *const says[] = {" a b c d e f g h i j", " x", "", " 1 2 3 4 5 6"};
static Text whole, record; /* the output of the job below, and its journal before the end */
static size_t head_len;    /* of that journal's first line */
static long whole_tokens;  /* in the lines */

/* A job of four prompts, of which the third is impossible. */
static void read_four(Work *w) {
    static char *stop = "5";
    read_prompts(w, "one\ntwo\nno\xFFthree\nfour\n");
    w->o.stop = (Texts){&stop, 1};
}

static void make_whole_job(void) {
    Work w;
    if (whole.text) return;
    read_four(&w);
    CU_ASSERT_FATAL(start(&w));
    sweep(&w, says, N);
    CU_ASSERT_EQUAL(completions_end(w.c, -1, &err), -1); /* as if it had failed after all, so that the journal stays */
    whole_tokens = completions_tokens(w.c);
    drop(&w);
    record = text_of(journal), whole = text_of(output);
    head_len = (size_t)(strchr(record.text, '\n') - record.text) + 1;
}

/* Goes on with so many bytes of a journal and of an output. The job ends as if it had not been broken. */
static void assert_goes_on(const char *left, size_t left_len, const char *out, size_t len) {
    Work w;
    read_four(&w);
    w.o.resume = true;
    leave(out, len, left, left_len);
    ASSERT_OK(!start(&w));
    sweep(&w, says, N);
    ASSERT_OK(completions_end(w.c, 0, &err));
    CU_ASSERT_EQUAL(completions_tokens(w.c), whole_tokens); /* of lines that were there, were cut and are new */
    drop(&w);
    CU_ASSERT(holds(output, whole.text, whole.len) && !is_there(journal));
}

/* One that was killed while it wrote its journal's first line had done nothing: it begins anew. */
TEST(a_job_goes_on_from_any_byte_of_its_journal_and_output) {
    make_whole_job();
    for (size_t cut = 0; cut < head_len; cut++) assert_goes_on(record.text, cut, "", 0);
    for (size_t cut = head_len; cut <= record.len; cut++)
        assert_goes_on(record.text, cut, whole.text, cut * 31 % (whole.len + 1));
    for (size_t cut = 0; cut <= whole.len; cut += 3) assert_goes_on(record.text, record.len, whole.text, cut);
}

/* From the first to the last of the vocabulary. */
TEST(a_job_goes_on_with_any_token) {
    static const int32_t ids[] = {0, VOCAB - 1};
    Work w;
    begin(&w, "p\n");
    give_ids(&w, ids, 2);
    CU_ASSERT_EQUAL(completions_end(w.c, -1, &err), -1);
    drop(&w);
    const Text left = text_of(journal);
    read_prompts(&w, "p\n");
    w.o.resume = true;
    leave("", 0, left.text, left.len);
    CU_ASSERT_FATAL(start(&w));
    CU_ASSERT(w.job.request[0].known == 2 && !w.job.request[0].ended);
    give_ids(&w, &config.eos, 1);
    end(&w);
    free(left.text);
}

/* After a loss of power a file may be as long as it was and end in zeros. */
TEST(zeros_at_the_end_of_an_output_never_reached_the_disk) {
    make_whole_job();
    char *part = xcalloc(whole.len + 4096, 1);
    for (size_t there = 0; there <= whole.len; there += 7) {
        memcpy(part, whole.text, there);
        assert_goes_on(record.text, record.len, part, whole.len);
        assert_goes_on(record.text, record.len, part, whole.len + 4096);
    }
    free(part);
}

/* Whatever has become of a token, those behind it are not used. */
TEST(a_damaged_journal_never_makes_a_wrong_output) {
    make_whole_job();
    for (size_t at = head_len; at < record.len; at++) {
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
         "has no journal and only 1 of the 2 lines of this job; bring back "},
        {"p\n", "{\"id\": 0, \"prompt\": \"p\", \"completion\": \"\"", NULL, true, "has no journal"},
        {"p\n", NULL, HEAD ",\"--temperature\":1}\n", true, "its --temperature is 1, and here it is 0"},
        {"p\n", NULL, HEAD "}\n", true, "its --temperature is missing"},
        {"p\n", NULL, "dear diary", false, "is no journal"},
        {"p\n", NULL, "{}\n", true, "is no journal"},
        {"p\n", NULL, "{\"" JOURNAL_VERSION "\": [\n", true, "is no journal"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        const char *out = cases[i].out, *left = cases[i].journal;
        const size_t out_len = out ? strlen(out) : 0, left_len = left ? strlen(left) : 0;
        Work w;
        read_prompts(&w, cases[i].prompts);
        w.o.resume = cases[i].resume;
        leave(out, out_len, left, left_len);
        CU_ASSERT_FALSE_FATAL(start(&w));
        said(&err, EXIT_USAGE, cases[i].said);
        CU_ASSERT(holds(output, out, out_len) && holds(journal, left, left_len)); /* nothing has changed */
        job_free(&w.job);
    }
}

/* With its journal a byte of them is another; without it they are all there, and nothing is left to do. */
TEST(lines_that_are_not_the_journals_are_refused) {
    make_whole_job();
    for (int ended = 0; ended < 2; ended++) {
        Work w;
        read_four(&w);
        w.o.resume = true;
        whole.text[whole.len / 2] ^= !ended;
        leave(whole.text, whole.len, ended ? NULL : record.text, record.len);
        CU_ASSERT(start(&w) == ended && w.finished == ended && holds(output, whole.text, whole.len));
        CU_ASSERT(ended || !strstr(err.text, "--overwrite")); /* or it is lost */
        if (!ended) said(&err, EXIT_USAGE, "; move the output away, and --resume writes it anew");
        whole.text[whole.len / 2] ^= !ended;
        drop(&w);
        CU_ASSERT(is_there(journal) == !ended);
    }
    assert_goes_on(record.text, record.len, "", 0);
}

/* A job whose output somebody disturbs between two sweeps stops, and its journal stays: nothing is lost. */
TEST(an_output_that_is_disturbed_is_an_error_and_loses_nothing) {
    make_whole_job();
    for (int way = 0; way < 4; way++) {
        Work w;
        read_four(&w);
        CU_ASSERT_FATAL(start(&w));
        sweep(&w, says, 3);
        if (way == 1) write_file(dir, "aside", "", 0);
        if (way == 2) write_file(dir, "out", "somebody else's\n", 16);
        const char *aside = in_dir(dir, "aside");
        CHECK((way == 0 ? unlink(output) : way == 1 ? rename(aside, output) : way == 3 ? truncate(output, 1) : 0) == 0);
        while (give_tokens(&w, says)) continue;
        fail_to_end(&w, way ? "was changed while the job wrote it: " : "; go on with --resume");
        const Text left = text_of(journal);
        assert_goes_on(left.text, left.len, "", 0);
        free(left.text);
    }
}

/* Whatever lies at the journal's name when a job ends is removed only if it is the journal. */
TEST(what_replaced_a_journal_is_not_removed_with_it) {
    Work w;
    begin(&w, "p\n");
    CHECK(unlink(journal) == 0);
    write_file(dir, "out.journal", "mine", 4);
    sweep(&w, says, N);
    end(&w);
    CU_ASSERT(holds(journal, "mine", 4));
}

/* By one name, by a link of either kind, and beside a journal that is not there any more. The lock dies with its owner. */
TEST(two_jobs_never_share_an_output) {
    char other[420];
    snprintf(other, sizeof other, "%s/name", dir);
    for (int way = 0; way < 4; way++) {
        Work w, second;
        read_prompts(&second, "p\n");
        begin(&w, "p\n");
        CHECK((way == 0 ? symlink("out", other) : way == 1 ? link(output, other) : way == 2 ? unlink(journal) : 0) == 0);
        second.o.output = way < 2 ? other : output, second.o.overwrite = true;
        CU_ASSERT_FALSE(start(&second));
        CU_ASSERT_PTR_NOT_NULL(strstr(err.text, way % 3 == 0 ? "out.journal" : "--output")); /* a link leads to the one */
        said(&err, EXIT_USAGE, "another job is writing there");
        CU_ASSERT(way == 2 || is_there(journal)); /* the first one's is still there */
        CU_ASSERT_EQUAL(completions_end(w.c, -1, &err), -1);
        drop(&w);
        second.c = completions_open(&second.job, &second.o, &err);
        CU_ASSERT_PTR_NOT_NULL(second.c);
        drop(&second);
        if (way < 2) CHECK(unlink(other) == 0);
    }
}

/* Another process has the lock, and ends soon. */
TEST(a_job_goes_on_as_soon_as_the_one_before_has_ended) {
    int status;
    Work w;
    read_prompts(&w, "p\n");
    w.o.resume = true;
    const int fd = open(journal, O_RDWR | O_CREAT, 0600);
    CHECK(fd >= 0 && !flock(fd, LOCK_EX));
    const pid_t pid = fork();
    if (!pid) {
        usleep(200000);
        _exit(0);
    }
    close(fd); /* the lock is the child's now */
    ASSERT_OK(!start(&w));
    CU_ASSERT(waitpid(pid, &status, WNOHANG) == pid && status == 0);
    end(&w);
}

/* In this program instead of libc's. */
static int unlink_error;
int unlink(const char *path) { return unlink_error ? errno = unlink_error, -1 : unlinkat(AT_FDCWD, path, 0); }

/* In this program instead of libc's: syncs nothing, but notes how much of a file would be on the disk, and fails for one
 * where it is told to. */
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
    return 0;
}

/* The journal first: what is lost of it would be lost of the output. */
TEST(a_job_ends_when_its_journal_and_then_its_output_are_on_the_disk) {
    Work w;
    memset(&synced, 0, sizeof synced);
    begin(&w, "p\n");
    const off_t head_size = size_of(journal);
    CU_ASSERT(head_size > 0 && synced.journal == head_size);
    sweep(&w, says, N);
    end(&w);
    CU_ASSERT(synced.journal > head_size && !synced.ahead);
    CU_ASSERT(synced.output > 0 && synced.output == size_of(output));
}

TEST(what_cannot_be_synced_or_removed_is_an_error_of_the_job) {
    static const char *const refusal[] = {"out.journal: cannot write: Input/output error", "/out: Input/output error",
                                          "out.journal: cannot remove: Input/output error"};
    const char *const files[] = {journal, output, NULL};
    for (int f = 0; f < 3; f++) {
        Work w;
        begin(&w, "p\n");
        synced.fails = files[f];
        sweep(&w, says, N);
        unlink_error = files[f] ? 0 : EIO;
        fail_to_end(&w, refusal[f]);
        unlink_error = 0, synced.fails = NULL;
    }
}

/* On a disk that is full anywhere within them, journal and output stay good: no line is cut, and the job can go on. */
TEST(a_full_disk_cuts_no_line) {
    make_whole_job();
    host_set_threads(1); /* ThreadSanitizer lets a child start threads only if its parent had none */
    for (rlim_t room = 100; room < record.len || room < whole.len; room += 41) {
        int status;
        Work w;
        read_four(&w);
        pid_t pid = fork();
        if (!pid) { /* a limit on file sizes is the same to a file as a full disk */
            signal(SIGXFSZ, SIG_IGN);
            setrlimit(RLIMIT_FSIZE, &(struct rlimit){room, room});
            start(&w);
            const Listener listener = completions_listener(w.c);
            const RunStats stats = {.total_s = 1};
            while (give_tokens(&w, says)) listener.sweep(listener.ctx, &stats, &err);
            _exit(completions_end(w.c, 0, &err) && strstr(err.text, "File too large") ? 0 : 1);
        }
        CU_ASSERT(waitpid(pid, &status, 0) == pid && status == 0);
        const Text part = text_of(output), left = text_of(journal);
        CU_ASSERT(part.len <= whole.len && !memcmp(part.text, whole.text, part.len));
        CU_ASSERT(!part.len || part.text[part.len - 1] == '\n');
        assert_goes_on(left.text, left.len, part.text, part.len);
        free(part.text), free(left.text);
        job_free(&w.job);
    }
}

/* Returns what is left after n sweeps of so many rows and seconds, of which the first is a prefill. */
static double left_after(Progress p, const double swept[][2], int n) {
    RunStats stats = {0};
    for (int i = 0; i < n; i++) {
        *(i ? &stats.decoded : &stats.prefill_tokens) += (long)swept[i][0];
        stats.sweeps++, stats.total_s += swept[i][1];
        progress_show(&p, &stats, 0);
    }
    return progress_left(&p);
}

/* Of a prefill of 50 prompts of 20 tokens and 99 tokens each; a sweep takes .3 s and .01 s a row. Then of two sweeps of
 * together 60 rows behind others of 10 and 20: rows take all of the time, or none, and not less than nothing. */
TEST(the_remaining_time_is_known_early) {
    const Progress whole_run = {.sweeps = 100, .work = 50 * 20 + 99 * 50}, short_run = {.sweeps = 4, .work = 90};
    const double known[][2] = {{1000, 10.3}, {50, .8}, {50, .8}}, rising[][2] = {{10, 1}, {20, 4}},
                 falling[][2] = {{10, 4}, {20, 1}};
    CU_ASSERT_DOUBLE_EQUAL(left_after(whole_run, known, 3), 97 * .8, 1e-6);
    CU_ASSERT_DOUBLE_EQUAL(left_after(short_run, rising, 2), 60 * 5. / 30, 1e-9);
    CU_ASSERT_DOUBLE_EQUAL(left_after(short_run, falling, 2), 2 * 5. / 2, 1e-9);
}

static int show_sweep(void *ctx, const RunStats *stats, Error *error) {
    Progress *p = ctx;
    (void)error;
    progress_show(p, stats, 0);
    return 0;
}

/* The work that is announced before a run is what its sweeps come to, and then nothing is left of it. */
TEST(the_work_of_a_run_is_known_before_it) {
    enum { PROMPTS = 7 };
    static const int s[PROMPTS] = {5, 7, 9, 11, 13, 15, 17}, n[PROMPTS] = {1, 4, 7, 3, 6, 2, 5};
    OptConfig small = SMALL_CONFIG(-1);
    const Hardware fast = test_fast_machine();
    Checkpoint *model = checkpoint_dummy(&small, 0);
    Task task = random_task(PROMPTS, s, n, small.vocab, 0);
    Progress p = {.on = false};
    Rig r = {
        .model = model, .policy = all_gpu(2, 2), .task = &task, .sim = &fast, .hears = {.ctx = &p, .sweep = show_sweep}};
    CU_ASSERT_EQUAL_FATAL(rig_open(&r), 0);
    progress_open(&p, r.plan, &task);
    CU_ASSERT_EQUAL(p.tokens, 28);
    CU_ASSERT_EQUAL_FATAL(rig_run(&r), 0);
    CU_ASSERT(r.stats.sweeps > PROMPTS && p.sweeps == (double)r.stats.sweeps);
    CU_ASSERT_DOUBLE_EQUAL(p.w, p.work, 1e-9 * p.work);
    CU_ASSERT_DOUBLE_EQUAL(progress_left(&p), 0, 1e-9 * r.stats.total_s);
    rig_close(&r), checkpoint_close(model), free_task(&task);
}
