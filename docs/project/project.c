/* project.c: the baseline of the open project, docs/PROJECT.md: FlexGen's own groups of 4 bits, all
 * pages, and the diagonal schedule. Change any of the functions. */
#include "project.h"

#include <math.h>

enum { GROUP = 64 };

/* Bits of a number. A group of 64 then takes whole bytes. */
static int bits_of(Matrix m) {
    (void)m;
    return 4;
}

/* Each group has its minimum and its scale as F16, and then its codes (section 5). */
size_t pack(uint8_t *to, const float *x, Matrix m) {
    uint8_t *begin = to;
    int bits = bits_of(m), most = (1 << bits) - 1;
    for (int g = 0; g < m.rows * m.cols; g += GROUP, x += GROUP) {
        float min = x[0], max = x[0];
        for (int e = 1; e < GROUP; e++) {
            min = fminf(min, x[e]);
            max = fmaxf(max, x[e]);
        }
        f16 header[2] = {f32_to_f16(min), f32_to_f16((max - min) / most)};
        float least = f16_to_f32(header[0]), scale = f16_to_f32(header[1]);
        memcpy(to, header, sizeof header);
        to += sizeof header;
        unsigned waiting = 0; /* codes that are not written yet, in the lowest n bits */
        for (int e = 0, n = 0; e < GROUP; e++) {
            float steps = scale > 0 ? roundf((x[e] - least) / scale) : 0;
            waiting |= (unsigned)fminf(fmaxf(steps, 0), most) << n;
            for (n += bits; n >= 8; n -= 8) {
                *to++ = (uint8_t)waiting;
                waiting >>= 8;
            }
        }
    }
    return (size_t)(to - begin);
}

void unpack(float *x, const uint8_t *from, size_t bytes, Matrix m) {
    (void)bytes;
    int bits = bits_of(m), most = (1 << bits) - 1;
    for (int g = 0; g < m.rows * m.cols; g += GROUP) {
        f16 header[2];
        memcpy(header, from, sizeof header);
        from += sizeof header;
        float least = f16_to_f32(header[0]), scale = f16_to_f32(header[1]);
        unsigned waiting = 0;
        for (int e = 0, n = 0; e < GROUP; e++, n -= bits) {
            for (; n < bits; n += 8)
                waiting |= (unsigned)*from++ << n;
            *x++ = least + scale * (waiting & most);
            waiting >>= bits;
        }
    }
}

void choose_pages(uint8_t *load, const float *mass, const int32_t *age, int pages) {
    (void)mass, (void)age;
    memset(load, 1, pages);
}

/* The diagonal schedule: one more batch is open every n / K sweeps. */
int may_enter(const Line *line) {
    int K = line->num_gpu_batches, open = 1 + line->sweep * K / line->n;
    return (open < K ? open * line->gbs : line->seats) - line->seated;
}
