/* test_quantize.c: packed copies of checkpoints: what is in them, how they are laid out, what of them is refused, and that
 * nothing is left behind where there can be none. Random damage is fuzz.c's. How packing rounds is test_quant.c's, the
 * command line test_cli.c's, a full disk and whatever else fails test_faults.c's. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests.h"
#include "written.h"

#define TENSORS "model.safetensors"
#define PRE "tests/golden/opt-pre" /* three layers; embeddings and the final norm are a part of their own */
enum { LAYERS = 2, LAYER_0 = NGLOBALS, LAYER_1 = NGLOBALS + NROLES, WHOLE = 1 << 30 };

static CopyStats stats;
static Error err;

// ---- Sources and copies ---------------------------------------------------------------------------------------------

/* With projections and a head of its own. */
static const Model small = {
    {"small", LAYERS, 64, 128, 4, 70, 20, 24, true, true, 2, {0}, 0, 0, 1}, F16, "model.", .head = true, F16};

static bool with_head; /* tables are packed, too */

static int quantized(const char *from, const char *to, size_t shard_bytes) {
    host_set_threads(3);
    return checkpoint_quantize(&stats, from, to, shard_bytes, with_head, NULL, &err);
}

/* A packed copy in a fresh directory. */
static const char *copy_of(const char *from, size_t shard_bytes) {
    static char to[400];
    snprintf(to, sizeof to, "%s/copy", temp_dir());
    ASSERT_OK(quantized(from, to, shard_bytes));
    return to;
}

// ---- What is in a copy ----------------------------------------------------------------------------------------------

/* By checkpoint_fill and quant_pack_rows; and checkpoint_pack says the same of both, row by row of groups. */
static void same_matrix(const Checkpoint *from, const Tensor *w, const Checkpoint *copy, const Tensor *packed) {
    const size_t count = (size_t)w->cols * GROUP, size = (size_t)w->cols * GROUP_BYTES;
    f16 *numbers = xcalloc(count, sizeof *numbers);
    uint8_t *expected = xcalloc(size, 1), *bytes = xcalloc(size, 1);
    for (int g = 0; g < ceil_div(w->rows, GROUP); g++) {
        const size_t there = size_min(count, ((size_t)w->rows - g * GROUP) * w->cols);
        ASSERT_OK(checkpoint_fill(from, numbers, w, g * count, there, &err));
        for (size_t e = there; e < count; e++) numbers[e] = numbers[e - w->cols]; /* the last row, again */
        CU_ASSERT(quant_pack_rows(expected, numbers, w->cols));
        for (int copied = 0; copied < 2; copied++) {
            memset(bytes, 1, size);
            ASSERT_OK(checkpoint_pack(copied ? copy : from, bytes, numbers, copied ? packed : w, g, &err));
            CU_ASSERT_EQUAL(memcmp(bytes, expected, size), 0);
        }
    }
    free(numbers);
    free(expected);
    free(bytes);
}

static void is_packed_copy(const char *to, const char *from) {
    Checkpoint *source = opens(from), *copy = opens(to);
    CU_ASSERT(copy->packed && !source->packed);
    for (int t = 0; t < part_count(&source->config); t++) {
        const Part part = checkpoint_part(source, t);
        const Tensor *a = part.tensor, *b = checkpoint_part(copy, t).tensor;
        const bool packs = part.matrix || (part.table && with_head);
        CU_ASSERT_EQUAL_FATAL(b->rows, packs ? ceil_div(a->rows, GROUP) : a->rows);
        if (!b->rows) continue;
        CU_ASSERT_FATAL(b->type == (packs ? U8 : F16) && b->cols == a->cols * (packs ? GROUP_BYTES : 1));
        if (packs) {
            same_matrix(source, a, copy, b);
            continue;
        }
        float *numbers = checkpoint_floats(source, a, &err), *same = checkpoint_floats(copy, b, &err);
        CU_ASSERT(numbers && same && !memcmp(numbers, same, (size_t)a->rows * a->cols * sizeof *same));
        free(numbers);
        free(same);
    }
    checkpoint_close(source);
    checkpoint_close(copy);
}

