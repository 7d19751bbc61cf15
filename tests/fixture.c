/* fixture.c: what the suites share: directories, files, data, policies. tests.h says what each function does. */
#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests.h"

static char temp_root[256]; /* made when the first is asked for */
static int temp_count;

const char *temp_dir(void) {
    static char dir[300];
    if (!temp_root[0]) {
        const char *base = getenv("TMPDIR");
        snprintf(temp_root, sizeof temp_root, "%s/flexgen-test-XXXXXX", base ? base : "/tmp");
        CHECK(mkdtemp(temp_root));
    }
    snprintf(dir, sizeof dir, "%s/%d", temp_root, temp_count++);
    CHECK(mkdir(dir, 0777) == 0);
    return dir;
}

int count_files(const char *dir) {
    int n = -2; /* . and .. */
    DIR *d = opendir(dir);
    CHECK(d);
    while (readdir(d)) n++;
    closedir(d);
    return n;
}

void write_file(const char *dir, const char *name, const void *bytes, size_t len) {
    char path[600];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(bytes, 1, len, f) == len && fclose(f) == 0);
}

char *in_dir(const char *dir, const char *name) {
    static char path[4][700];
    static int next;
    next = (next + 1) % 4;
    snprintf(path[next], sizeof path[next], "%s/%s", dir, name);
    return path[next];
}

char *contents(const char *path, size_t *len) {
    enum { MOST = 1 << 28 };
    Error err;
    size_t bytes;
    char *text = file_read(path, MOST, &bytes, &err);
    if (!text) CU_FAIL_FATAL(err.text);
    if (len) *len = bytes;
    return text;
}

void copy_file(const char *from, const char *to, const char *name) {
    size_t len;
    char *text = contents(in_dir(from, name), &len);
    write_file(to, name, text, len);
    free(text);
}

bool has_python(void) { return !system("python3 -c '' 2>/dev/null"); }

void redirect(int fd, const char *path, int flags) {
    const int opened = open(path, flags, 0644);
    CHECK(opened >= 0 && dup2(opened, fd) == fd);
    close(opened);
}

int split_words(char *text, char *words[], int most) {
    int n = 0;
    for (char *at = text + strspn(text, " "); *at; at += strspn(at, " ")) {
        const bool quoted = *at == '\'';
        CHECK(n + 1 < most);
        words[n++] = at += quoted;
        at += strcspn(at, quoted ? "'" : " ");
        if (*at) *at++ = 0;
    }
    words[n] = NULL;
    return n;
}

double max_norm_error(const float *a, const float *b, size_t n) {
    double diff = 0, ref = 0;
    for (size_t i = 0; i < n; i++) {
        double d = fabs((double)a[i] - b[i]);
        if (isnan(d)) return NAN;
        if (d > diff) diff = d;
        if (fabs(b[i]) > ref) ref = fabs(b[i]);
    }
    return ref > 0 ? diff / ref : diff;
}

bool plain_pack(uint8_t *to, const f16 *x, size_t stride, int n) {
    bool all = true;
    for (int first = 0; first < n; first += GROUP, to += GROUP_BYTES) {
        const int count = imin(GROUP, n - first);
        const f16 *group = x + first * stride;
        float min = INFINITY, max = -INFINITY;
        f16 header[2] = {0x7e00, 0};
        bool finite = true;
        for (int i = 0; i < count; i++) {
            const float v = f16_to_f32(group[i * stride]);
            min = fminf(min, v), max = fmaxf(max, v), finite &= isfinite(v) != 0;
        }
        const float exact = (max - min) / 15;
        if (finite) header[0] = f32_to_f16(min + 0.f), header[1] = f32_to_f16(exact);
        if (finite && f16_to_f32(header[1]) < exact) header[1]++;
        if (finite && min + 15 * f16_to_f32(header[1]) >= 65520) header[1]--;
        memset(to, 0, quant_bytes(count));
        memcpy(to, header, sizeof header);
        for (int i = 0; i < count && header[1]; i++) {
            const int code = (int)rintf((f16_to_f32(group[i * stride]) - min) * (1 / f16_to_f32(header[1])));
            to[4 + i / 32 * 16 + i % 16] |= (uint8_t)(code << i % 32 / 16 * 4);
        }
        all &= finite;
    }
    return all;
}

void plain_numbers(float *x, const uint8_t *from, int n) {
    for (int i = 0; i < n; i++) {
        const uint8_t *group = from + i / GROUP * GROUP_BYTES;
        f16 header[2];
        memcpy(header, group, sizeof header);
        const int code = group[4 + i % GROUP / 32 * 16 + i % 16] >> i % 32 / 16 * 4 & 15;
        x[i] = f16_to_f32(header[0]) + f16_to_f32(header[1]) * (float)code;
    }
}

Hardware test_fast_machine(void) {
    Hardware h = {.name = "fast", .gmem = 1e18, .cmem = 1e18, .nmem = 1e18};
    for (int p = 0; p < 2; p++) {
        h.ctog_bdw[p] = h.gtoc_bdw[p] = h.dtoc_bdw[p] = h.ctod_bdw[p] = 1e25;
        h.mm_flops[p] = h.bmm_flops[p] = h.cpu_flops[p] = 1e25;
    }
    return h;
}

float test_random(uint64_t *state) {
    uint64_t z = (*state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return (float)((double)((z ^ (z >> 31)) >> 40) / 8388608.0 - 1.0);
}

int test_below(uint64_t *state, int n) { return imin(n - 1, (int)((test_random(state) + 1) / 2 * (float)n)); }
double test_spread(uint64_t *state, double low, double high) { return low * pow(high / low, (test_random(state) + 1) / 2); }

OptConfig opt_named(const char *name) {
    OptConfig config;
    CHECK(opt_config_by_name(&config, name) == 0);
    return config;
}

Task equal_task(int count, int s, int n) {
    Task task = {.prompts = xcalloc(count, sizeof(Prompt)), .count = count, .sampling = {.top_p = 1}};
    for (int i = 0; i < count; i++) task.prompts[i] = (Prompt){.ids = xcalloc(s, sizeof(int32_t)), .s = s, .n = n};
    return task;
}

void free_task(Task *task) {
    for (int i = 0; i < task->count; i++) free(task->prompts[i].ids);
    free(task->prompts);
}

static int remove_one(const char *path, const struct stat *st, int flag, struct FTW *ftw) {
    (void)st, (void)flag, (void)ftw;
    return remove(path);
}

void remove_temp_dirs(void) {
    if (temp_root[0]) nftw(temp_root, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

Policy all_gpu(int gbs, int num_gpu_batches) {
    return (Policy){
        .wg = 1, .cg = 1, .hg = 1, .gbs = gbs, .num_gpu_batches = num_gpu_batches, .overlap = true, .page_tokens = 16};
}
