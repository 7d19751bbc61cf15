/* exam_mini.c: asks mini.c, which is compiled here. */
#undef _GNU_SOURCE  // which mini.c defines itself
#define main mini_main
#include "mini.c"
#include "tests/exam.h"

_Static_assert(sizeof(MiniTableau) == sizeof(Tableau) && MINI_COST == (int)COST && MINI_COLUMNS == (int)RIGHT,
               "the tableaus are the same");

void exam_begin(void) {}

static void exchange(void *c) {
    Pivot *p = c;
    Tableau t;
    memcpy(&t, &p->before, sizeof t);
    pivot(&t, p->r, p->c);
    memcpy(&p->after, &t, sizeof t);
}

static void minimize_one(void *c) {
    MiniProgram *p = c;
    Tableau t;
    memcpy(&t, &p->before, sizeof t);
    p->ended = minimize(&t, COST);
    memcpy(&p->after, &t, sizeof t);
}

/* Makes a model that has its sizes alone, for --policy. Returns its directory. */
static char *opt_30b(void) {
    static char dir[] = "/tmp/opt-30b-XXXXXX", path[60];
    FILE *f = mkdtemp(dir) ? fopen(strcat(strcpy(path, dir), "/config.json"), "w") : NULL;
    must(f &&
             fputs("{\"model_type\": \"opt\", \"num_hidden_layers\": 48, \"hidden_size\": 7168, \"ffn_dim\": 28672, "
                   "\"num_attention_heads\": 56, \"vocab_size\": 50272, \"max_position_embeddings\": 2048, "
                   "\"word_embed_proj_dim\": 7168, \"eos_token_id\": 2, \"do_layer_norm_before\": true, "
                   "\"activation_function\": \"relu\", \"enable_bias\": true, \"tie_word_embeddings\": true}",
                   f) >= 0 &&
             !fclose(f),
         "/tmp cannot be written to");
    return dir;
}

static struct {
    char *text;
    size_t len;
    FILE *exams; /* standard output as the exam had it */
} said;

static ssize_t keep(void *cookie, const char *text, size_t size) {
    (void)cookie;
    said.text = realloc(said.text, said.len + size + 1);
    must(said.text != NULL, "out of memory");
    memcpy(said.text + said.len, text, size);
    said.text[said.len += size] = 0;
    return fwrite(text, 1, size, said.exams);
}

/* Runs the whole program. Returns what it prints to standard output; line by line it goes to the exam's, too. */
static char *run_program(const char *all_words) {
    static char words[MINI_WORDS];
    char *argv[40] = {"mini"};
    int argc = 1;
    memcpy(words, all_words, sizeof words);
    for (char *word = strtok(words, "\n"); word && argc < 39; word = strtok(NULL, "\n"))
        argv[argc++] = strcmp(word, "OPT-30B") ? word : opt_30b();
    said.exams = stdout;
    keep(NULL, "", 0);
    stdout = fopencookie(NULL, "w", (cookie_io_functions_t){.write = keep});
    must(stdout && !setvbuf(stdout, NULL, _IOLBF, BUFSIZ), "a stream cannot be made");
    const int status = mini_main(argc, argv);
    fflush(stdout);
    stdout = said.exams;
    fflush(stdout);
    if (status) _exit(status);
    return said.text;
}

/* Reads what it prints. */
static void run_mini(void *c) {
    MiniRun *p = c;
    char *text = run_program(p->words), *at = text;
    const char *T = strstr(text, "\nT ");
    p->T = T ? atof(T + 3) : NAN;
    for (int i = 0; i < PROMPTS && (at = strstr(at, "\"tokens\": [")); i++, at++) {
        int32_t *to = p->ids[i];
        p->ended += sscanf(at, "\"tokens\": [%d, %d, %d, %d]", to, to + 1, to + 2, to + 3) == RUN_TOKENS;
    }
    for (int link = 0; link < NLINKS; link++) p->carried[link] = link_of[link].bytes;
}

// ---- what each square has, by the trace
//
// The trace is not a file here: note() calls note_square() in the thread that has just computed, or moved.

static Squares *squares_seen;

static Row row_of(const float *x) {
    Row row = {0, 0};
    for (int d = 0; d < h1; d++) row.sum += x[d], row.size += fabsf(x[d]);
    return row;
}

/* Notes x of the square that this thread is busy with; for the head each sequence's last row. */
static void note_x(SquareSeen *s, bool left, bool last) {
    int *n = left ? &s->left : &s->arrived;
    *n = 0;
    for (Sequence *q = batch[doing.at.k]; q < batch[doing.at.k + 1]; q++) {
        const int rows = rows_of(q, doing.at.i);
        for (int row = last ? max(rows - 1, 0) : 0; row < rows && *n < MOST_ROWS_X; row++)
            s->x[left][(*n)++] = row_of(hidden_state(doing.at) + (q->row + row) * h1);
    }
}

/* Notes k and v where the square has attended to them. */
static void note_kv(Attended *a) {
    float wide[h1];
    a->n = 0;
    for (Sequence *q = batch[doing.at.k]; q < batch[doing.at.k + 1] && a->n < PROMPTS; q++) {
        const int len = min(q->s + doing.at.i, MOST_SEEN);
        if (q->ended) continue;
        for (int value = 0; value < 2; value++)
            for (int t = 0; t < len; t++) {
                widen(wide, kv_near(q, doing.at, t, value).at, h1);
                a->kv[value][a->n][t] = row_of(wide);
            }
        a->len[a->n++] = len;
    }
}

static ssize_t note_square(void *cookie, const char *text, size_t size) {
    const int block = (batch[0] - prompts) / (policy.gbs * policy.num_gpu_batches), i = block * RUN_TOKENS + doing.at.i;
    (void)cookie;
    if (i >= MOST_SWEEPS || doing.at.j >= MOST_COLUMNS || doing.at.k >= MOST_K) return size;
    SquareSeen *s = &squares_seen->at[i][doing.at.j][doing.at.k];
    if (memmem(text, size, "\"cat\":\"activations\"", 19) && !doing.down) note_x(s, false, false);
    if (!memmem(text, size, "\"cat\":\"compute\"", 15)) return size;
    note_x(s, doing.at.j < l, doing.at.j == l);
    if (doing.at.j < l) note_kv(&s->by[0]);
    return size;
}

/* Runs it once more; a run that fails has squares, too. */
static void watch_mini(void *c) {
    MiniSeen *p = c;
    squares_seen = &p->squares;
    trace = fopencookie(NULL, "w", (cookie_io_functions_t){.write = note_square});
    must(trace && !setvbuf(trace, NULL, _IONBF, 0), "a stream cannot be made");
    run_program(p->words);
}

const Work works[NASKS] = {
    [ASK_PIVOT] = {exchange}, [ASK_TABLEAU] = {minimize_one}, [ASK_MINI] = {run_mini}, [ASK_MINI_SEEN] = {watch_mini}};