TEST(matrices_of_layers_are_packed_and_the_rest_is_kept_whatever_the_type) {
    static const Type types[] = {F32, F16, BF16};
    static const char *const golden[] = {PRE, "tests/golden/opt-post"};
    Checkpoint *dummy = checkpoint_dummy(&small.config, 5);
    for (size_t i = 0; i < COUNT(types) + COUNT(golden); i++) {
        Model m = small;
        m.type = m.head_type = types[i % COUNT(types)];
        const char *from = i < COUNT(types) ? model_dir(m) : golden[i - COUNT(types)];
        is_packed_copy(copy_of(from, WHOLE), from);
        CU_ASSERT_EQUAL(stats.files, 1);
        CU_ASSERT_DOUBLE_EQUAL(stats.packed_bits, 4.5, 1e-9);
        CU_ASSERT(stats.bits > 4.5 && stats.bits < 16);
    }
    same_matrix(dummy, &dummy->layer[1][FC1_W], dummy, &dummy->layer[1][FC1_W]); /* (128, 64): two rows of groups */
    checkpoint_close(dummy);
}

/* Of 70 tokens 6 are in a group that is not full. */
TEST(with_the_head_the_tables_are_packed_too_whatever_the_type) {
    static const Type types[] = {F32, F16, BF16};
    with_head = true;
    for (size_t i = 0; i < 2 * COUNT(types); i++) {
        Model m = small;
        m.config.embed = 64, m.head = i < COUNT(types);
        m.type = m.head_type = types[i % COUNT(types)];
        const char *from = model_dir(m);
        is_packed_copy(copy_of(from, WHOLE), from);
    }
    with_head = false;
}

TEST(a_group_divides_the_columns_of_tables) {
    Checkpoint *c = checkpoint_dummy(&small.config, 0);
    ASSERT_OK(checkpoint_packs(c, false, &err));
    CU_ASSERT_EQUAL(checkpoint_packs(c, true, &err), -1);
    said(&err, EXIT_USAGE, "the token table has 24 columns");
    checkpoint_close(c);
}

TEST(a_group_divides_the_rows_of_all_matrices) {
    for (int i = 0; i < 2; i++) {
        OptConfig config = small.config;
        config.h1 = i ? 96 : 64, config.h2 = i ? 64 : 96;
        Checkpoint *c = checkpoint_dummy(&config, 0);
        CU_ASSERT_EQUAL(checkpoint_packs(c, false, &err), -1);
        said(&err, EXIT_USAGE, i ? "have 96 and 64 rows" : "have 64 and 96 rows");
        checkpoint_close(c);
    }
}

/* Codes of four bits stand exactly for numbers such as these: sixteen steps of 1/64, all of them in every group. */
static float sixteenth(const OptConfig *config, int t, size_t e) {
    const size_t row = e / 64; /* or half of one */
    (void)config;
    return t < NGLOBALS ? any_number(t, e) : (float)((row + row / 16 + e + (size_t)t) % 16) / 64 - .125f;
}

/* The tables are of such numbers, too. In their last group, which is not full, all numbers of a column are equal. */
static float sixteenth_of_all(const OptConfig *config, int t, size_t e) {
    const bool table = t == TOK_EMBED || t == LM_HEAD;
    return sixteenth(config, table ? NGLOBALS + t : t, table && e / 64 >= 64 ? e % 64 : e);
}

TEST(the_plain_forward_reads_a_copy) {
    static const int32_t ids[] = {2, 9, 41, 69, 7, 7, 30};
    float logits[2][COUNT(ids) * 70];
    for (int way = 0; way < 3; way++) { /* with tables packed, of which the head is one of its own or not */
        Model m = small;
        m.number = way ? sixteenth_of_all : sixteenth;
        m.config.embed = way ? 64 : m.config.embed, m.head = way < 2;
        with_head = way;
        const char *from = model_dir(m), *dirs[] = {from, copy_of(from, WHOLE)};
        for (int copied = 0; copied < 2; copied++) {
            Checkpoint *c = opens(dirs[copied]);
            ASSERT_OK(reference_forward(logits[copied], c, ids, COUNT(ids), &err));
            checkpoint_close(c);
        }
        CU_ASSERT_EQUAL(memcmp(logits[0], logits[1], sizeof *logits), 0);
        CU_ASSERT(logits[0][0] != logits[0][1] && logits[0][0] != logits[0][70]);
    }
    with_head = false;
}

// ---- How it is laid out ---------------------------------------------------------------------------------------------

