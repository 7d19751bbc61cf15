/* device.h: the devices that carry out ops: host, cuda, sim; what they count and record, and the
 * machines and networks that they stand for. The trunk needs only struct Device of it.
 * Read next: lanes.c. */
#ifndef DEVICE_H
#define DEVICE_H
#include <stdio.h>

#include "device/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

// -------------------------------------------------------------------------------------------------
// lanes.c: what every device offers; the host and the cuda device
// -------------------------------------------------------------------------------------------------

/* The counters of one lane. */
typedef struct {
    Bytes moved[NKINDS]; /* bytes by kind */
    Bytes read[2];       /* bytes of K and of V that attention has read from the cache */
    /* seconds of work. Waiting for a slowed link counts, waiting for events does not. A GPU's lanes
     * are timed only in a trace and where sweeps mix prompts with new tokens. */
    double busy_s;
    double prefill_s; /* the seconds of busy_s that were spent on batches in prefill */
} LaneCount;

typedef struct Gpu Gpu;

/* A device: in-order lanes that carry out ops and meet at events. */
struct Device {
    const char *name;
    Type act_type;      /* the type of activations: F32 on the host */
    Bytes peak[NTIERS]; /* bytes of each tier in use: how far ops have reached into its regions */
    LaneCount count[NLANES];
    Error notice; /* text that the user should see, such as memory that could not be pinned; usually
                     empty */
    Trace *trace; /* receives the ops that have finished; NULL: no trace. Set before the first op */
    double link[NCHANNELS]; /* host device: bytes/s to which a link is slowed; 0: not slowed. Set
                               before the first op */
    int delay_us[NLANES]; /* delays each op of a lane, or segment; tests find missing events with it
                           */
    Net *net;        /* the pipeline that it is a stage of; NULL: none. Set before the first op */
    bool no_graph;   /* cuda: every op is launched by itself. Set before the first op */
    const int *stop; /* host, cuda: once this is not 0, no further op or segment begins, as if one
                        had failed; NULL: never */

    /* Queues the op and returns the event of its end. Copies the op and its moves, but not the
     * index arrays that it points to. */
    Event (*post)(Device *, const Op *);
    /* Copies count elements to element `first` of a dense view on GPU or CPU, and returns when that
     * is done. Used for loading, before any op is posted. NULL on the sim, which loads nothing. */
    void (*upload)(Device *, Tensor dst, size_t first, const void *src, size_t count);
    /* Waits until the event has happened. Returns -1 and the first error once any op has failed. */
    int (*wait)(Device *, Event, Error *);
    /* Returns the address of a view on the CPU tier, for the thread that posts. On the sim only
     * index tables have one; other views give NULL. */
    void *(*cpu_address)(Device *, Tensor);
    double (*now)(Device *); /* seconds */
    void (*close)(Device *); /* ends lanes, frees tiers, removes the offload file */
};

/* Opens the host device (gpu NULL) with one allocation per tier, as large as the plan says: GPU and
 * CPU in memory, disk in an unlinked file under offload_dir (fully allocated beforehand, so that a
 * full disk is an error here and nowhere else). checkpoint serves disk reads of weights and must
 * outlive the device. Returns NULL and err when there is not enough memory or disk. With an open
 * GPU, which must outlive it, opens the cuda device instead: the GPU tier is memory of the GPU, and
 * lanes that touch the GPU are streams. The CPU tier is pinned; where that fails, the notice says
 * so and copies are slower. Everything else is as on the host. */
Device *device_open(Gpu *gpu, const Plan *plan, const Checkpoint *checkpoint,
                    const char *offload_dir, Error *err);

// -------------------------------------------------------------------------------------------------
// tiers.c: before a run
// -------------------------------------------------------------------------------------------------

/* Fills the weights' homes: reads (or generates) every tensor once into its GPU or CPU home, and
 * writes the disk's share into the offload file if it is a copy (copied_to_disk). */
int weights_load(const Plan *plan, const Checkpoint *checkpoint, Device *device, Error *err);

// -------------------------------------------------------------------------------------------------
// host.c, host_linear.c, host_attend.c: the arithmetic of the device that is this CPU
// -------------------------------------------------------------------------------------------------

/* Returns the instruction set that the kernels were compiled for: "AVX-512", "AVX2", "portable". */
const char *host_isa(void);
/* The version of how the host's products and attention add up and round. Another version may give
 * other tokens, so a job that began with another version is told so when it resumes. */
enum { HOST_SUMS = 3 };

// -------------------------------------------------------------------------------------------------
// flexgen.cu: a GPU
// -------------------------------------------------------------------------------------------------

