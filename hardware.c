/* hardware.c: a machine as numbers (section 4.3), and what an op takes on it.
 *
 * A hardware file is one JSON object: what the paper's Table 7 calls hardware constants, in bytes, bytes/s and FLOP/s. A
 * rate may differ between the two stages, and then comes as a pair of keys with _p (prefill) and _g (generation). A value
 * that is missing, misspelt or impossible is refused by name, never guessed: a wrong rate gives a wrong policy that looks
 * like a right one. The file is a flag's argument, so whatever is wrong with it asks for EXIT_USAGE.
 * Read next: policy.c, which asks what a placement costs on it; sim.c, which runs a schedule on the same numbers;
 * profile.c, which measures them; hardware/, the machines that come with the program. */
#include <cjson/cJSON.h>
#include <math.h>

#include "flexgen.h"

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
};
enum { NFIELDS = sizeof fields / sizeof *fields, MAX_KEY = 32 };
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

double attend_seconds(const Hardware *h, bool on_cpu, bool prefill, double nseq, double len, double h1) {
    const Curve *curve = on_cpu ? &h->cpu_tokens : &h->bmm_tokens[0];
    double flops = 4 * h1 * nseq * len;
    if (curve->n) return curve_seconds(curve, len, flops);
    return bound_seconds(flops, (on_cpu ? h->cpu_flops : h->bmm_flops)[prefill], flops, on_cpu ? h->cpu_bdw : h->gpu_bdw);
}
