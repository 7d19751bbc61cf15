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

/* Runs the whole program, and reads what it prints. */
static void run_mini(void *c) {
    MiniRun *p = c;
    char text[1 << 14] = "", words[sizeof p->words], *argv[40] = {"mini"}, *at = text;
    int argc = 1;
    memcpy(words, p->words, sizeof words);
    for (char *word = strtok(words, "\n"); word && argc < 39; word = strtok(NULL, "\n"))
        argv[argc++] = strcmp(word, "OPT-30B") ? word : opt_30b();
    stdout = fmemopen(text, sizeof text, "w");
    const int status = mini_main(argc, argv);
    fflush(stdout);
    if (status) _exit(status);
    const char *T = strstr(text, "\nT ");
    p->T = T ? atof(T + 3) : NAN;
    for (int i = 0; i < PROMPTS && (at = strstr(at, "\"tokens\": [")); i++, at++) {
        int32_t *to = p->ids[i];
        p->ended += sscanf(at, "\"tokens\": [%d, %d, %d, %d]", to, to + 1, to + 2, to + 3) == RUN_TOKENS;
    }
    for (int link = 0; link < NLINKS; link++) p->carried[link] = link_of[link].bytes;
}

const Work works[NASKS] = {[ASK_PIVOT] = {exchange}, [ASK_TABLEAU] = {minimize_one}, [ASK_MINI] = {run_mini}};