/* A layer of a copy lies in the file as it will lie in memory: from there one read brings it. */
TEST(a_layer_of_a_copy_is_read_as_one) {
    const Policy policy = {.gbs = 1, .num_gpu_batches = 1, .page_tokens = 16, .weight_packed = true};
    const Task nothing = {.count = 0};
    Checkpoint *copy = opens(copy_of("models/opt-tiny", WHOLE));
    Plan *plan = plan_make(copy, &policy, &nothing, F32, &err);
    CU_ASSERT_PTR_NOT_NULL_FATAL(plan);
    for (int j = 0; j < copy->config.l; j++)
        for (int i = 1; i < NROLES; i++) {
            const Role *order = plan->slab_order[j];
            const WeightPlace *before = &plan->weight[j][order[i - 1]], *w = &plan->weight[j][order[i]];
            const size_t bytes = tensor_bytes(before->home);
            CU_ASSERT_EQUAL(w->slab_offset - before->slab_offset, bytes);
            CU_ASSERT_EQUAL(w->home.offset - before->home.offset, bytes);
        }
    plan_free(plan);
    checkpoint_close(copy);
}

/* This is about the whole layout of copies: where tensors lie in a file, how files are named, where a model is cut into
 * several, and what their index says. As the format asks, in every file tensors lie one behind the other, from the first
 * byte of the data to the last of the file, and each begins at as round a byte as its size is, up to 64. That none overlap,
 * and the metadata, is a matter of opening. */
TEST(copies_are_laid_out_as_the_format_asks_and_large_ones_are_cut_between_layers) {
    const struct {
        const char *from;
        size_t most;
        int files;
    } cases[] = {{model_dir(small), WHOLE, 1}, {PRE, 1, 4}, {PRE, 90000, 2}, {PRE, 120000, 2}};
    for (size_t i = 0; i < COUNT(cases); i++) {
        const size_t most = cases[i].most;
        const char *to = copy_of(cases[i].from, most);
        Checkpoint *c = opens(to);
        CU_ASSERT(c->nfiles == cases[i].files && stats.files == c->nfiles);
        for (int f = 0; f < c->nfiles; f++) {
            size_t data = 0, first = c->files[f].size;
            char name[60];
            for (int t = 0; t < part_count(&c->config); t++) {
                const Tensor *tensor = checkpoint_part(c, t).tensor;
                const size_t bytes = tensor_bytes(*tensor);
                if (tensor->file != f + 1) continue;
                data += bytes;
                first = size_min(first, tensor->offset);
                for (size_t round = 2; round <= 64; round *= 2) CU_ASSERT(bytes % round || tensor->offset % round == 0);
            }
            CU_ASSERT(first % 64 == 0 && first + data == c->files[f].size && (most == 1 || data <= most));
            snprintf(name, sizeof name, c->nfiles > 1 ? "/model-%05d-of-%05d.safetensors" : "/model.safetensors", f + 1,
                     c->nfiles);
            CU_ASSERT_STRING_EQUAL(strrchr(c->files[f].path, '/'), name);
        }
        checkpoint_close(c);
        is_packed_copy(to, cases[i].from);
        if (cases[i].files == 1) continue;
        CU_ASSERT_EQUAL(count_files(to), cases[i].files + 2); /* the index and config.json */
        cJSON *index = json_read(in_dir(to, TENSORS ".index.json"), 1 << 20, &err);
        CU_ASSERT_DOUBLE_EQUAL(json_get(index->child, "total_size")->valuedouble, stats.after, 0);
        CU_ASSERT_EQUAL(cJSON_GetArraySize(index->child->next), 3 * NROLES + 4);
        cJSON_Delete(index);
    }
    const size_t whole = stats.after; /* a file may be as large as the limit */
    for (int less = 0; less < 2; less++) {
        copy_of(PRE, whole - less);
        CU_ASSERT_EQUAL(stats.files, 1 + less);
    }
}

TEST(the_small_files_come_along) {
    static const char *const names[] = {"vocab.json", "merges.txt", "tokenizer_config.json",
                                        "README.md",  "old.bin",    "pytorch_model.bin.index.json"};
    const char *from = model_dir(small);
    for (int i = 0; i < 6; i++) write_file(from, names[i], "\0x", 2);
    CHECK(mkdir(in_dir(from, "sub.json"), 0700) == 0);
    const char *to = copy_of(from, WHOLE);
    CU_ASSERT_EQUAL(count_files(to), 5); /* the first three, config.json, model.safetensors */
    for (int i = 0; i < 3; i++) {
        size_t len;
        char *text = contents(in_dir(to, names[i]), &len);
        CU_ASSERT(len == 2 && !memcmp(text, "\0x", 2));
        free(text);
    }
    struct stat st;
    const mode_t mask = umask(0);
    umask(mask);
    CU_ASSERT(stat(to, &st) == 0 && (st.st_mode & 0777) == (0777 & ~mask));
}

