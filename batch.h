/* batch.h: who is in flight, as schedule.c sees it. */
#ifndef BATCH_H
#define BATCH_H
#include "device/device.h"

/* A sequence in flight; its seat is its place in Flight.seqs. */
typedef struct {
    int prompt;    /* index into the task */
    int home;      /* its GPU batch */
    Tier kv, act;  /* where its KV pages rest, and in this sweep its activations */
    int s, n;      /* prompt length, tokens wanted */
    int generated; /* tokens known so far */
    int last_rows; /* rows of its newest step that the head needs: the last ones */
    int npages;
    int *pages; /* its pages in the pool of kv */
    int32_t *tokens;
} Sequence;

/* A batch's index tables, I32, once on the CPU and mirrored on the GPU in the same layout. Even and
 * odd sweeps of a batch have index tables of their own. */
typedef struct {
    Tensor all; /* all of them as one view */
    Tensor ids, positions, row_seq,
        row_token;          /* (1, rows): token, position + 2; sequence, place in it */
    Tensor len, prompt, at; /* (1, nseq): tokens with the new one; for sampling */
    Tensor start; /* of each piece of a prefill: its sequences' first rows in it, and the end */
    Tensor pages, staged; /* (nseq, max_pages): in the home pool, in staging */
    Tensor head, target;  /* (1, last_rows): rows that the head needs; in a scored task, the tokens
                             after them */
} Tables;

/* A page that passes through staging this sweep: its place there is its rank in the list, which its
 * entry in Tables.staged says. past: it holds tokens of earlier sweeps. */
typedef struct {
    int page;
    bool past;
    int32_t *entry;
} Staged;

/* Sequences of a batch which pass a layer together, so that q, new k and v, and the result of
 * attention need room for them alone: of a batch in prefill, as many as have plan->piece_rows rows
 * together; of one that decodes, all. */
typedef struct {
    int number, first, nseq, row, rows; /* in the batch: which piece, its sequences, its rows */
    int kv_rows[NTIERS]; /* how many of these have their KV on each tier: they lie in this order */
} Piece;

/* One GPU batch in flight. Rows are the tokens of this sweep, sequence after sequence; sequences
 * are ordered by the tier of their KV, and the tiers of their activations never decrease, so each
 * tier's rows are one range. */
typedef struct {
    Sequence **seq;
    int nseq, rows, last_rows;
    Sequence **joining; /* have prefilled in the entrance; members from its next begin on */
    int index;          /* in the plan, which has the batches of all flights */
    int number, njoining, sweeps; /* number: of its latest admission, over the whole run; sweeps:
                                     those that it has begun */
    bool in_flight;
    bool prefill, waiting; /* waiting: its newest tokens are posted, not yet known */
    int kv_seqs[NTIERS], act_rows[NTIERS], act_last[NTIERS];
    Staged *staged[NTIERS]; /* the CPU's and the disk's pages, in page order */
    int nstaged[NTIERS];
    Tables cpu, gpu;
    int page_tokens;
    long turn; /* of its newest piece: pieces take the workspaces in turn */
} Batch;

/* What the flights of a run share: the line of waiting prompts, the batches admitted so far, the
 * end of the newest sweep.
 */
typedef struct {
    int next_prompt;
    long admitted;
    double swept_at;
} Line;

/* A block of batches in flight (section 4.4); on one machine there is only one. */
typedef struct {
    const Plan *plan;
    const Task *task;
    const Listener *listener;
    RunStats *stats;
    Poster *to;
    Line *line;
    int number, batches;      /* which flight it is; its batches */
    int i, K;                 /* this sweep of the flight; batches in flight in it */
    Batch *batch, **in_sweep; /* [batches]; the K that this sweep computes */
    bool prefill;             /* some batch of this sweep is in prefill */
    Admission admission;
    Sequence *seqs; /* [seats of a block] */
    int nseqs;
    int *entered; /* seats that admission has filled */
    PagePool pool[NTIERS];
    int began;          /* batches that take part in this sweep */
    bool prefill_sweep; /* the sweep whose tokens are being collected had a batch in prefill */
    int uncollected;    /* its batches whose tokens are not known yet */
    int32_t *ids;  /* of the batch that is collected: the chosen tokens, or in a scored task the
                      greedy ones ... */
    float *logp;   /* ... and the log-probabilities of the given ones */
    int32_t *came; /* room for both on a stage that is not the last */
} Flight;

/* Opens it with nobody in flight. The caller has set number, plan, task, listener, stats, to and
 * line, which must outlive it.
 */
void flight_open(Flight *f);
/* Between sweeps: sequences that have ended leave, and waiting prompts may enter. f->in_sweep then
 * lists the entrance, whose tokens are needed first, and after it the batches by age. False when
 * everything is done, or the run has failed. */
bool flight_admit(Flight *f);
/* Every square of the sweep has been posted. The time of the next sweep counts from the last tokens
 * of this one. */
void flight_swept(Flight *f);
/* Whether there will be another sweep. */
bool flight_goes_on(const Flight *f);
/* Whether all who were in flight have ended. */
bool flight_is_empty(const Flight *f);
void flight_close(Flight *f);

/* Begins a batch's part in the sweep: waits for the tokens that the sweep before chose for it,
 * removes the sequences that have ended, and makes rows, pages and index tables for the new tokens.
 * False when nobody is left, or the run failed. */
bool batch_begin(Flight *f, Batch *b);

/* Makes *piece, which is zero before the first, the next one of the batch in this sweep. False:
 * there is none. */
bool batch_piece(const Flight *f, const Batch *b, Piece *piece);
/* Where its activations of one tier rest: row 0 is its first row of that tier. */
Tensor batch_activations(const Flight *f, const Batch *b, Tier tier);
/* Rows of one of its sequences in this sweep. */
static inline int batch_rows(const Batch *b, const Sequence *q) { return b->prefill ? q->s : 1; }
/* What its newest step gave, on GPU or CPU (1, last_rows): NEW_TOKENS, and in a scored task
 * LOG_PROBS; the LOGITS of sequences first .. first+n-1 (n, vocab), on the CPU if they are kept or
 * it chooses. */
Tensor batch_newest(const Flight *f, const Batch *b, RegionId id, Tier side);
Tensor batch_logits(const Flight *f, const Batch *b, int first, int n);
/* The index tables of the processor that uses a tier's pages; layer j of its page pool there, with
 * them. */
static inline const Tables *batch_tables(const Batch *b, Tier tier) {
    return tier == TIER_GPU ? &b->gpu : &b->cpu;
}
PageTable batch_pages(const Flight *f, const Batch *b, Tier tier, int j);
/* Adds to moves[0..n) those of the batch's staged pages of a tier that hold past tokens, K or V,
 * from their home `from` to `to`, where they follow each other. Runs of neighbours are one move.
 * Returns how many moves there are. */
int batch_moves(Move *moves, int n, const Batch *b, Tier tier, Tensor to, Tensor from);
#endif
