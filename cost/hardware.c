/* hardware.c: a machine as numbers (section 4.3), and what an op takes on it.
 *
 * A hardware file is one JSON object: what the paper's Table 7 calls hardware constants, in bytes, bytes/s and FLOP/s. A
 * rate may differ between the two stages, and then comes as a pair of keys with _p (prefill) and _g (generation). A value
 * that is missing, misspelt or impossible is refused by name, never guessed: a wrong rate gives a wrong policy that looks
 * like a right one. The file is a flag's argument, so whatever is wrong with it asks for EXIT_USAGE. What is written is
 * read back to the same bits.
 * Read next: policy.c, which asks what a placement costs on it; sim.c, which runs a schedule on the same numbers;
 * profile.c, which measures them; hardware/, the machines that come with the program. */
#include <cjson/cJSON.h>
#include <math.h>

#include "cost/cost.h"

enum { MAX_HARDWARE_FILE = 1 << 20 };

// ---------------------------------------------------------------------------------------------------------------
// A machine as numbers
// ---------------------------------------------------------------------------------------------------------------

typedef enum { ONE, PAIR, OPTIONAL } Form;

/* A key of a hardware file. Bounds keep every size below 2^63 and every quotient of a size and a rate finite. */
typedef struct {
    const char *key, *unit;
    Form form;
    double lo, hi;
    size_t offset; /* of a double in Hardware, of two for a PAIR */
} Field;