/* An open GPU. */
struct Gpu {
    char name[96];   /* "NVIDIA H200, sm_90" */
    size_t total;    /* bytes of its memory */
    size_t overhead; /* bytes in use before there is a GPU tier: context, workspaces of cuBLAS and
                        of attention */
    size_t spare;    /* bytes that kernels will take when they are loaded at their first use */
    int max_head;    /* elements of the largest head that attention has room for */
    size_t (*in_use)(Gpu *); /* bytes of the whole GPU in use, by anyone: cudaMemGetInfo */
    void (*close)(Gpu *);

    /* for lanes.c and tiers.c */
    const struct GpuCalls *call; /* its functions for them: parts.h */
    double poll_s;   /* seconds for which sync polls before it sleeps; 0: none. Set by lanes.c */
    size_t pin_part; /* bytes that are pinned at a time; tests make it small, before they pin */
    const volatile int *bad; /* not 0 once pick or score has met a logit that is not finite; alloc
                                resets it */
    void (*forbid)(const void *, size_t); /* a hook for tests, or NULL: nobody may touch these bytes
                                             of the GPU tier */
};

/* Opens the first GPU (CUDA_VISIBLE_DEVICES chooses) with streams, cuBLAS and workspaces. Returns
 * NULL and err, one line that says what to do, without a driver, without a GPU, with one that is
 * too old or too full. Where flexgen.cu is not linked to the program but a library beside it, or
 * was not built, this is NULL. */
extern Gpu *(*cuda_open_gpu)(Error *err);
/* Returns the bytes that a GPU tier could have now: those that nobody uses, less `spare`. */
static inline Bytes gpu_left(Gpu *gpu) {
    return size_less(gpu->total, gpu->in_use(gpu) + gpu->spare);
}
/* Computes every product of a layer once at the shapes of a prefill and of a decoding step, and
 * that of the head once (branches/warm_up.c). The contents of the workspaces do not matter. Must be
 * called before the run; resets the counters to 0. */
int gpu_warm_up(Device *device, const Plan *plan, Error *err);

// -------------------------------------------------------------------------------------------------
// sim.c: the device that is a clock
// -------------------------------------------------------------------------------------------------

/* Opens the sim for a plan of any act_type. It has the same lanes and events, but an op only takes
 * time: bytes over the bandwidth of its channel, or flops over the rate of its processor (the
 * longer of that and its bytes over that processor's memory bandwidth). Lanes of one link share its
 * bandwidth equally; the GPU does one op at a time, of those that can begin the one posted first.
 * There are no data and no tiers: memory does not grow with the model. `now` is the simulated
 * clock. */
Device *sim_open(const Plan *plan, const Hardware *hardware);

/* Several sims that share one clock, as the stages of a pipeline (section 4.4). */
typedef struct World World;
/* Joins sims that have not been used yet. Each posts and waits on a thread of its own, and time
 * passes when all of them wait; so the schedule of every stage must run. The link out of a stage
 * carries bytes_s bytes/s, one message after the other, and each message arrives delay_s seconds
 * after it has left. Each sim gets a device->net with only post, receive (of tokens) and fail,
 * because the stages are one process and need not agree on anything. */
World *world_open(Device *const sim[], int stages, double bytes_s, double delay_s);
/* Says that the stage's thread has finished. */
void world_leave(Device *sim);
/* Closes the world and its sims. */
void world_close(World *world);

// -------------------------------------------------------------------------------------------------
// pipeline.c: the network of a pipeline (section 4.4)
// -------------------------------------------------------------------------------------------------

/* The kinds of messages: hidden states, new tokens, and the setup before the run. Messages of
 * different kinds never wait for each other. */
typedef enum { NET_STATES, NET_TOKENS, NET_SETUP, NKINDS_OF_MESSAGES } NetKind;

/* One stage's end of the network. pipeline.c provides it over MPI, sim.c between simulated machines
 * (where only tokens use it), and for the tests tests/local_net.c between the threads of a process.
 *
 * Several threads may call all functions except close at once, but for one pair of stages and one
 * kind only one thread at a time may call. Messages of one kind from one stage to another arrive in
 * the order in which they were sent. When any stage has failed, the functions return -1 and one
 * line that names the stage; over MPI the launcher ends all processes instead, and the network of
 * the tests ends the program. No function touches
 * its arguments after it has returned, however it ends. */
struct Net {
    int stage, stages; /* stages are counted from 0 */
    int neighbours;    /* stages on this machine, this one included; 0: not known */
    /* Returns when the bytes may be changed again, which may be before or after they arrive. */
    int (*send)(Net *, int to, NetKind kind, const void *bytes, size_t size, Error *);
    /* Returns when the bytes are here. A message of another size is an error, as if this stage had
     * failed. */
    int (*receive)(Net *, int from, NetKind kind, void *bytes, size_t size, Error *);
    /* Copies the bytes, and returns at once. */
    int (*post)(Net *, int to, NetKind kind, const void *bytes, size_t size, Error *);
    /* Says that this stage has failed. The functions of all stages then fail with "stage 2:
     * <text>", for the first stage that has failed. Over MPI it ends the job and does not return;
     * its caller has said why. */
    void (*fail)(Net *, const Error *);
    /* Closes it when all stages have called it. No other function is running then. */
    void (*close)(Net *);
};

