/* hardware.h: a machine as numbers (section 4.3, Table 7), and the seconds that an op takes on it. The cost model
 * (policy.c) and the sim (sim.c) ask here, so that they agree. */
#ifndef HARDWARE_H
#define HARDWARE_H
#include <stdio.h>

#include "flexgen.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A rate that depends on a size: between two points, seconds are taken to be linear in the size; outside, proportional
 * to it. */
enum { MAX_POINTS = 16, MOST_NAME = 95 };
typedef struct {
    int n; /* points, by ascending size; 0: there is no curve */
    double size[MAX_POINTS], rate[MAX_POINTS];
} Curve;

/* Bytes/s that stand for a disk which cannot be written: so few that the search leaves it alone. */
static const double NO_DISK = 1e6;

/* The hardware parameters of section 4.3 and Table 7. Of a pair [0] holds in generation, [1] in prefill. */
struct Hardware {
    char name[MOST_NAME + 65]; /* a file's, and behind it what is changed */
    union {                    /* bytes that the tiers can hold */
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
    double mm_flops[2], bmm_flops[2], cpu_flops[2]; /* FLOP/s of linear, of attention on the GPU, on the CPU */
    /* keys that a file may leave out */
    double gpu_bdw, cpu_bdw; /* bytes/s at which the processors read their own memory; 0: no bound */
    double op_s;             /* seconds that every op takes in addition; 0 */
    bool shared_cores;       /* a host device: GPU and CPU lanes run on the same cores, activations are F32 */
    /* seconds of these cores for each byte that a link copies within memory, or that is read from or written to disk; 0 */
    double copy_core_s, disk_core_s;
    /* FLOP/s as measured, with the reading of memory: of linear by its rows; of attention by the tokens of a prompt, and by
     * the tokens that a new one attends to. They replace mm_flops, bmm_flops and cpu_flops. */
    Curve mm_rows, bmm_tokens[2], cpu_tokens;
    Curve mm_packed, bmm_packed, cpu_packed; /* of linear with packed weights; of attention to packed pages */
};

/* Reads a hardware file: one JSON object with name, gmem cmem nmem, ctog_bdw gtoc_bdw dtoc_bdw ctod_bdw, mm_flops bmm_flops
 * cpu_flops, each rate also as a pair KEY_p, KEY_g; optional gpu_bdw cpu_bdw op_s shared_cores copy_core_s disk_core_s;
 * optional curves mm_rows, bmm_tokens_p, bmm_tokens_g, cpu_tokens, mm_packed, bmm_packed, cpu_packed, lists of [size,
 * FLOP/s] by ascending size; sources, an object of texts that say where each value is from. -1 and one line (EXIT_USAGE)
 * for a missing, unknown, negative, zero or non-numeric value. */
int hardware_read(Hardware *hardware, const char *path, Error *err);
/* Changes one number of a machine that was read: "KEY=NUMBER"; of a rate KEY is both phases, KEY_p and KEY_g are one. The
 * name says so, too, where there is room. -1 and one line (EXIT_USAGE) for what the file could not hold, or what a curve of
 * the machine replaces. */
int hardware_change(Hardware *hardware, const char *change, Error *err);
/* Writes a file that hardware_read reads back to the same numbers. measured: by whom and when; then it also says how each
 * value was (NULL: it was not). What could not be written shows in ferror(out). */
void hardware_write(const Hardware *hardware, const char *measured, FILE *out);

/* The share of shared cores that a busy link takes. */
static inline double link_cores(const Hardware *hardware, Channel link, bool prefill) {
    return hardware->bdw[link][prefill] * (link < DTOC ? hardware->copy_core_s : hardware->disk_core_s);
}
/* Seconds in which a processor reads or writes so many bytes of its own memory; bdw 0: none. */
static inline double memory_seconds(double bytes, double bdw) { return bdw > 0 ? bytes / bdw : 0; }

/* Seconds that an op takes at full speed, without op_s. */
/* y (m, n) = x (m, k) w^T: by the curve; without one, the longer of computing and of reading and writing everything.
 * act_bytes: of an element of x and y. packed: the weights are packed, and are unpacked on the way. */
double linear_seconds(const Hardware *hardware, bool prefill, double m, double n, double k, double act_bytes, bool packed);
/* Causal attention of nseq prompts of s tokens. Each has s (s + 1) / 2 pairs of a query and a key, of 4 h1 flops. */
double attend_prefill_seconds(const Hardware *hardware, double nseq, double s, double h1, double act_bytes);
/* nseq new tokens attend to `len` tokens each over paged KV: 4 h1 flops and as many bytes a token; packed, fewer bytes. */
double attend_seconds(const Hardware *hardware, bool on_cpu, bool prefill, double nseq, double len, double h1, bool packed);

#ifdef __cplusplus
}
#endif
#endif