#define MEMORY(key) \
    { #key, "bytes", ONE, 1, 1e18, offsetof(Hardware, key) }
#define RATE(key, unit, form) \
    { #key, unit, form, 1e-9, 1e30, offsetof(Hardware, key) }
static const Field fields[] = {
    MEMORY(gmem),
    MEMORY(cmem),
    MEMORY(nmem),
    RATE(ctog_bdw, "bytes/s", PAIR),
    RATE(gtoc_bdw, "bytes/s", PAIR),
    RATE(dtoc_bdw, "bytes/s", PAIR),
    RATE(ctod_bdw, "bytes/s", PAIR),
    RATE(mm_flops, "FLOP/s", PAIR),
    RATE(bmm_flops, "FLOP/s", PAIR),
    RATE(cpu_flops, "FLOP/s", PAIR),
    RATE(gpu_bdw, "bytes/s", OPTIONAL),
    RATE(cpu_bdw, "bytes/s", OPTIONAL),
    {"op_s", "seconds", OPTIONAL, 0, 1e9, offsetof(Hardware, op_s)},
    {"copy_core_s", "seconds", OPTIONAL, 0, 1e9, offsetof(Hardware, copy_core_s)},
    {"disk_core_s", "seconds", OPTIONAL, 0, 1e9, offsetof(Hardware, disk_core_s)},
};
/* Keys of curves, by what their sizes count. */
static const struct {
    Field rate;
    const char *sizes;
} curves[] = {
    {RATE(mm_rows, "FLOP/s", OPTIONAL), "rows"},
    {{"bmm_tokens_p", "FLOP/s", OPTIONAL, 1e-9, 1e30, offsetof(Hardware, bmm_tokens[1])}, "tokens"},
    {{"bmm_tokens_g", "FLOP/s", OPTIONAL, 1e-9, 1e30, offsetof(Hardware, bmm_tokens[0])}, "tokens"},
    {RATE(cpu_tokens, "FLOP/s", OPTIONAL), "tokens"},
    {RATE(mm_packed, "FLOP/s", OPTIONAL), "rows"},
    {RATE(bmm_packed, "FLOP/s", OPTIONAL), "tokens"},
    {RATE(cpu_packed, "FLOP/s", OPTIONAL), "tokens"},
};
enum { NFIELDS = sizeof fields / sizeof *fields, NCURVES = sizeof curves / sizeof *curves, MAX_KEY = 32 };
static const double MOST_SIZE = 1e15;
static const char *const other_keys[] = {"name", "sources", "shared_cores"};

static const cJSON *member(const cJSON *object, const char *key) { return cJSON_GetObjectItemCaseSensitive(object, key); }

/* A value as a message shows it. */
static const char *describe(char *text, size_t size, const cJSON *value) {
    if (cJSON_IsNumber(value))
        snprintf(text, size, "%.15g", value->valuedouble);
    else if (cJSON_IsString(value))
        snprintf(text, size, "the text \"%.60s\"", value->valuestring);
    else
        snprintf(text, size, "%s",
                 cJSON_IsObject(value)  ? "an object"
                 : cJSON_IsArray(value) ? "a list"
                 : cJSON_IsBool(value)  ? cJSON_IsTrue(value) ? "true" : "false"
                                        : "null");
    return text;
}

static int read_number(double *number, const cJSON *value, const Field *f, const char *path, const char *key, Error *err) {
    char found[100];
    if (!cJSON_IsNumber(value) || !(value->valuedouble >= f->lo && value->valuedouble <= f->hi))
        return fail(err, EXIT_USAGE, "%s: %s is %s; expected a number of %s from %g to %g", path, key,
                    describe(found, sizeof found, value), f->unit, f->lo, f->hi);
    *number = value->valuedouble;
    return 0;
}

/* KEY for both stages, or KEY_p and KEY_g. */
static int read_pair(double stage[2], const cJSON *json, const Field *f, const char *path, Error *err) {
    const cJSON *both = member(json, f->key), *each[2];
    char key[2][MAX_KEY];
    for (int p = 0; p < 2; p++) {
        snprintf(key[p], MAX_KEY, "%s_%c", f->key, "gp"[p]);
        each[p] = member(json, key[p]);
        if (both && each[p])
            return fail(err, EXIT_USAGE, "%s: has both %s and %s; expected %s alone, or %s_p and %s_g", path, f->key,
                        key[p], f->key, f->key, f->key);
    }
    for (int p = 0; p < 2; p++) {
        if (!both && !each[p])
            return fail(err, EXIT_USAGE, "%s: has no %s; expected %s, a number of %s, or %s_p and %s_g", path,
                        each[!p] ? key[p] : f->key, f->key, f->unit, f->key, f->key);
        if (read_number(&stage[p], both ? both : each[p], f, path, both ? f->key : key[p], err) != 0) return -1;
    }
    return 0;
}

static int read_field(Hardware *hardware, const cJSON *json, const Field *f, const char *path, Error *err) {
    double *to = (double *)((char *)hardware + f->offset);
    const cJSON *value = member(json, f->key);
    if (f->form == PAIR) return read_pair(to, json, f, path, err);
    if (!value && f->form == OPTIONAL) return 0;
    if (!value) return fail(err, EXIT_USAGE, "%s: has no %s; expected a number of %s", path, f->key, f->unit);
    return read_number(to, value, f, path, f->key, err);
}

/* Point i of a curve, counted from 1 for people: [size, rate], the size above the one before it. */
static int read_point(Curve *curve, int i, const cJSON *point, const char *sizes, const Field *f, const char *path,
                      Error *err) {
    const cJSON *size = cJSON_GetArrayItem(point, 0), *rate = cJSON_GetArrayItem(point, 1);
    double least = i > 1 ? nextafter(curve->size[i - 2], INFINITY) : 1;
    char found[100], key[MAX_KEY + 40];
    if (!cJSON_IsArray(point))
        return fail(err, EXIT_USAGE, "%s: %s: point %d is %s; expected [%s, %s]", path, f->key, i,
                    describe(found, sizeof found, point), sizes, f->unit);
    if (cJSON_GetArraySize(point) != 2)
        return fail(err, EXIT_USAGE, "%s: %s: point %d is a list of %d; expected [%s, %s]", path, f->key, i,
                    cJSON_GetArraySize(point), sizes, f->unit);
    if (!cJSON_IsNumber(size) || !(size->valuedouble >= least && size->valuedouble <= MOST_SIZE))
        return fail(err, EXIT_USAGE, "%s: %s: point %d has a size of %s; expected a number of %s %s %.15g, to %g", path,
                    f->key, i, describe(found, sizeof found, size), sizes, i > 1 ? "above" : "from",
                    i > 1 ? curve->size[i - 2] : 1, MOST_SIZE);
    snprintf(key, sizeof key, "%s: the rate of point %d", f->key, i);
    curve->size[i - 1] = size->valuedouble;
    return read_number(&curve->rate[i - 1], rate, f, path, key, err);
}

static int read_curve(Hardware *hardware, const cJSON *json, const Field *f, const char *sizes, const char *path,
                      Error *err) {
    Curve *curve = (Curve *)((char *)hardware + f->offset);
    const cJSON *list = member(json, f->key), *point = list ? list->child : NULL;
    char found[100];
    int n = cJSON_GetArraySize(list);
    if (!list) return 0;
    if (!cJSON_IsArray(list))
        return fail(err, EXIT_USAGE, "%s: %s is %s; expected a list of points [%s, %s]", path, f->key,
                    describe(found, sizeof found, list), sizes, f->unit);
    if (n < 1 || n > MAX_POINTS)
        return fail(err, EXIT_USAGE, "%s: %s has %d points; expected 1 to %d", path, f->key, n, MAX_POINTS);
    for (int i = 1; i <= n; i++, point = point->next)
        if (read_point(curve, i, point, sizes, f, path, err) != 0) return -1;
    curve->n = n;
    return 0;
}

static int read_name(Hardware *hardware, const cJSON *json, const char *path, Error *err) {
    const cJSON *name = member(json, "name");
    char found[100];
    bool printable = cJSON_IsString(name) && name->valuestring[0];
    for (const char *c = printable ? name->valuestring : ""; *c; c++) /* it is printed on lines of its own */
        if ((unsigned char)*c < ' ' || *c == 127) printable = false;
    if (!name) return fail(err, EXIT_USAGE, "%s: has no name; expected a text that says which machine this is", path);
    if (!printable || strlen(name->valuestring) >= sizeof hardware->name)
        return fail(err, EXIT_USAGE, "%s: name is %s; expected a text of 1 to %zu bytes without control characters", path,
                    describe(found, sizeof found, name), sizeof hardware->name - 1);
    strcpy(hardware->name, name->valuestring);
    return 0;
}

static bool known_key(const char *key) {
    char stage[MAX_KEY];
    for (size_t i = 0; i < sizeof other_keys / sizeof *other_keys; i++)
        if (strcmp(key, other_keys[i]) == 0) return true;
    for (int i = 0; i < NCURVES; i++)
        if (strcmp(key, curves[i].rate.key) == 0) return true;
    for (int i = 0; i < NFIELDS; i++) {
        if (strcmp(key, fields[i].key) == 0) return true;
        for (int p = 0; p < 2 && fields[i].form == PAIR; p++) {
            snprintf(stage, sizeof stage, "%s_%c", fields[i].key, "gp"[p]);
            if (strcmp(key, stage) == 0) return true;
        }
    }
    return false;
}

/* Every key means something, every source is of a value that is there. */
static int check_keys(const cJSON *json, const char *path, Error *err) {
    const cJSON *sources = member(json, "sources");
    char found[100];
    for (const cJSON *child = json->child; child; child = child->next)
        if (!known_key(child->string))
            return fail(err, EXIT_USAGE, "%s: has an unknown key \"%.60s\"; expected only the keys of a hardware file",
                        path, child->string);
    if (sources && !cJSON_IsObject(sources))
        return fail(err, EXIT_USAGE, "%s: sources is %s; expected an object of texts, one a key", path,
                    describe(found, sizeof found, sources));
    for (const cJSON *source = sources ? sources->child : NULL; source; source = source->next) {
        if (!cJSON_IsString(source))
            return fail(err, EXIT_USAGE, "%s: sources: %.60s is %s; expected a text that says where the value is from",
                        path, source->string, describe(found, sizeof found, source));
        if (!member(json, source->string))
            return fail(err, EXIT_USAGE, "%s: sources: has \"%.60s\", which is no key of this file; expected one that is",
                        path, source->string);
    }
    return 0;
}

static int read_object(Hardware *hardware, const cJSON *json, const char *path, Error *err) {
    const cJSON *shared = member(json, "shared_cores");
    char found[100];
    if (!cJSON_IsObject(json)) return fail(err, EXIT_USAGE, "%s: holds no JSON object; expected { ... }", path);
    if (check_keys(json, path, err) != 0 || read_name(hardware, json, path, err) != 0) return -1;
    for (int i = 0; i < NFIELDS; i++)
        if (read_field(hardware, json, &fields[i], path, err) != 0) return -1;
    for (int i = 0; i < NCURVES; i++)
        if (read_curve(hardware, json, &curves[i].rate, curves[i].sizes, path, err) != 0) return -1;
    if (shared && !cJSON_IsBool(shared))
        return fail(err, EXIT_USAGE, "%s: shared_cores is %s; expected true or false", path,
                    describe(found, sizeof found, shared));
    hardware->shared_cores = shared && cJSON_IsTrue(shared);
    return 0;
}

int hardware_read(Hardware *hardware, const char *path, Error *err) {
    size_t len;
    Hardware read = {.name = ""};
    char *text = file_read(path, MAX_HARDWARE_FILE, &len, err);
    cJSON *json = text ? json_parse(text, len, path, err) : NULL;
    int status = json ? read_object(&read, json, path, err) : -1;
    if (status == 0)
        *hardware = read;
    else
        err->code = EXIT_USAGE;
    cJSON_Delete(json);
    free(text);
    return status;
}

/* The shortest text that is read back to the same bits; cJSON's own printing is content with nearly the same. */
static cJSON *exact(double number) {
    char text[40];
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, number);
        if (strtod(text, NULL) == number) break;
    }
    return cJSON_CreateRaw(text);
}