/* As in a download, where all files are links into a directory of blobs. Other links may lead anywhere. */
TEST(links_are_followed_only_to_what_a_model_needs) {
    static const char *const needed[] = {"config.json", "vocab.json", "merges.txt", "tokenizer_config.json", TENSORS},
                             *const others[] = {"notes.txt", "card.json", "dangling.json"};
    const char *from = model_dir(small), *blobs = temp_dir();
    write_file(from, "vocab.json", "{}", 2), write_file(from, "merges.txt", "", 0);
    write_file(from, "tokenizer_config.json", "{}", 2);
    for (int i = 0; i < 5; i++) {
        const char *name = in_dir(from, needed[i]), *blob = in_dir(blobs, needed[i]);
        CHECK(!rename(name, blob) && !symlink(blob, name));
    }
    write_file(blobs, "secret", "secret", 6);
    for (int i = 0; i < 3; i++) CHECK(!symlink(in_dir(blobs, i < 2 ? "secret" : "none"), in_dir(from, others[i])));
    write_file(from, "special_tokens_map.json", "{}", 2);
    const char *to = copy_of(from, WHOLE);
    CU_ASSERT_EQUAL(count_files(to), 6);
    is_packed_copy(to, from);
}

static mode_t mode_of(const char *path) {
    struct stat st;
    CHECK(!stat(path, &st));
    return st.st_mode & 0777;
}

/* The mode of an empty directory that was there, also where the copy fails. */
TEST(a_copy_keeps_the_mode_of_its_directory) {
    Model odd = small;
    odd.odd = LAYER_0 + FC1_B, odd.odd_number = NAN;
    for (int fails = 0; fails < 2; fails++) {
        const char *from = model_dir(fails ? odd : small), *to = in_dir(temp_dir(), "new");
        CHECK(!mkdir(to, 0700));
        CU_ASSERT_EQUAL(quantized(from, to, WHOLE), -fails);
        CU_ASSERT(mode_of(to) == 0700 && (count_files(to) == 0) == fails);
    }
}

/* Another process begins one with the same target. */
TEST(what_a_killed_copy_has_left_is_cleared_away_and_what_is_being_made_stays) {
    for (int directory = 1; directory >= 0; directory--) {
        const char *dir = temp_dir(), *to = in_dir(dir, "new"), *dead = leave_unfinished(to, directory);
        char mine[720];
        int status;
        const int fd = unfinished_begin("--output", to, directory, &err);
        CU_ASSERT_FATAL(fd >= 0);
        CU_ASSERT(access(dead, F_OK));
        strcpy(mine, unfinished_name());
        const pid_t other = fork();
        if (!other) _exit(unfinished_begin("--output", to, directory, &err) < 0);
        CU_ASSERT(waitpid(other, &status, 0) == other && !status && !access(mine, F_OK));
        unfinished_remove();
        CU_ASSERT(access(mine, F_OK));
        if (!directory) close(fd);
    }
}

/* What makes a file or directory beside a result another's. The first three have names that a user may choose. */
typedef enum { NUMBER, NOTHING, PICKED, OUR_LINK, REPLACED, LOCKED, OWNED, FILLED, NWAYS } Way;

static bool is_possible(Way way, bool directory) {
    if (way == OWNED) return !geteuid();
    return directory || way != FILLED;
}

/* Makes a file or directory that is no link and not ours. */
static void make_plain(const char *name, bool directory) {
    const int fd = directory ? mkdir(name, 0700) : open(name, O_WRONLY | O_CREAT, 0600);
    CHECK(fd >= 0);
    if (!directory) close(fd);
}