/* Opens the network that mpirun has started this process in, of which there is one. The link is
 * slowed to bytes_s bytes/s, and a message takes delay_s seconds more (0: not slowed); messages of
 * NET_SETUP are not slowed. Returns NULL and err if it cannot be used; NULL alone if this process
 * is alone in it. */
Net *net_open_mpi(double bytes_s, double delay_s, Error *err);

// -------------------------------------------------------------------------------------------------
// trace.c: what happened on the lanes
// -------------------------------------------------------------------------------------------------

/* One call of Figure 4 as it ran on one lane. Ops of the same call that follow each other at once
 * are one slice. Times are seconds of Device.now. */
typedef struct {
    Lane lane;
    Kind kind;
    bool prefill, prefill_sweep, delegated;
    int i, j, k, batch;
    double begin, end;
    Bytes bytes; /* moved; 0 for arithmetic */
} Slice;

/* A part of Table 4 in one phase: the seconds in which its lanes were busy, and those of them in
 * which a processor was busy too. */
typedef struct {
    double busy_s, hidden_s;
} Share;
enum { COMPUTE, WEIGHT_READ, CACHE_READ, CACHE_WRITE, ACTIVATION_MOVES, NPARTS };
/* The seconds of a run by the parts of Table 4. */
typedef struct {
    Share part[2][NPARTS]; /* [prefill] */
    double total_s[2];     /* [prefill] seconds in which anything was busy */
    double busy_s;         /* seconds in which some lane was busy, except those of channel NET */
} Breakdown;

/* The KV pages and sequences of one sweep, from the end of the sweep before it on. */
typedef struct {
    double at;         /* seconds */
    int pages[NTIERS]; /* KV pages of each tier */
    int sequences;     /* in flight */
} Held;

/* The record of what a device did, in the order in which calls ended on each lane. */
struct Trace {
    char name[64];   /* heads its rows in the viewer: the model, or the stage of a pipeline */
    double ready_at; /* Device.now when all stages were ready, where their clocks differ; else 0 */
    Slice *slice;
    size_t n;
    size_t limit; /* after so many more slices, the finished ones are added up and dropped; 0: all
                     are kept */
    size_t kept;  /* slices that the last drop kept because they had not finished */
    Breakdown dropped; /* the sum of the dropped slices */
    long last[NLANES]; /* 1 + index of each lane's newest slice */
    Held *held; /* [sweeps], one for each sweep and one for the end; written by the thread that
                   posts */
    size_t sweeps;
};

/* Records what a sweep holds, if the trace is for a file (without a limit). */
void trace_hold(Trace *trace, const Held *held);
/* Writes n traces as Chrome trace JSON (chrome://tracing, Perfetto): each trace is a process, each
 * lane a row, and each call a slice with its i, j, k, its batch and that batch's token, bytes and
 * phase. Times are in microseconds from the first slice of all traces. A failed write shows in
 * ferror(out). */
void trace_write(const Trace *traces, int n, FILE *out);
void trace_free(Trace *trace);

extern const char *const part_name[NPARTS];
/* Adds up a trace as Table 4 does. Two lanes that are busy with the same part at the same time
 * count once. COMPUTE is the lanes of the GPU and of the CPU; its hidden_s is the time in which
 * some copy ran beside them. A sweep in which some batch prefills counts as prefill, as in
 * RunStats. */
Breakdown trace_breakdown(const Trace *trace);

// -------------------------------------------------------------------------------------------------
// hardware.c: a machine as numbers (section 4.3, Table 8)
// -------------------------------------------------------------------------------------------------

enum { MAX_POINTS = 16, MOST_NAME = 95 };
/* A rate that depends on a size. Between two points, seconds are linear in the size; outside,
 * proportional to it. */
typedef struct {
    int n; /* points, by ascending size; 0: there is no curve */
    double size[MAX_POINTS], rate[MAX_POINTS];
} Curve;

/* Bytes/s that stand for a disk which cannot be written: so few that the search does not use it. */
static const double NO_DISK = 1e6;

/* The hardware parameters of section 4.3 and Table 8. Of a pair, [0] holds in generation, [1] in
 * prefill. */