static void write_field(cJSON *json, const Hardware *hardware, const Field *f) {
    const double *value = (const double *)((const char *)hardware + f->offset);
    char key[MAX_KEY];
    if (f->form == OPTIONAL && *value == 0) return;
    if (f->form != PAIR || value[0] == value[1]) {
        cJSON_AddItemToObject(json, f->key, exact(*value));
        return;
    }
    for (int p = 1; p >= 0; p--) {
        snprintf(key, sizeof key, "%s_%c", f->key, "gp"[p]);
        cJSON_AddItemToObject(json, key, exact(value[p]));
    }
}

static void write_curve(cJSON *json, const Hardware *hardware, const Field *f) {
    const Curve *curve = (const Curve *)((const char *)hardware + f->offset);
    cJSON *list = curve->n ? cJSON_AddArrayToObject(json, f->key) : NULL;
    for (int i = 0; i < curve->n; i++) {
        cJSON *point = cJSON_CreateArray();
        cJSON_AddItemToArray(point, exact(curve->size[i]));
        cJSON_AddItemToArray(point, exact(curve->rate[i]));
        cJSON_AddItemToArray(list, point);
    }
}

/* The sources of keys that are there; one of a rate is that of both its stages. */
static void write_sources(cJSON *json, const cJSON *sources) {
    cJSON *written = cJSON_AddObjectToObject(json, "sources");
    char key[MAX_KEY];
    for (const cJSON *source = sources->child; source; source = source->next) {
        if (member(json, source->string)) cJSON_AddStringToObject(written, source->string, source->valuestring);
        for (int p = 1; p >= 0; p--) {
            snprintf(key, sizeof key, "%.20s_%c", source->string, "gp"[p]);
            if (!member(json, source->string) && member(json, key))
                cJSON_AddStringToObject(written, key, source->valuestring);
        }
    }
}

