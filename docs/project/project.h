/* project.h: the four functions of an entry to the open project, docs/PROJECT.md.
 *
 * The judge calls them through a pipe. Each kind runs in processes of its own: what packs, what
 * unpacks, what chooses pages, and what seats prompts have no memory in common, and none of them
 * sees a token or a text. A process packs all matrices of weights, or the pages of one layer and
 * story; when it has ended, another unpacks them. */
#ifndef PROJECT_H
#define PROJECT_H
#include "base/simd.h" /* f16, f16_to_f32, f32_to_f16 */

enum { PAGE = 16 }; /* tokens of a page of the KV cache */

/* The matrices of numbers that are packed. */
typedef enum { WEIGHTS, KEYS, VALUES } What;
typedef struct {
    int32_t what, rows, cols; /* WEIGHTS: (outputs, inputs); KEYS, VALUES: (PAGE, nh hd) */
    int32_t hd;               /* numbers of a head */
} Matrix;

/* Packs x, the numbers of a matrix row by row, into `to`, which has room for 4 bytes a number.
 * Returns the number of bytes, at most 2 a number. These bytes count, and nothing else reaches
 * unpack. */
size_t pack(uint8_t *to, const float *x, Matrix m);
/* Makes x of what pack wrote. Its numbers are then rounded to F16. */
void unpack(float *x, const uint8_t *from, size_t bytes, Matrix m);

/* Chooses the pages of a sequence that attention reads in one step of one layer: load[p] = 1 or 0
 * for each of its full pages. The page that is not full yet is always read, and so are all pages in
 * prefill. mass[p] is the share of its attention, over all heads, that the sequence gave to page p
 * when it last read it; age[p] counts the steps since then, 1 being the step before. The steps of
 * one layer and sequence are asked in order, in a process of their own. */
void choose_pages(uint8_t *load, const float *mass, const int32_t *age, int pages);

/* The state of a flight before a sweep (flexgen.h, Admission). */
typedef struct {
    int32_t sweep, seats, seated; /* this sweep; seats of the block; those that are taken */
    int32_t gbs, num_gpu_batches; /* the block of entry.json */
    int32_t n;                    /* tokens that a prompt generates */
} Line;
/* Returns how many more prompts may enter now. It is asked only if entry.json has the schedule
 * "own", and gets the same answer for the same question. */
int may_enter(const Line *line);
#endif