/* Makes it beside dir/new. Returns its name, and in *lock what is to be closed. */
static const char *make_foreign(const char *dir, Way way, bool directory, int *lock) {
    static const char *const chosen[] = {"new.tmp-77", "new.tmp-", "new.tmp-0123456789abcdef-0123456789abcdef"};
    static char name[MAX_PATH];
    const char *aside = in_dir(dir, "aside");
    if (way == OWNED) CHECK(!chmod(in_dir(dir, ".."), 0711) && !chmod(dir, 0777) && !seteuid(1));
    strcpy(name, way <= PICKED ? in_dir(dir, chosen[way]) : leave_unfinished(in_dir(dir, "new"), directory));
    if (way == OWNED) CHECK(!seteuid(0));
    if (way == OUR_LINK || way == REPLACED) CHECK(!rename(name, aside));
    if (way == OUR_LINK) CHECK(!symlink("aside", name));
    if (way <= PICKED || way == REPLACED) make_plain(name, directory);
    if (way == LOCKED) CHECK((*lock = open(name, O_RDONLY)) >= 0 && !flock(*lock, LOCK_EX));
    if (way == FILLED) write_file(name, "notes", "precious", 8);
    return name;
}

/* A file or a directory is removed only if its name proves that this program made it, and only what a copy has is removed
 * from a directory. */
TEST(what_is_not_proven_to_be_ours_stays) {
    for (int i = 0; i < 2 * NWAYS; i++) {
        const Way way = i / 2;
        const bool directory = i % 2;
        char dir[300];
        int lock = -1;
        struct stat st;
        if (!is_possible(way, directory)) continue;
        strcpy(dir, temp_dir());
        const char *name = make_foreign(dir, way, directory, &lock);
        const int before = count_files(dir), fd = unfinished_begin("--output", in_dir(dir, "new"), false, &err);
        CU_ASSERT_FATAL(fd >= 0);
        unfinished_remove();
        CU_ASSERT(!lstat(name, &st) && count_files(dir) == before);
        CU_ASSERT(way != FILLED || !access(in_dir(name, "notes"), F_OK));
        CU_ASSERT(way != OUR_LINK || !directory || !access(in_dir(in_dir(dir, "aside"), "config.json"), F_OK));
        close(fd), close(lock);
    }
}

/* In this program instead of libc's: what is to be locked gets another name before. */
static const char *moved, *place; /* NULL: nothing */
int flock(int fd, int how) {
    if (moved) CHECK(!rename(moved, place));
    moved = NULL;
    return (int)syscall(SYS_flock, fd, how);
}

/* Between the moments in which another process sees it and could lock it. */
TEST(a_copy_that_is_just_being_completed_stays) {
    char done[400];
    const char *dir = temp_dir(), *to = in_dir(dir, "new");
    strcpy(done, in_dir(dir, "done"));
    moved = leave_unfinished(to, true);
    place = done;
    const int fd = unfinished_begin("--output", to, false, &err);
    CU_ASSERT_FATAL(fd >= 0);
    unfinished_remove();
    close(fd);
    CU_ASSERT(!moved && !access(in_dir(done, "config.json"), F_OK));
}

/* At a name that somebody else could guess. */
TEST(a_planted_link_is_not_written_through) {
    char planted[60];
    const char *dir = temp_dir(), *to = in_dir(dir, "new");
    struct stat st;
    snprintf(planted, sizeof planted, "new.tmp-%d", (int)getpid());
    CHECK(!symlink("file", in_dir(dir, planted)));
    FILE *out = output_open("--json", to, &err);
    CU_ASSERT_FATAL(out && fputs("{}", out) >= 0 && !output_close(out, "--json", to, &err));
    CU_ASSERT(!lstat(to, &st) && S_ISREG(st.st_mode) && access(in_dir(dir, "file"), F_OK));
}

// ---- What is refused ------------------------------------------------------------------------------------------------

/* No copy, one line that has part, and the directory that would hold it has as many files as before. */
static void refused(const char *from, const char *to, int code, const char *part) {
    char parent[700];
    snprintf(parent, sizeof parent, "%.*s", (int)(strrchr(to, '/') - to), to);
    const int before = count_files(parent);
    CU_ASSERT_EQUAL(quantized(from, to, WHOLE), -1);
    said(&err, code, part);
    CU_ASSERT_EQUAL(count_files(parent), before);
}

