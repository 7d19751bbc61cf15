/* plan.h: what rests on which tier (plan.c; section 4.2): the plan of every byte, views of it, KV
 * pages. */
#ifndef PLAN_H
#define PLAN_H
#include "flexgen.h"
#ifdef __cplusplus
extern "C" {
#endif

/* Chooses a home for every tensor of every decoder layer (a weight and its bias stay together, and
 * so do q, k and v), by error diffusion across layers: each tier gets its fraction of the bytes to
 * within one of these. home is [l][NROLES]. */
void place_weights(Tier (*home)[NROLES], const OptConfig *config, double wg, double wc);

/* What a tier is used for, in the order in which the plan lays it out. A purpose may exist on
 * several tiers: the cache on all three, the queries of delegated attention on GPU and CPU. */
typedef enum {
    RESTING_WEIGHTS, /* of the decoder layers */
    EMBEDDINGS,      /* the tensors outside of the layers */
    WEIGHT_SLOT,   /* layers that stream use this slot and the next in turn; on the CPU, what comes
                      from disk */
    WEIGHT_SLOT_1, /* the other one */
    UNPACKED_WEIGHTS, /* a layer's matrices in F16, for batches of too many rows for packed ones */
    KV_CACHE,         /* pages: (layer, K|V, page, token, h1) */
    KV_STAGING,  /* pages of one layer on their way: on the GPU to its attention, on the CPU from
                    disk */
    ACTIVATIONS, /* at rest between two layers */
    ACT_READING, /* staging of the disk's activations on the CPU */
    ACT_WRITING,
    HIDDEN,        /* workspaces: x, the hidden state while it is computed */
    QKV,           /* q, k, v: what PROJECT makes, side by side */
    NEW_KV_PACKED, /* new k, v as packed pages store them, on their way down */
    QUERY,         /* q that has come down */
    NEW_KV,        /* new k, v that have come down, as pages store them, packed or not */
    ATTENDED,      /* o, the result of attention */
    NORM_1,        /* what PROJECT has normalized, some rows at a time */
    NORM_2,        /* what FINISH has normalized */
    MLP,
    EMBEDDED,  /* rows of the token table, before project_in; on the CPU if the token table is there
                */
    LAST_ROWS, /* the rows that the head needs */
    HEAD_OUT,  /* the same rows after project_out */
    LOGITS,   /* of some of these rows; on the CPU of all, if the task keeps them or the CPU chooses
               */
    RECEIVED, /* hidden states from the stage before: one slot for each batch */
    SENDING,  /* hidden states for the stage behind */
    CHOSEN,   /* sparse attention: the chosen tokens */
    WEIGHING, /* sparse attention: their weights */
    INDEX_TABLES, /* two for each batch: for its even and its odd sweeps */
    NEW_TOKENS,   /* chosen ids of each batch */
    LOG_PROBS,    /* in a scored task: log-probabilities of the given tokens */
    GREEDY,       /* in a scored task, in place of NEW_TOKENS: the greedy choices */
    NREGIONS
} RegionId;

/* One line of the plan: what one tier holds for one purpose, `slots` matrices of (rows, cols) one
 * after the other. A slot is one cell or several; a cell is always used as a whole, and depend.c
 * keeps order by cells. bytes 0: no region. */
typedef struct {
    const char *name, *remedy; /* "KV cache", "--percent (third number), ..." */
    Type type;
    int rows, cols, slots;
    Bytes offset, bytes; /* offset UINT64_MAX: it rests in the checkpoint */
    int cell, cells;     /* the first of its cells; cells of a slot */
} Region;

/* Where a tensor lies while its layer is computed: in its GPU home, or in the layer's slab, which
 * streams to a slot: first what the CPU holds of the layer, then what the disk holds. */
typedef struct {
    Tensor home; /* tier DISK: in the checkpoint (or the offload file for a dummy) */
    Bytes slab_offset,
        slab_bytes; /* when home is not the GPU; on the CPU with the padding behind it */
} WeightPlace;

/* The work of all sweeps of one kind if no sequence stops early, as sums over these sweeps. */
typedef struct {
    double sweeps;
    double prefills, prompts, prompt_rows,
        pairs; /* batches in prefill; their prompts, tokens; pairs of query and key */
    double decodes, steps,
        past;         /* batches that decode; their new tokens; tokens that those attend to */
    double last_rows; /* rows that the head needs, of both */
} Workload;

/* Every byte that each tier will hold, before anything is allocated, and where. Layer l stands for
 * the head: the token table (or lm_head), which is streamed like a layer when it does not rest on
 * the GPU. */
struct Plan {
    OptConfig config;
    Policy policy;
    Type act_type;
    Region region[NREGIONS][NTIERS];
    int ncells;                 /* of all regions */
    Bytes total[NTIERS];        /* bytes of each tier; on disk, the checkpoint's share included */
    Bytes offload_bytes;        /* of the disk's total: the offload file */
    double achieved[3][NTIERS]; /* weights, cache, activations: the fractions that result */

    WeightPlace (*weight)[NROLES]; /* [l] */
    Role (*slab_order)[NROLES];    /* [l] how a layer's tensors lie in its slab: q, k, v, then as in
                                      the checkpoint */
    WeightPlace global[NGLOBALS];  /* the head streams as layer l when it is not on the GPU */
    Global head; /* the matrix that makes logits: LM_HEAD, or TOK_EMBED when they are tied */
    Bytes *cpu_slab,
        *disk_slab; /* [l + 1] bytes of a layer that stream from the CPU tier, from disk */

    int batches; /* GPU batches in flight, of all flights; with the diagonal schedule each has one
                    more, through which topups enter */
    long sweeps; /* that the task takes if no sequence stops early */
    Workload work[2]; /* in sweeps without a prefill; in those with one */
    double a21_kv;    /* A.2.1's estimate of the peak bytes of KV for the schedule, with the task's
                         mean lengths */
    int max_rows, max_seqs; /* of a batch: token rows, sequences */
    int max_pages;          /* of a sequence */
    int piece_rows; /* of a batch in prefill: rows of the sequences that pass a layer together */
    int pieces;     /* of a batch, at most */
    int last_rows,
        head_chunk; /* rows of a batch that the head needs; rows that become logits at a time */
    int off_rows,
        off_seqs;        /* largest share of a batch whose KV is not on the GPU: rows, sequences */
    Bytes kv_row;        /* bytes of a token's K (or V) in a page */
    int npages[NTIERS];  /* KV pages of each tier's pool, for each flight */
    int staged_pages[2]; /* pages of one staging slot: on the GPU; on the CPU, for the disk */
    int nws, turns; /* rotating workspaces: of batches (x), of pieces (q, k and v, the result of
                       attention) */
    int *act_rows[NTIERS];  /* [batches] rows of activation home of each batch */
    int *act_first[NTIERS]; /* [batches] its first row in the tier's ACTIVATIONS */
    int max_act_rows[NTIERS];
    int packed_rows; /* batches of at most so many rows take packed weights as they lie */
    Tier chooser; /* who chooses the next tokens: the GPU, or the CPU if a GPU would have to sample
                     them */
    Bytes unpacked_at[NROLES]; /* where each matrix begins in UNPACKED_WEIGHTS */
    int most_chosen;           /* sparse attention: the most tokens that a query and head choose */
};

/* One layer's paged KV on one tier, as attention sees it: k and v are (npages * page_tokens, h1)
 * views, or packed (npages * page_tokens, bytes) U8; pages (nseq, max_pages) and len (nseq) are I32
 * views. All are on the tier of the processor that attends. */
typedef struct {
    Tensor k, v, pages, len;
    int page_tokens, nh;
} PageTable;

/* Rows first .. first+rows-1 of slot `slot` (modulo their number) of a region. */
Tensor plan_view(const Plan *plan, RegionId id, Tier tier, long slot, int first, int rows);
/* n numbers of a type, from byte `at` of a region on, as a matrix of one row. */
Tensor plan_bytes(const Plan *plan, RegionId id, Tier tier, Bytes at, Type type, int n);

/* A weight while its layer computes: in its home on the GPU, or where it has streamed to, in
 * staging slot 0 or 1. */
Tensor plan_weight(const Plan *plan, const WeightPlace *place, int slot);
/* A packed matrix of the layer that computes, as F16. */
Tensor plan_f16(const Plan *plan, Role role);

/* The first npages pages of two slots, `slot` and the one behind it, which hold K and V: of
 * KV_CACHE slots 2 j and 2 j + 1 layer j's, of KV_STAGING either pair. pages, len: a batch's index
 * tables. */
PageTable plan_pages(const Plan *plan, RegionId id, Tier tier, long slot, int npages, Tensor pages,
                     Tensor len);
/* The cell of a batch's pages of layer j; batch == plan->batches + g stands for the pages of flight
 * g that nobody has. */
int cache_cell(const Plan *plan, Tier tier, int batch, int j);

/* A region to be: on which tier, for what, of what shape. */
typedef struct {
    RegionId id;
    Tier tier;
    const char *name, *remedy;
    Type type;
    int rows, cols, slots;
} Wanted;
/* Lays it out behind those that its tier has already; an empty one is none. A slot is one cell, if
 * plan_make does not know better. */
void add_region(Plan *plan, Wanted region);

/* Fills in what of the plan depends on who is in flight when: batches, rows, pages, sweeps and
 * their work (plan.c). */
void plan_batches(Plan *plan, const Task *task);
/* Plans the task under the policy. Never fails for want of memory: see plan_fits. Fails where a
 * prompt is impossible. */
Plan *plan_make(const Checkpoint *checkpoint, const Policy *policy, const Task *task, Type act_type,
                Error *err);
void plan_free(Plan *plan);
/* Bytes of a layer's weights as they rest and move: F16, or packed. */
Bytes plan_layer_bytes(const Plan *plan);
/* Whether the disk's share of the layers is a copy in the offload file; if not, it is the
 * checkpoint itself. */
bool copied_to_disk(const Plan *plan, const Checkpoint *checkpoint);
/* -1 and err (EXIT_USAGE) when a tier's total exceeds its capacity; err names the tier, what it
 * needs and has, its largest region, and the flag that shrinks it. */
int plan_fits(const Plan *plan, const Bytes capacity[NTIERS], Error *err);
/* The same; if not placed, nobody has given the shares, and changing them is no advice. */
int plan_refuse(const Plan *plan, const Bytes capacity[NTIERS], bool placed, Error *err);
/* By how many bytes the tiers exceed their capacities; 0: the plan fits. */
Bytes plan_missing(const Plan *plan, const Bytes capacity[NTIERS]);
/* Sets policy->workspaces as large (no larger than it is, if it is set) and policy->table_home as
 * high as the plan has room for, the former first; -1 and err (of the plan that misses the least)
 * where none fits. */
int fit_policy(Policy *policy, const Checkpoint *checkpoint, const Task *task, Type act_type,
               const Bytes capacity[NTIERS], Error *err);
/* Sets policy->piece_rows, if it is not set, to the most up to LARGE_PIECE_ROWS for which the plan
 * has room; 0: it has none for more than there are anyway. */
void fit_pieces(Policy *policy, const Checkpoint *checkpoint, const Task *task, Type act_type,
                const Bytes capacity[NTIERS]);
/* Page indices of one tier's pool: the lowest free one first, so that pages taken together lie
 * together. */
typedef struct {
    uint64_t *free; /* one bit for each page */
    int first;      /* index of the pool's first page */
    int npages, used, peak, hint;
} PagePool;
void pool_open(PagePool *pool, int first, int npages);
int pool_take(PagePool *pool); /* the plan guarantees that there is one */
void pool_give(PagePool *pool, int page);
void pool_close(PagePool *pool);

#ifdef __cplusplus
}
#endif
#endif
