/* batch.h: the batches and sequences in flight, as schedule.c sees them.
 * Read next: schedule.h. */
#ifndef BATCH_H
#define BATCH_H
#include "device/ops.h"

// clang-format off
/* How things are counted, from 0 on:
 *
 *   Sequence.prompt_index  prompts, in the order of the task
 *   Flight.index           flights of a run
 *   Flight.i, Run.i        sweeps of this flight; of all flights (Call.i)
 *   Seat.k                 batches of a block
 *   Call.k                 batches of this sweep, the k of Figure 4
 *   Batch.plan_place       batches of the plan, of all flights: says which memory is the batch's
 *   Batch.admitted_as      admissions of batches to the run: names the batch in a trace (Call.batch)
 *   Batch.sweeps           sweeps that the batch has begun: even and odd ones have their own tables
 *   Piece.index            pieces of the batch in this sweep
 *   Batch.piece_turn       pieces of the run, up to its newest: QKV and others rotate by it
 *   Square.turn            squares of the run: HIDDEN and KV_STAGING rotate by it */
// clang-format on

/* The page indices of one tier's pool (branches/pages.c). The lowest free page is taken first, so
 * that pages that are taken together lie together. */
typedef struct {
    bool *taken; /* [npages] */
    int first;   /* index of the pool's first page */
    int npages, used;
    int peak; /* pages 0 .. peak-1 have been used: the lowest free page is always taken */
    int hint; /* no page before this one is free */
} PagePool;

/* A sequence in flight; the index of its seat is its index in Flight.seqs. */
typedef struct {
    const Prompt *prompt;
    int prompt_index;
    Tier kv,       /* where its KV pages rest */
        act;       /* where its activations rest; in the entrance not as in its seat */
    int s, n;      /* prompt length; tokens to generate */
    int generated; /* tokens known so far */
    int head_rows; /* rows of its newest sweep that the head needs: the last ones */
    int npages;
    int *pages; /* its pages in the pool of kv */
    int32_t *tokens;
} Sequence;

/* The index tables of a batch, I32. They are written on the CPU and copied to the GPU in the same
 * layout. A batch has one set of index tables for its even sweeps and one for its odd sweeps,
 * because the last ops of a sweep may still read the one while the next fills the other. */
typedef struct {
    Tensor all; /* all of them as one view */
    /* for each row (1, rows): */
    Tensor ids,    /* its token id */
        positions, /* its position in the sequence + 2: a row of the model's position table */
        row_seq,   /* its sequence */
        row_token; /* its position in the sequence */
    /* for each sequence (1, nseq), or (nseq, max_pages): */
    Tensor len, /* its tokens, the new one included */
        prompt, /* Sequence.prompt_index, for sampling */
        pages,  /* its pages in the home pool */
        staged; /* their places in staging */
    /* for each piece of a prefill: the first rows of its sequences, and the end */
    Tensor start;
    /* for each row that the head needs (1, head_rows): */
    Tensor head, /* its row */
        target;  /* in a scored task: the token after it */
} Tables;

/* A page that passes through staging in this sweep. Its place there is its rank in the list. */
typedef struct {
    int page;
    bool past;      /* it holds tokens of earlier sweeps; others need not move */
    int32_t *entry; /* its entry in Tables.staged, which receives its place */
} Staged;

/* Sequences of a batch that pass a layer together, so that q, the new k and v and the result of
 * attention need room for one piece only. DIFFERS: the paper's batches are never cut. A piece of a
 * batch in prefill has at most plan->piece_rows rows; a batch that decodes is one piece. */
typedef struct {
    int index;
    int first, nseq;     /* its first sequence in the batch; how many it has */
    int row, rows;       /* its first row in the batch; how many it has */
    int kv_rows[NTIERS]; /* its rows by the tier of their KV, in the order in which they lie */
} Piece;

/* A GPU batch in flight. Rows are the tokens of this sweep, sequence after sequence. Sequences are
 * ordered by the tier of their KV, and the tiers of their activations never decrease, so the rows
 * of each tier are one range. */