struct Hardware {
    char
        name[MOST_NAME + 65]; /* the file's name for it, followed by the numbers that are changed */
    union {                   /* bytes that the tiers can hold */
        struct {
            double gmem, cmem, nmem;
        };
        double mem[NTIERS];
    };
    union { /* bytes/s of the links */
        struct {
            double ctog_bdw[2], gtoc_bdw[2], dtoc_bdw[2], ctod_bdw[2];
        };
        double bdw[CTOD + 1][2];
    };
    double mm_flops[2];  /* FLOP/s of linear */
    double bmm_flops[2]; /* FLOP/s of attention on the GPU */
    double cpu_flops[2]; /* FLOP/s of attention on the CPU */

    /* keys that a file may leave out */
    double gpu_bdw,
        cpu_bdw;       /* bytes/s at which the processors read their own memory; 0: no bound */
    double op_s;       /* seconds that every op takes in addition; 0: none */
    bool shared_cores; /* a host device: GPU and CPU lanes run on the same cores, activations
                          are F32 */
    /* seconds of these cores for each byte that a link copies within memory, or that is read from
     * or written to disk; 0: none */
    double copy_core_s, disk_core_s;
    /* FLOP/s as measured, memory reads included: linear by its rows; attention by the tokens of a
     * prompt, and by the tokens that a new one attends to. They replace mm_flops, bmm_flops and
     * cpu_flops. */
    Curve mm_rows, bmm_tokens[2], cpu_tokens;
    Curve mm_packed;              /* like mm_rows, with packed weights */
    Curve bmm_packed, cpu_packed; /* like bmm_tokens[0] and cpu_tokens, with packed pages */
};

/* Reads a hardware file: one JSON object with name, gmem cmem nmem, ctog_bdw gtoc_bdw dtoc_bdw
 * ctod_bdw, mm_flops bmm_flops cpu_flops, each rate also as a pair KEY_p, KEY_g; optional gpu_bdw
 * cpu_bdw op_s shared_cores copy_core_s disk_core_s; optional curves mm_rows, bmm_tokens_p,
 * bmm_tokens_g, cpu_tokens, mm_packed, bmm_packed, cpu_packed, lists of [size, FLOP/s] by ascending
 * size; sources, an object of texts that say where each value is from. Returns -1 and one line
 * (EXIT_USAGE) for a missing, unknown, negative, zero or non-numeric value. */
int hardware_read(Hardware *hardware, const char *path, Error *err);
/* Changes one number of a machine that was read: "KEY=NUMBER". For a rate, KEY changes both phases;
 * KEY_p and KEY_g change one. Adds the change to the name where there is room. Returns -1 and one
 * line (EXIT_USAGE) for a value that the file could not hold, or that a curve of the machine
 * replaces. */
int hardware_change(Hardware *hardware, const char *change, Error *err);
/* Writes a file that hardware_read reads back to the same numbers. measured says by whom and when
 * it was measured, and the file then also says how each value was measured; NULL: it was not. A
 * failed write shows in ferror(out). */
void hardware_write(const Hardware *hardware, const char *measured, FILE *out);

/* Returns the share of shared cores that a busy link takes. */
static inline double link_cores(const Hardware *hardware, Channel link, bool prefill) {
    return hardware->bdw[link][prefill] *
           (link < DTOC ? hardware->copy_core_s : hardware->disk_core_s);
}
/* Returns the seconds in which a processor reads or writes so many bytes of its own memory; 0 where
 * bdw is 0. */
static inline double memory_seconds(double bytes, double bdw) { return bdw > 0 ? bytes / bdw : 0; }

/* Returns the seconds of flops of one size. Between two points of the curve, the seconds for a flop
 * of each unit of size are interpolated linearly. */
double curve_seconds(const Curve *curve, double size, double flops);

/* The next three functions return the seconds that an op takes at full speed, without op_s. They
 * use the curve; without one, the longer of computing and of reading and writing memory. act_bytes
 * is the bytes of an element of x and y. */

/* A product y (m, n) = x (m, k) w^T. packed: w is packed, and the product reads its codes. */
typedef struct {
    double m, n, k, act_bytes;
    bool packed;
} Linear;
double linear_seconds(const Hardware *hardware, bool prefill, Linear y);
/* Returns the seconds of causal attention of nseq prompts of s tokens. Each has s (s + 1) / 2 pairs
 * of a query and a key, of 4 h1 flops. */
double attend_prefill_seconds(const Hardware *hardware, double nseq, double s, double h1,
                              double act_bytes);
/* Returns the seconds of attention of new tokens to `len` tokens each over paged KV: for each of
 * the numbers in their queries, nseq h1 of them, 4 flops and as many bytes a token; packed, fewer
 * bytes. */
double attend_seconds(const Hardware *hardware, bool on_cpu, bool prefill, double queries,
                      double len, bool packed);

#ifdef __cplusplus
}
#endif
#endif
