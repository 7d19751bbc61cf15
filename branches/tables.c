/* tables.c: the index tables of a batch, by which its ops find token ids, positions and pages.
 *
 * All tables of a sweep lie in one block, so that one copy brings them to the GPU. Each has room
 * for the largest batch of the plan, and begins at the same place in every sweep. Read next:
 * pages.c. */
#include "schedule.h"

/* Takes a table of n integers from the beginning of *left, where it has this much room. */
static Tensor take_table(Tensor *left, int n, size_t room) {
    Tensor t = tensor_cols(*left, 0, n);
    t.ld = n;
    *left = tensor_moved(*left, room * sizeof(int32_t));
    return t;
}

/* Makes the views of the batch's block of tables on one side, CPU or GPU. */
static void lay_out_side(const Flight *f, const Batch *b, Tables *t, Tier side) {
    const Plan *p = f->run->plan;
    size_t rows = p->max_rows, seqs = p->max_seqs;
    Tensor left = plan_view(p, INDEX_TABLES, side, 2 * b->plan_place + b->sweeps % 2, 0, 1);
    t->all = left;
    t->ids = take_table(&left, b->rows, rows);
    t->positions = take_table(&left, b->rows, rows);
    t->row_seq = take_table(&left, b->rows, rows);
    t->row_token = take_table(&left, b->rows, rows);
    t->len = take_table(&left, b->nseq, seqs);
    t->prompt = take_table(&left, b->nseq, seqs);
    /* a first row for each sequence, and an end for each piece, of which there are at most nseq */
    t->start = take_table(&left, 2 * b->nseq, 2 * seqs);
    t->pages = take_table(&left, p->max_pages, seqs * p->max_pages);
    t->staged = take_table(&left, p->max_pages, seqs * p->max_pages);
    t->pages.rows = t->staged.rows = b->nseq;
    t->head = take_table(&left, b->head_rows, p->head_rows);
    t->target = take_table(&left, f->run->task->scored ? b->head_rows : 0, p->head_rows);
}

void lay_out_tables(Flight *f, Batch *b) {
    lay_out_side(f, b, &b->cpu, TIER_CPU);
    lay_out_side(f, b, &b->gpu, TIER_GPU);
}

void fill_tables(Flight *f, Batch *b) {
    const Poster *poster = f->run->poster;
    int32_t *ids = cpu_address(poster, b->cpu.ids);
    int32_t *positions = cpu_address(poster, b->cpu.positions);
    int32_t *row_seq = cpu_address(poster, b->cpu.row_seq);
    int32_t *row_token = cpu_address(poster, b->cpu.row_token);
    int32_t *len = cpu_address(poster, b->cpu.len);
    int32_t *prompt = cpu_address(poster, b->cpu.prompt);
    int32_t *pages = cpu_address(poster, b->cpu.pages);
    int32_t *head = cpu_address(poster, b->cpu.head);
    int32_t *target = cpu_address(poster, b->cpu.target);
    int row = 0;
    int head_row = 0;
    for (int r = 0; r < b->nseq; r++, pages += f->run->plan->max_pages) {
        const Sequence *q = b->seq[r];
        /* its length with the new tokens */
        int tokens = q->s + q->generated;
        /* a row for each new token: in prefill the whole prompt, in decoding the newest */
        for (int token = tokens - batch_rows(b, q); token < tokens; token++, row++) {
            ids[row] = token < q->s ? q->prompt->ids[token] : q->tokens[token - q->s];
            positions[row] = token + 2;
            row_seq[row] = r;
            row_token[row] = token;
        }
        /* the head needs the last rows, of which row - 1 is the very last */
        for (int e = q->head_rows; e > 0; e--, head_row++) {
            head[head_row] = row - e;
            if (f->run->task->scored)
                target[head_row] = q->prompt->ids[tokens - e + 1];
        }
        len[r] = tokens;
        prompt[r] = q->prompt_index;
        memcpy(pages, q->pages, q->npages * sizeof *pages);
    }
    fill_starts(f, b);
}