void hardware_write(const Hardware *hardware, const cJSON *sources, FILE *out) {
    cJSON *json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "name", hardware->name);
    for (int i = 0; i < NFIELDS; i++) write_field(json, hardware, &fields[i]);
    if (hardware->shared_cores) cJSON_AddTrueToObject(json, "shared_cores");
    for (int i = 0; i < NCURVES; i++) write_curve(json, hardware, &curves[i].rate);
    if (sources) write_sources(json, sources);
    char *text = cJSON_Print(json);
    CHECK(text); /* only memory can be short */
    fprintf(out, "%s\n", text);
    cJSON_free(text);
    cJSON_Delete(json);
}

// ---------------------------------------------------------------------------------------------------------------
// What an op takes
// ---------------------------------------------------------------------------------------------------------------

/* Flops of one size over the rate there. */
static double curve_seconds(const Curve *c, double size, double flops) {
    int i = 1;
    if (size <= c->size[0]) return flops / c->rate[0];
    if (size >= c->size[c->n - 1]) return flops / c->rate[c->n - 1];
    while (size > c->size[i]) i++;
    double before = c->size[i - 1] / c->rate[i - 1], after = c->size[i] / c->rate[i]; /* seconds for a flop of each unit */
    double part = (size - c->size[i - 1]) / (c->size[i] - c->size[i - 1]);
    return flops / size * (before + part * (after - before));
}