typedef struct {
    Sequence **seq; /* [nseq] its members */
    int nseq;
    int plan_place, admitted_as, sweeps;
    long piece_turn; /* of its newest piece */
    bool prefill;
    bool uncollected;          /* its newest tokens are still on their way to the CPU */
    int rows,                  /* of this sweep */
        head_rows;             /* those of them that the head needs */
    int act_rows[NTIERS];      /* rows whose activations rest on each tier */
    int act_head_rows[NTIERS]; /* those of them that the head needs */
    int nstaged[NTIERS];       /* pages of CPU and disk that pass through staging */
    Route past[NTIERS],        /* staging and home, in rows of pages: those with past tokens */
        x[NTIERS],             /* rows of x and of ACTIVATIONS, which lie alike: one leg */
        x_for_head[NTIERS];    /* rows of HEAD_ROWS, where they lie close together, and of
                                  ACTIVATIONS: those that the head needs */
    Tables cpu, gpu;

    /* for branches/refill.c: sequences that have prefilled in the entrance become members when the
     * batch begins its next sweep */
    Sequence **joining; /* [njoining] */
    int njoining;
} Batch;

/* A block of batches that sweep together (section 4.4); a single machine needs one. */
typedef struct {
    struct Run *run;
    int index;
    Batch *batch; /* [batches] */
    int batches;
    Sequence *seqs; /* [nseqs] one for each seat of a block */
    int nseqs;
    PagePool pool[NTIERS];
    Admission admission;

    /* the sweep that is being posted */
    int i, K;
    Batch **in_sweep; /* [K] the batches in flight in it */
    bool prefill;     /* some of them is in prefill */
    int began;        /* how many have begun their part, and have members */

    /* the newest sweep that has been posted, whose tokens are collected batch by batch */
    int nuncollected; /* batches of it whose tokens are not known yet */
    int32_t *ids; /* of the batch that is being collected: the chosen tokens, or in a scored task
                     the greedy choices */

    /* On a first reading stop here: the rest is scratch, or for branches. */
    int *entered;           /* scratch: seats that admission has filled */
    Staged *staged;         /* scratch: the pages of a batch and tier that pass through staging */
    bool collected_prefill; /* some batch of the newest sweep that is posted was in prefill */
    float *logp;   /* beside ids, in a scored task: the log-probabilities of the given tokens */
    int32_t *came; /* a buffer for ids and logp, on a stage that is not the last */
} Flight;

/* Opens a flight without batches in flight. The caller has set run and index. */
void flight_open(Flight *f);
/* Between two sweeps: removes the sequences that have all their tokens, lets waiting prompts enter,
 * and lists the batches of the coming sweep in f->in_sweep. Returns false when everything is done
 * or the run has failed. */
bool flight_admit(Flight *f);
/* Ends the posting of a sweep: every square of it has been posted, and some may not have been
 * computed yet. */
void flight_end_posting(Flight *f);
/* Returns true if there will be another sweep, unless all sequences stop early in this one. */
bool flight_goes_on(const Flight *f);
/* Returns true if all sequences of the flight have ended. */
bool flight_is_empty(const Flight *f);
void flight_close(Flight *f);

/* Begins a batch's part in the sweep: waits for the tokens that the sweep before chose for it,
 * removes the sequences that have ended, and makes rows, pages and index tables for the new tokens.
 * Returns false when no sequence is left, or the run has failed. */
bool batch_begin(Flight *f, Batch *b);

/* Returns the number of rows of one of the batch's sequences in this sweep. */
static inline int batch_rows(const Batch *b, const Sequence *q) { return b->prefill ? q->s : 1; }
/* Returns a result of the batch's newest step, on GPU or CPU (1, head_rows): NEW_TOKENS, or in a
 * scored task LOG_PROBS. */
