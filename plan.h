/* plan.h: what rests on which tier (plan.c; section 4.2): the plan of every byte, and views of it.
 * The schedule needs what stands above "The trunk ends here"; the rest makes plans.
 * Read next: device/ops.h, its first two chapters. */
#ifndef PLAN_H
#define PLAN_H
#include "flexgen.h"
#ifdef __cplusplus
extern "C" {
#endif

/* A purpose for which a tier is used. The plan lays out regions in this order. A purpose may exist
 * on several tiers: the cache on all three, the results of attention on GPU and CPU. */
typedef enum {
    RESTING_WEIGHTS, /* of the decoder layers */
    EMBEDDINGS,      /* the tensors outside of the layers */
    /* Layers that stream take this slot and the next in turn, two regions, because their sizes
     * differ. The CPU's slots hold what comes from disk. */
    WEIGHT_SLOT,
    WEIGHT_SLOT_1,
    UNPACKED_WEIGHTS, /* a layer's matrices in F16, for batches too large for packed ones */
    KV_CACHE,         /* pages: (layer, K|V, page, token, h1) */
    KV_STAGING,       /* pages of one layer: on the GPU for attention; on the CPU if from disk */
    ACTIVATIONS,      /* at rest between two layers */
    ACT_READING,      /* landing of activations from disk */
    ACT_WRITING,      /* and of those to disk */
    HIDDEN,           /* workspaces: x, the hidden state while it is computed */
    QKV,              /* q, k, v: the result of PROJECT, side by side */
    NEW_KV_PACKED,    /* new k, v as packed pages store them, before they leave the GPU */
    QUERY,            /* q on the CPU, for delegated attention */
    NEW_KV,           /* new k, v on the CPU, as pages store them, packed or not */
    ATTENDED,         /* o, the result of attention */
    NORM_1,           /* rows that PROJECT has normalized */
    NORM_2,           /* rows that FINISH has normalized */
    MLP,              /* the inner result of the MLP */
    EMBEDDED,  /* rows of the token table: on the GPU if project_in follows, on the CPU if the table
                  is not on the GPU */
    HEAD_ROWS, /* the rows that the head needs */
    HEAD_OUT,  /* these rows after project_out */
    LOGITS,    /* head_chunk rows on the GPU; on the CPU all rows that are kept or sampled */
    RECEIVED,  /* hidden states from the stage before: one slot for each batch */
    SENDING,   /* hidden states for the next stage */
    CHOSEN,    /* sparse attention: the tokens whose V it reads */
    CHOSEN_PROBS, /* sparse attention: their softmax probabilities */
    INDEX_TABLES, /* say which position and page belongs to which row (Tables in batch.h); two for
                     each batch: for its even and its odd sweeps */
    NEW_TOKENS,   /* each batch's next tokens */
    LOG_PROBS,    /* in a scored task: log-probabilities of the given tokens */
    GREEDY,       /* in a scored task, in place of NEW_TOKENS: the greedy choices */
    NREGIONS
} RegionId;

/* One line of the plan: the memory of one tier for one purpose, `slots` matrices of (rows, cols)
 * one after the other. bytes is 0 if the tier has no such region. Ops that share bytes of a cell
 * are ordered (device/depend.c). Every slot is a cell, but
 *   in ACTIVATIONS every batch has one;
 *   in KV_CACHE every batch has one in each layer, and so have the free pages of each flight. */
typedef struct {
    const char *name; /* "KV cache" */
    Type type;
    int rows, cols, slots;
    Bytes offset, bytes; /* offset is SIZE_MAX for what rests in the checkpoint */
    int cell;            /* the number of its first cell */
} Region;

/* The place of a tensor while its layer is computed: its home on the GPU, or a part of the layer's
 * slab, which streams to a slot. A slab holds first the tensors whose home is the CPU, then those
 * of the disk. */
typedef struct {
    Tensor home; /* tier DISK: in the checkpoint, or in the offload file (see copied_to_disk) */
    Bytes slab_offset; /* if home is not on the GPU: where it begins in the slab */
    Bytes
        slab_bytes; /* if home is not on the GPU: its bytes there, with padding if it is the CPU */
} WeightPlace;

/* For the cost model: the work of all sweeps of one kind if no sequence stops early, as sums over
 * these sweeps. */
typedef struct {
    double sweeps;
    double prefills;    /* batches in prefill */
    double prompts;     /* their prompts */
    double prompt_rows; /* tokens of these */
    double pairs;       /* pairs of a query and a key that it attends to */
    double decodes;     /* batches that decode */
    double decoded;     /* their new tokens */
    double past;        /* tokens that these attend to, themselves included */
    double head_rows;   /* rows that the head needs, of both kinds of batches */
} Workload;

/* The three things that a policy spreads over the tiers. */
enum { OF_WEIGHTS, OF_CACHE, OF_ACTIVATIONS };

/* A plan says which bytes each tier will hold, and where, before anything is allocated. Layer l
 * stands for the head: the token table (or lm_head), which is streamed like a layer when it does
 * not rest on the GPU. */
struct Plan {
    OptConfig config;
    Policy policy;
    Type act_type; /* of activations: F16 on a GPU, F32 on the host */

    /* The tiers */
    Region region[NREGIONS][NTIERS];
    int ncells;          /* cells of all regions */
    Bytes total[NTIERS]; /* bytes of each tier; on disk, the checkpoint's share included */

    /* The weights */
    WeightPlace (*weight)[NROLES]; /* [l] */
    Role (*slab_order)[NROLES];    /* [l] roles as they lie in each tier's share of the slab */
    WeightPlace global[NGLOBALS];  /* the head streams as layer l when it is not on the GPU */
    Global head; /* the matrix that makes logits: LM_HEAD, or TOK_EMBED when they are tied */
    Bytes *layer_bytes[NTIERS]; /* [l + 1] bytes of a layer that rest on each tier; those on CPU and
                                   disk are its slab */
    int packed_rows;            /* the most rows of a batch that uses packed weights directly */

    /* Batches: maxima over the task (branches/walk.c) */
    int batches; /* of all flights: each has those of its block, and with the diagonal schedule
                    the entrance */
    int max_rows, max_seqs; /* token rows and sequences of a batch */
    int head_rows;          /* rows of a batch that the head needs */
    int max_len;            /* the most tokens of a sequence: so many does a token attend to */
    int off_rows, off_seqs; /* the most rows, and sequences, of a batch with their KV off the GPU */

    /* The KV cache */
    Bytes kv_row;        /* bytes of a token's K (or V) in a page */
    int max_pages;       /* the most KV pages of a sequence */
    int npages[NTIERS];  /* KV pages of each tier's pool, for each flight */
    int staged_pages[2]; /* pages of a staging slot on the GPU, and on the CPU (from disk) */

    /* The activations */
    int *act_rows[NTIERS];  /* [batches] rows of each batch whose activations rest on the tier */
    int *act_first[NTIERS]; /* [batches + 1] where they begin in the tier's ACTIVATIONS, in which
                               the batches follow each other; and the end */

    /* Workspaces */
    int square_slots; /* the slots of a batch's workspaces (HIDDEN), used in turn */
    int piece_slots;  /* the slots of a piece's workspaces (QKV, ATTENDED), used in turn */
    int piece_rows;   /* the most rows of a piece */
    int head_chunk;   /* the most rows of logits that the head computes at a time */
    Tier chooser;     /* makes the next tokens of logits: the GPU, or, to sample them, the CPU */

    /* On a first reading stop here: the rest is for branches, reports and the cost model. */
    Bytes offload_bytes;        /* bytes of the offload file, a part of the disk's total */
    double achieved[3][NTIERS]; /* [OF_WEIGHTS ..]: the fractions that result */
    Bytes unpacked_at[NROLES];  /* offset of each matrix in UNPACKED_WEIGHTS */
    long sweeps;                /* that the task takes if no sequence stops early */
    Workload work[2];  /* of all sweeps (branches/work.c); [prefill]: in those without a prefill,
                          with one */
    int max_prompt;    /* tokens of a prompt */
    double a21_kv;     /* A.2.1's peak bytes of KV for the schedule, at the task's mean s, n */
    int disk_act_rows; /* the most such rows of a batch on disk */
    int pieces;        /* the most pieces of a batch */
};

/* One layer's paged KV on one tier, as attention sees it: k and v are (npages * page_tokens, h1)
 * views, or packed (npages * page_tokens, bytes) U8; pages (nseq, max_pages) and len (nseq) are I32
 * views. A processor that attends has all of them on its tier. Of pages on disk k and v are on
 * disk, pages and len on the CPU. */
typedef struct {
    Tensor k, v, pages, len;
    int page_tokens, nh;
} PageTable;

/* Returns rows first .. first+rows-1 of slot `slot` (modulo the number of slots) of a region. */
Tensor plan_view(const Plan *plan, RegionId id, Tier tier, long slot, int first, int rows);
/* Returns n numbers of a type, from byte `at` of a region on, as a matrix of one row. */
Tensor plan_bytes(const Plan *plan, RegionId id, Tier tier, Bytes at, Type type, int n);

/* Returns a weight while its layer computes: in its home on the GPU, or in the staging slot, 0 or
 * 1, to which it has streamed. */
Tensor plan_weight(const Plan *plan, const WeightPlace *place, int slot);
/* Returns a packed matrix of the layer that computes, unpacked to F16. */
Tensor plan_f16(const Plan *plan, Role role);

/* Returns the first npages pages of two slots: K's, which is `slot`, and V's, which is the next.
 * Layer j has slots 2 j and 2 j + 1 of KV_CACHE, and KV_STAGING has two such pairs. The caller
 * fills in pages and len, which are a batch's index tables, and for KV_CACHE the cells. */
PageTable plan_pages(const Plan *plan, RegionId id, Tier tier, long slot, int npages);
/* Returns the cell of a batch's pages of layer j; batch == plan->batches + g stands for the free
 * pages of flight g. */
int cache_cell(const Plan *plan, Tier tier, int batch, int j);

// -------------------------------------------------------------------------------------------------
// The trunk ends here: what follows makes plans. On a first reading go on with device/ops.h.
// -------------------------------------------------------------------------------------------------

/* A region to be added: its tier, purpose and shape. */
typedef struct {
    RegionId id;
    Tier tier;
    const char *name;
    Type type;
    int rows, cols, slots;
} Wanted;
/* Adds a region after those that its tier already has; a region of 0 bytes takes no room. */
void add_region(Plan *plan, Wanted region);

/* Chooses a home for every tensor of every decoder layer by error diffusion across layers. A weight
 * and its bias stay together, and so do q, k and v. Each tier gets its fraction of the bytes to
 * within one such unit. home is [l][NROLES]. */
void place_weights(Tier (*home)[NROLES], const OptConfig *config, double wg, double wc);
/* Fills in the part of a plan that depends on which sequences are in flight when: batches, rows,
 * pages, sweeps (branches/walk.c) and their work (branches/work.c). */
void plan_batches(Plan *plan, const Task *task);
/* Fills in the fields of a policy that are 0 because nobody has chosen them. */
void policy_defaults(Policy *policy);
/* Plans the task under the policy. A lack of memory is not an error here: branches/fit.h finds it.
 * Fails if a prompt does not fit the model, or a block has too many tokens. */
Plan *plan_make(const Checkpoint *checkpoint, const Policy *policy, const Task *task, Type act_type,
                Error *err);
void plan_free(Plan *plan);
/* Returns true if the disk's share of the layers is a copy in the offload file; false if it is the
 * checkpoint itself. */
bool copied_to_disk(const Plan *plan, const Checkpoint *checkpoint);

#ifdef __cplusplus
}
#endif
#endif