/* The longer of computing and reading memory. */
static double bound_seconds(double flops, double rate, double bytes, double bdw) {
    return fmax(flops / rate, bdw > 0 ? bytes / bdw : 0);
}

double linear_seconds(const Hardware *h, bool prefill, double m, double n, double k, double act_bytes) {
    double flops = 2 * m * n * k;
    if (h->mm_rows.n) return curve_seconds(&h->mm_rows, m, flops);
    return bound_seconds(flops, h->mm_flops[prefill], 2 * n * k + act_bytes * m * (n + k), h->gpu_bdw);
}

double attend_prefill_seconds(const Hardware *h, double nseq, double s, double h1, double act_bytes) {
    double flops = 4 * h1 * nseq * s * (s + 1) / 2;
    if (h->bmm_tokens[1].n) return curve_seconds(&h->bmm_tokens[1], s, flops);
    return bound_seconds(flops, h->bmm_flops[1], nseq * s * h1 * (2 * act_bytes + 4), h->gpu_bdw);
}

/* Bytes of a packed number, of an F16: 4 bits, and a group's header of 32 for 64 numbers. */
static const double PACKED = 4.5 / 16;

double linear_packed_seconds(const Hardware *h, bool prefill, double m, double n, double k, double act_bytes) {
    double flops = 2 * m * n * k;
    if (h->mm_packed.n) return curve_seconds(&h->mm_packed, m, flops);
    if (h->mm_rows.n) return linear_seconds(h, prefill, m, n, k, act_bytes);
    return bound_seconds(flops, h->mm_flops[prefill], PACKED * 2 * n * k + act_bytes * m * (n + k), h->gpu_bdw);
}

double attend_seconds(const Hardware *h, bool on_cpu, bool prefill, double nseq, double len, double h1, bool packed) {
    const Curve *curve = on_cpu ? &h->cpu_tokens : &h->bmm_tokens[0], *fewer = on_cpu ? &h->cpu_packed : &h->bmm_packed;
    double flops = 4 * h1 * nseq * len, bytes = packed ? PACKED * flops : flops;
    if (packed && fewer->n) curve = fewer;
    if (curve->n) return curve_seconds(curve, len, flops);
    return bound_seconds(flops, (on_cpu ? h->cpu_flops : h->bmm_flops)[prefill], bytes, on_cpu ? h->cpu_bdw : h->gpu_bdw);
}