Tensor batch_newest(const Flight *f, const Batch *b, RegionId id, Tier side);
/* Returns the index tables for the processor that uses a tier's pages. */
static inline const Tables *batch_tables(const Batch *b, Tier tier) {
    return tier == TIER_GPU ? &b->gpu : &b->cpu;
}

// -------------------------------------------------------------------------------------------------
// The trunk ends here: what follows are the branches, as batch.c sees them. On a first reading go
// on with schedule.h.
// -------------------------------------------------------------------------------------------------

/* pages.c: the pool of one tier. pool_take takes a page; the plan guarantees that one is free. */
void pool_open(PagePool *pool, int first, int npages);
int pool_take(PagePool *pool);
void pool_give(PagePool *pool, int page);
void pool_close(PagePool *pool);
/* tables.c: makes the views of the batch's index tables on both sides, by its rows. */
void lay_out_tables(Flight *f, Batch *b);
/* Writes the CPU's tables of this sweep, which the posting thread must have waited for. */
void fill_tables(Flight *f, Batch *b);

/* pages.c: gives every sequence of the batch the pages for this sweep's tokens. */
void grow_pages(Flight *f, Batch *b);
/* Lists the pages that attention needs on another tier, and makes their routes. A prefill attends
 * to what it has just computed, and needs none. */
void stage_pages(Flight *f, Batch *b);
/* Gives back the pages of a sequence that has ended. */
void give_back_pages(Flight *f, const Batch *b, Sequence *q);
/* Records that pages of a tier pass from batch `before` to batch `owner`, which may write them
 * only when the ops of the old one, which still read them, are over. */
void order_new_owner(Flight *f, Tier tier, int owner, int before);

/* pieces.c: advances *piece, which is zero at first, to the batch's next piece in this sweep.
 * Returns false if there is none. */
bool batch_piece(const Flight *f, const Batch *b, Piece *piece);
/* Lists for every piece of a prefill the first row of each of its sequences, counted within the
 * piece, and the end. */
void fill_starts(const Flight *f, const Batch *b);

/* refill.c: returns the batch in which prompts prefill that take seats of batches that go on; NULL:
 * the schedule has none. */
Batch *entrance(Flight *f);
/* Moves the sequences that have prefilled in the entrance to the batches of their seats. Ops that
 * use their pages there come after those of the entrance. */
void leave_entrance(Flight *f);
/* Begins a sweep with an entrance, which the topups have just entered: moves it to the front of the
 * sweep, because its tokens are needed first, and deals new homes to its activations. They rest in
 * the entrance's part of ACTIVATIONS, where the tiers' shares are dealt among the topups. */
void open_entrance(Flight *f);

/* stages.c: makes f->ids and f->logp, of a batch whose tokens the last stage of a pipeline has
 * chosen, the same on all stages: shares them, or waits until they have come. Return false if that
 * fails. */
bool share_newest(Flight *f, const Batch *b);
bool receive_newest(Flight *f, const Batch *b);
/* Returns true if a stage of a pipeline waits for ops of a square, or of the whole machine, while
 * it posts a sweep. Then it must share the tokens of all batches before it waits for the hidden
 * states of one: the stages before need all these tokens before they send any states. */
bool waits_in_sweep(const Flight *f);

/* tell.c: counts the sweep whose last tokens have just arrived, and calls the listener. */
void tell_sweep(Flight *f);
/* Tells a scored task's listener the scores of the newest step, sequence by sequence, except those
 * of tokens before Prompt.from. */
void tell_scores(Flight *f, const Batch *b);
/* Tells the logits of sequence r if the task keeps them. */
void tell_logits(Flight *f, const Batch *b, int r);
/* Counts and tells the sequence's newest token. Returns true if the listener says that it is the
 * last one. */
bool tell_token(Flight *f, const Sequence *q);
/* Counts and tells the end of a sequence: by an EOS or a stop, or because it has all tokens. */
void tell_end(Flight *f, const Sequence *q, bool eos, bool stop);
#endif