TEST(numbers_that_are_not_finite_are_named_and_leave_nothing) {
    static const struct {
        Type type;
        int t;
        size_t e;
        float number;
        const char *part;
    } cases[] = {{F16, LAYER_0 + FC1_B, 5, -INFINITY, "layers.0.fc1.bias: element 5 is -inf; expected finite"},
                 {F16, LAYER_1 + FC1_W, 64 * 64 + 3, NAN, "layers.1.fc1.weight: element 4099 is nan; expected finite"},
                 {F32, LAYER_1 + FC1_W, 5, 1e6f, "layers.1.fc1.weight: element 5 is 1e+06"}};
    for (size_t i = 0; i < COUNT(cases); i++) {
        Model m = small;
        m.type = m.head_type = cases[i].type;
        m.odd = cases[i].t, m.odd_at = cases[i].e, m.odd_number = cases[i].number;
        const char *from = model_dir(m), *to = temp_dir();
        refused(from, in_dir(to, "new"), EXIT_FAILED, cases[i].part);
        refused(from, to, EXIT_FAILED, cases[i].part); /* an empty directory is there again */
        CU_ASSERT_EQUAL(count_files(to), 0);
    }
}

/* The link to vocab.json of a download that was broken off; a file that is too large. */
TEST(a_small_file_that_cannot_come_along_is_an_error) {
    const char *from = model_dir(small), *to = in_dir(temp_dir(), "new"), *vocab = in_dir(from, "vocab.json");
    CHECK(symlink("no/such", vocab) == 0);
    refused(from, to, EXIT_FAILED, "vocab.json: is a link to no/such, which is missing");
    CHECK(unlink(vocab) == 0);
    write_file(from, "vocab.json", "", 0);
    CHECK(truncate(vocab, 200 << 20) == 0);
    refused(from, to, EXIT_FAILED, "vocab.json: has 209715200 bytes; expected at most");
}

/* The first is only noted: the copy asks for it. What was ignored before, as in the background of a shell, is neither. */
TEST(a_signal_leaves_nothing_and_a_second_one_ends_the_program_at_once) {
    static const struct {
        int first, second;
        bool at_once;
    } cases[] = {{SIGINT, 0, false}, {SIGHUP, 0, false}, {SIGINT, SIGTERM, true}, {SIGTERM, SIGHUP, false}};
    const char *from = model_dir(small), *parent = temp_dir(), *to = in_dir(parent, "new");
    for (size_t i = 0; i < COUNT(cases); i++) {
        const int first = cases[i].first, second = cases[i].second;
        int status;
        fflush(NULL);
        const pid_t pid = fork();
        if (!pid) {
            signal(SIGINT, SIG_DFL), signal(SIGTERM, SIG_DFL), signal(SIGHUP, second == SIGHUP ? SIG_IGN : SIG_DFL);
            stop_catch();
            raise(first), raise(second);
            if (!cases[i].at_once) quantized(from, to, WHOLE);
            _exit(err.code);
        }
        CU_ASSERT(waitpid(pid, &status, 0) == pid && WIFEXITED(status));
        CU_ASSERT_EQUAL(WEXITSTATUS(status), EXIT_SIGNAL + (cases[i].at_once ? second : first));
        CU_ASSERT_EQUAL(count_files(parent), 0);
    }
}

/* In this program instead of libc's: counts, fails the one that it is told to, and says that a file was changed in 1970. */
static int syncs, failing_sync;
static const char *changing; /* NULL: none */
int fsync(int fd) {
    static const struct timespec then[2];
    if (changing) CHECK(utimensat(AT_FDCWD, changing, then, 0) == 0);
    if (++syncs == failing_sync) return errno = EIO, -1;
    return (int)syscall(SYS_fsync, fd);
}

/* Each file, then their directory, then the one in which that has got its name. */
TEST(a_copy_is_on_the_disk_before_it_has_its_name) {
    const char *from = model_dir(small), *to = in_dir(temp_dir(), "new");
    syncs = 0;
    const int files = count_files(copy_of(from, 1));
    CU_ASSERT(files > 3); /* several shards */
    CU_ASSERT_EQUAL(syncs, files + 2);
    const int wanted = count_files(copy_of(from, WHOLE)) + 1;
    for (failing_sync = 1; failing_sync <= wanted; failing_sync++) {
        syncs = 0;
        refused(from, to, EXIT_FAILED, "Input/output error; make room or write elsewhere");
    }
    failing_sync = 0;
}

TEST(a_model_that_changes_while_it_is_copied_is_refused) {
    const char *from = model_dir(small), *to = in_dir(temp_dir(), "new");
    changing = in_dir(from, TENSORS);
    refused(from, to, EXIT_FAILED, "model.safetensors: was changed while it was in use");
    changing = NULL;
}

