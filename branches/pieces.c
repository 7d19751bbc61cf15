/* pieces.c: a batch in prefill passes a layer in pieces of whole sequences, so that q, the new k
 * and v and the result of attention need room for one piece only. A batch that decodes is one
 * piece. Read next: refill.c. */
#include "schedule.h"

bool batch_piece(const Flight *f, const Batch *b, Piece *p) {
    *p = (Piece){
        .index = p->index + (p->nseq > 0), .first = p->first + p->nseq, .row = p->row + p->rows};
    for (int r = p->first; r < b->nseq; r++) {
        int rows = batch_rows(b, b->seq[r]);
        if (p->rows + rows > f->run->plan->piece_rows)
            break;
        p->nseq++;
        p->rows += rows;
        p->kv_rows[b->seq[r]->kv] += rows;
    }
    return p->nseq > 0;
}

void fill_starts(const Flight *f, const Batch *b) {
    int32_t *start = cpu_address(f->run->poster, b->cpu.start);
    for (Piece p = {0}; b->prefill && batch_piece(f, b, &p);) {
        *start++ = 0;
        for (int r = p.first; r < p.first + p.nseq; r++, start++)
            *start = start[-1] + b->seq[r]->s;
    }
}