TEST(an_output_that_is_there_is_refused) {
    const char *from = model_dir(small), *to = temp_dir();
    write_file(to, "mine", "precious", 8);
    refused(from, to, EXIT_USAGE, "Directory not empty; name a new directory or an empty one");
    refused(from, in_dir(to, "mine"), EXIT_USAGE, "Not a directory");
    CU_ASSERT_EQUAL(quantized(from, in_dir(to, "no/such"), WHOLE), -1);
    said(&err, EXIT_FAILED, "No such file");
    CU_ASSERT_EQUAL(count_files(to), 1);
    CHECK(symlink(to, in_dir(to, "link")) == 0);
    refused(from, in_dir(to, "link"), EXIT_USAGE, "Not a directory");
    CHECK(mkdir(in_dir(to, "empty"), 0700) == 0);
    ASSERT_OK(quantized(from, in_dir(to, "empty//"), WHOLE));
    is_packed_copy(in_dir(to, "empty"), from);
    CU_ASSERT_EQUAL(count_files(to), 3);
    refused(in_dir(to, "empty"), in_dir(to, "new"), EXIT_USAGE, "is packed already; name");
}

// ---- Hostile copies -------------------------------------------------------------------------------------------------

/* small: q_proj is (64, 64): [1, 64 x 36]; fc1 (128, 64): [2, 2304] */
static const Fault bad_copy[] = {
    {"flexgen-packed-1", "flexgen-packed-2", "format is \"flexgen-packed-2\"; expected \"flexgen-packed-1\""},
    {"flexgen-packed-1", "pt", "q_proj.weight: dtype is U8; expected F16, BF16 or F32: save the model"},
    {"\"flexgen.bits\":\"4\"", "\"flexgen.bits\":4", "flexgen.bits is 4; expected \"4\": pack the model again"},
    {"\"flexgen.bits\":\"4\"", "\"flexgen.bits\":\"3\"", "flexgen.bits is \"3\"; expected \"4\": pack the model again"},
    {"\"flexgen.group\":\"64\"", "\"flexgen.group\":\"32\"",
     "flexgen.group is \"32\"; expected \"64\": pack the model again"},
    {"\"U8\"", "\"F16\"", "q_proj.weight: dtype is F16; expected U8, as __metadata__ says it is packed"},
    {"\"U8\",\"shape\":[1,2304]", "\"U8\",\"shape\":[2304,1]", "shape is [2304,1]; config.json asks for [1,2304]"},
    {"\"F16\",\"shape\":[70,24]", "\"U8\",\"shape\":[70,48]",
     "embed_tokens.weight: shape is [70,48]; config.json asks for [2,864] at 4"},
};

static const Fault unpacked_shard[] = {{"flexgen-packed-1", "pt", "00002.safetensors: is not packed, "}};

/* of 18 tokens and 64 columns, which take 2304 bytes as F16 and packed */
#define AS_F16 ".weight\":{\"dtype\":\"F16\",\"shape\":[18,64]"
#define AS_U8 ".weight\":{\"dtype\":\"U8\",\"shape\":[1,2304]"
static const Fault half_packed[] = {
    {"embed_tokens" AS_F16, "embed_tokens" AS_U8, "embed_tokens.weight is packed, and lm_head.weight is not: pack"},
    {"lm_head" AS_F16, "lm_head" AS_U8, "lm_head.weight is packed, and model.decoder.embed_tokens.weight is not: pack"},
};

TEST(spoilt_copies_are_refused) {
    refuses_each(checkpoint_opens, EXIT_FAILED, copy_of(model_dir(small), WHOLE), TENSORS, bad_copy, COUNT(bad_copy));
    refuses_each(checkpoint_opens, EXIT_FAILED, copy_of(PRE, 90000), "model-00002-of-00002.safetensors", unpacked_shard, 1);
}

TEST(one_table_is_not_packed_without_the_other) {
    for (int tied = 0; tied < 2; tied++) { /* a head that differs from the table is one of its own all the same */
        Model m = small;
        m.config.vocab = 18, m.config.embed = 64;
        const char *to = copy_of(model_dir(m), WHOLE);
        if (!tied) spoil(to, "config.json", "\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false");
        refuses_each(checkpoint_opens, EXIT_FAILED, to, TENSORS, half_packed, COUNT(half_packed));
    }
}
