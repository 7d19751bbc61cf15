/* hardware.c: a machine as numbers (section 4.3), and what an op takes on it.
 *
 * The first chapter is what the cost model and the sim ask. The others are the hardware file, one JSON object: what the
 * paper's Table 7 calls hardware constants, in bytes, bytes/s and FLOP/s. A rate may differ between the two phases, and
 * then comes as a pair of keys with _p (prefill) and _g (generation). A value that is missing, misspelt or impossible is
 * refused by name, never guessed: a wrong rate gives a wrong policy that looks like a right one. The file is a flag's
 * argument, so whatever is wrong with it asks for EXIT_USAGE. What is written is read back to the same bits. Read
 * next: profile.c, which measures them. */
#include "cost/hardware.h"

#include <cjson/cJSON.h>
#include <math.h>

#include "io/io.h"

// ---------------------------------------------------------------------------------------------------------------
// What an op takes: by the curve that was measured for it; where there is none, the longer of computing and of reading
// memory
// ---------------------------------------------------------------------------------------------------------------

static double bound_seconds(double flops, double rate, double bytes, double bdw) {
    return fmax(flops / rate, memory_seconds(bytes, bdw));
}

/* Flops of one size over the rate there. Between two points the seconds for a flop of each unit of size are on a line. */
static double curve_seconds(const Curve *c, double size, double flops) {
    int i = 1;
    if (size <= c->size[0]) return flops / c->rate[0];
    if (size >= c->size[c->n - 1]) return flops / c->rate[c->n - 1];
    while (size > c->size[i]) i++;
    double before = c->size[i - 1] / c->rate[i - 1], after = c->size[i] / c->rate[i];
    double part = (size - c->size[i - 1]) / (c->size[i] - c->size[i - 1]);
    return flops / size * (before + part * (after - before));
}

/* Bytes of a packed number, of an F16: 4 bits, and a group's header of 32 for 64 numbers. */
static const double PACKED = 4.5 / 16;

double linear_seconds(const Hardware *h, bool prefill, double m, double n, double k, double act_bytes, bool packed) {
    const Curve *curve = packed && h->mm_packed.n ? &h->mm_packed : &h->mm_rows;
    double flops = 2 * m * n * k, weights = (packed ? PACKED : 1) * 2 * n * k;
    if (curve->n) return curve_seconds(curve, m, flops);
    return bound_seconds(flops, h->mm_flops[prefill], weights + act_bytes * m * (n + k), h->gpu_bdw);
}

double attend_prefill_seconds(const Hardware *h, double nseq, double s, double h1, double act_bytes) {
    double flops = 4 * h1 * nseq * s * (s + 1) / 2;
    if (h->bmm_tokens[1].n) return curve_seconds(&h->bmm_tokens[1], s, flops);
    return bound_seconds(flops, h->bmm_flops[1], nseq * s * h1 * (2 * act_bytes + 4), h->gpu_bdw);
}

double attend_seconds(const Hardware *h, bool on_cpu, bool prefill, double nseq, double len, double h1, bool packed) {
    const Curve *curve = on_cpu ? &h->cpu_tokens : &h->bmm_tokens[0], *fewer = on_cpu ? &h->cpu_packed : &h->bmm_packed;
    double flops = 4 * h1 * nseq * len, bytes = packed ? PACKED * flops : flops;
    if (packed && fewer->n) curve = fewer;
    if (curve->n) return curve_seconds(curve, len, flops);
    return bound_seconds(flops, (on_cpu ? h->cpu_flops : h->bmm_flops)[prefill], bytes, on_cpu ? h->cpu_bdw : h->gpu_bdw);
}

// ---------------------------------------------------------------------------------------------------------------
// The keys of a hardware file
// ---------------------------------------------------------------------------------------------------------------

typedef enum { NUMBER, PAIR, OPTIONAL, FLAG, CURVE } Form;

/* Bounds keep every size below 2^63 and every quotient of a size and a rate finite. A pair fills two doubles, a curve
 * a Curve; what its sizes count. */
typedef struct {
    const char *key, *unit;
    Form form;
    double lo, hi;
    size_t offset;
    const char *sizes;
} Key;

#define AT(field) offsetof(Hardware, field)
#define RATE 1e-9, 1e30
static const Key keys[] = {
    {"gmem", "bytes", NUMBER, 1, 1e18, AT(gmem), ""},
    {"cmem", "bytes", NUMBER, 1, 1e18, AT(cmem), ""},
    {"nmem", "bytes", NUMBER, 1, 1e18, AT(nmem), ""},
    {"ctog_bdw", "bytes/s", PAIR, RATE, AT(ctog_bdw), ""},
    {"gtoc_bdw", "bytes/s", PAIR, RATE, AT(gtoc_bdw), ""},
    {"dtoc_bdw", "bytes/s", PAIR, RATE, AT(dtoc_bdw), ""},
    {"ctod_bdw", "bytes/s", PAIR, RATE, AT(ctod_bdw), ""},
    {"mm_flops", "FLOP/s", PAIR, RATE, AT(mm_flops), ""},
    {"bmm_flops", "FLOP/s", PAIR, RATE, AT(bmm_flops), ""},
    {"cpu_flops", "FLOP/s", PAIR, RATE, AT(cpu_flops), ""},
    {"gpu_bdw", "bytes/s", OPTIONAL, RATE, AT(gpu_bdw), ""},
    {"cpu_bdw", "bytes/s", OPTIONAL, RATE, AT(cpu_bdw), ""},
    {"op_s", "seconds", OPTIONAL, 0, 1e9, AT(op_s), ""},
    {"copy_core_s", "seconds", OPTIONAL, 0, 1e9, AT(copy_core_s), ""},
    {"disk_core_s", "seconds", OPTIONAL, 0, 1e9, AT(disk_core_s), ""},
    {"shared_cores", "", FLAG, 0, 1, AT(shared_cores), ""},
    {"mm_rows", "FLOP/s", CURVE, RATE, AT(mm_rows), "rows"},
    {"bmm_tokens_p", "FLOP/s", CURVE, RATE, AT(bmm_tokens[1]), "tokens"},
    {"bmm_tokens_g", "FLOP/s", CURVE, RATE, AT(bmm_tokens[0]), "tokens"},
    {"cpu_tokens", "FLOP/s", CURVE, RATE, AT(cpu_tokens), "tokens"},
    {"mm_packed", "FLOP/s", CURVE, RATE, AT(mm_packed), "rows"},
    {"bmm_packed", "FLOP/s", CURVE, RATE, AT(bmm_packed), "tokens"},
    {"cpu_packed", "FLOP/s", CURVE, RATE, AT(cpu_packed), "tokens"},
};
enum { NKEYS = sizeof keys / sizeof *keys, MAX_KEY = 32, MAX_HARDWARE_FILE = 1 << 20 };
static const double MOST_SIZE = 1e15;

typedef struct {
    char text[MAX_KEY];
} KeyName;

/* The key of one phase of a pair. */
static KeyName phase_key(const char *key, int prefill) {
    KeyName name;
    snprintf(name.text, sizeof name.text, "%.20s_%c", key, "gp"[prefill]);
    return name;
}

static bool is_key(const char *text) {
    bool is = !strcmp(text, "name") || !strcmp(text, "sources");
    for (int i = 0; i < NKEYS; i++) {
        is = is || !strcmp(text, keys[i].key);
        for (int p = 0; p < 2 && keys[i].form == PAIR; p++) is = is || !strcmp(text, phase_key(keys[i].key, p).text);
    }
    return is;
}

static const cJSON *member(const cJSON *object, const char *key) { return cJSON_GetObjectItemCaseSensitive(object, key); }

// ---------------------------------------------------------------------------------------------------------------
// Reading one
// ---------------------------------------------------------------------------------------------------------------

typedef struct {
    const char *path;
    const cJSON *json;
    Hardware *to;
    char *shown; /* [100] */
    Error *err;
} Reader;

/* One line behind the file's name. */
__attribute__((format(printf, 2, 3))) static int refuse(const Reader *r, const char *format, ...) {
    char text[sizeof r->err->text];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return fail(r->err, EXIT_USAGE, "%s: %s", r->path, text);
}

/* A value as a message shows it. */
static const char *show(const Reader *r, const cJSON *value) { return json_describe(r->shown, value); }

static bool in_range(const cJSON *value, double lo, double hi) {
    return cJSON_IsNumber(value) && value->valuedouble >= lo && value->valuedouble <= hi;
}

/* name: of the value in messages. */
static int read_number(double *number, const Reader *r, const cJSON *value, const Key *k, const char *name) {
    if (!in_range(value, k->lo, k->hi))
        return refuse(r, "%s is %s; expected a number of %s from %g to %g", name, show(r, value), k->unit, k->lo, k->hi);
    *number = value->valuedouble;
    return 0;
}

/* KEY for both phases, or KEY_p and KEY_g. */
static int read_pair(double phase[2], const Reader *r, const Key *k) {
    const char *key = k->key;
    const KeyName name[2] = {phase_key(key, 0), phase_key(key, 1)};
    const cJSON *both = member(r->json, key), *each[2] = {member(r->json, name[0].text), member(r->json, name[1].text)};
    for (int p = 0; p < 2; p++) {
        if (both && each[p])
            return refuse(r, "has both %s and %s; expected %s alone, or %s_p and %s_g", key, name[p].text, key, key, key);
        if (!both && !each[p])
            return refuse(r, "has no %s; expected %s, a number of %s, or %s_p and %s_g", each[!p] ? name[p].text : key, key,
                          k->unit, key, key);
        if (read_number(&phase[p], r, both ? both : each[p], k, both ? key : name[p].text) != 0) return -1;
    }
    return 0;
}

/* Point i of a curve, counted from 1 for people: [size, rate], the size above the one before it. */
static int read_point(Curve *curve, int i, const Reader *r, const cJSON *point, const Key *k) {
    const cJSON *size = cJSON_GetArrayItem(point, 0), *rate = cJSON_GetArrayItem(point, 1);
    const double before = i > 1 ? curve->size[i - 2] : 1;
    char name[MAX_KEY + 40];
    if (!cJSON_IsArray(point))
        return refuse(r, "%s: point %d is %s; expected [%s, %s]", k->key, i, show(r, point), k->sizes, k->unit);
    if (cJSON_GetArraySize(point) != 2)
        return refuse(r, "%s: point %d is a list of %d; expected [%s, %s]", k->key, i, cJSON_GetArraySize(point), k->sizes,
                      k->unit);
    if (!in_range(size, i > 1 ? nextafter(before, INFINITY) : 1, MOST_SIZE))
        return refuse(r, "%s: point %d has a size of %s; expected a number of %s %s %.15g, to %g", k->key, i, show(r, size),
                      k->sizes, i > 1 ? "above" : "from", before, MOST_SIZE);
    snprintf(name, sizeof name, "%s: the rate of point %d", k->key, i);
    curve->size[i - 1] = size->valuedouble;
    return read_number(&curve->rate[i - 1], r, rate, k, name);
}

static int read_curve(Curve *curve, const Reader *r, const Key *k) {
    const cJSON *list = member(r->json, k->key), *point = list ? list->child : NULL;
    const int n = cJSON_GetArraySize(list);
    if (!list) return 0;
    if (!cJSON_IsArray(list))
        return refuse(r, "%s is %s; expected a list of points [%s, %s]", k->key, show(r, list), k->sizes, k->unit);
    if (n < 1 || n > MAX_POINTS) return refuse(r, "%s has %d points; expected 1 to %d", k->key, n, MAX_POINTS);
    for (int i = 1; i <= n; i++, point = point->next)
        if (read_point(curve, i, r, point, k) != 0) return -1;
    curve->n = n;
    return 0;
}

static int read_key(const Reader *r, const Key *k) {
    void *to = (char *)r->to + k->offset;
    const cJSON *value = member(r->json, k->key);
    if (k->form == PAIR) return read_pair(to, r, k);
    if (k->form == CURVE) return read_curve(to, r, k);
    if (!value && k->form != NUMBER) return 0;
    if (k->form == FLAG) {
        if (!cJSON_IsBool(value)) return refuse(r, "%s is %s; expected true or false", k->key, show(r, value));
        *(bool *)to = cJSON_IsTrue(value);
        return 0;
    }
    if (!value) return refuse(r, "has no %s; expected a number of %s", k->key, k->unit);
    return read_number(to, r, value, k, k->key);
}

/* It is printed on lines of its own. */
static int read_name(const Reader *r) {
    const cJSON *name = member(r->json, "name");
    const size_t most = MOST_NAME;
    if (!name) return refuse(r, "has no name; expected a text that says which machine this is");
    bool is_text = cJSON_IsString(name) && name->valuestring[0] && strlen(name->valuestring) <= most;
    for (const char *c = is_text ? name->valuestring : ""; *c; c++)
        if ((unsigned char)*c < ' ' || *c == 127) is_text = false;
    if (!is_text)
        return refuse(r, "name is %s; expected a text of 1 to %zu bytes without control characters", show(r, name), most);
    strcpy(r->to->name, name->valuestring);
    return 0;
}

/* Every key means something, every source is of a value that is there. */
static int check_keys(const Reader *r) {
    const cJSON *sources = member(r->json, "sources");
    for (const cJSON *child = r->json->child; child; child = child->next)
        if (!is_key(child->string))
            return refuse(r, "has an unknown key \"%.60s\"; expected only the keys of a hardware file", child->string);
    if (sources && !cJSON_IsObject(sources))
        return refuse(r, "sources is %s; expected an object of texts, one a key", show(r, sources));
    for (const cJSON *source = sources ? sources->child : NULL; source; source = source->next) {
        if (!cJSON_IsString(source))
            return refuse(r, "sources: %.60s is %s; expected a text that says where the value is from", source->string,
                          show(r, source));
        if (!member(r->json, source->string))
            return refuse(r, "sources: has \"%.60s\", which is no key of this file; expected one that is", source->string);
    }
    return 0;
}

static int read_object(const Reader *r) {
    if (!cJSON_IsObject(r->json)) return refuse(r, "holds no JSON object; expected { ... }");
    if (check_keys(r) != 0 || read_name(r) != 0) return -1;
    for (int i = 0; i < NKEYS; i++)
        if (read_key(r, &keys[i]) != 0) return -1;
    return 0;
}

int hardware_read(Hardware *hardware, const char *path, Error *err) {
    size_t len;
    Hardware read = {.name = ""};
    char *text = file_read(path, MAX_HARDWARE_FILE, &len, err);
    cJSON *json = text ? json_parse(text, len, path, err) : NULL;
    int status = json ? read_object(&(Reader){path, json, &read, (char[100]){""}, err}) : -1;
    if (status == 0)
        *hardware = read;
    else
        err->code = EXIT_USAGE;
    cJSON_Delete(json);
    free(text);
    return status;
}

/* Whether a rate of some phase counts no more, since it was measured at several sizes. */
static bool has_curve(const Hardware *h, const Key *k) {
    return (k->offset == AT(mm_flops) && h->mm_rows.n) || (k->offset == AT(cpu_flops) && h->cpu_tokens.n) ||
           (k->offset == AT(bmm_flops) && (h->bmm_tokens[0].n || h->bmm_tokens[1].n));
}

int hardware_change(Hardware *h, const char *change, Error *err) {
    const char *text = strchr(change, '=');
    const int len = text ? (int)(text - change) : 0;
    char *end = NULL;
    for (const Key *k = keys; k < keys + NKEYS; k++)
        for (int phase = -1; phase < (k->form == PAIR ? 2 : 0); phase++) { /* -1: both */
            const KeyName one = phase_key(k->key, phase == 1);
            const char *key = phase < 0 ? k->key : one.text;
            if (k->form == FLAG || k->form == CURVE || strncmp(change, key, len) != 0 || (int)strlen(key) != len) continue;
            const double number = strtod(text + 1, &end);
            if (end == text + 1 || *end || !(number >= k->lo && number <= k->hi))
                return fail(err, EXIT_USAGE, "--with %.60s: expected a number of %s from %g to %g", change, k->unit, k->lo,
                            k->hi);
            if (has_curve(h, k))
                return fail(err, EXIT_USAGE,
                            "--with %.60s: the machine has a curve in its place; name one without, or change its file",
                            change);
            double *to = (double *)((char *)h + k->offset);
            for (int s = 0; s < (k->form == PAIR ? 2 : 1); s++)
                if (phase < 0 || s == phase) to[s] = number;
            const size_t used = strlen(h->name), more = strlen(", ") + strlen(change);
            if (used + more < sizeof h->name) sprintf(h->name + used, ", %s", change);
            return 0;
        }
    return fail(err, EXIT_USAGE, "--with %.60s: expected KEY=NUMBER of a hardware file, such as ctog_bdw=24e9", change);
}

// ---------------------------------------------------------------------------------------------------------------
// Writing one
// ---------------------------------------------------------------------------------------------------------------

static cJSON *exact(double number) {
    char text[100];
    return cJSON_CreateRaw(json_number(text, number));
}

static void write_curve(cJSON *json, const Curve *curve, const char *key) {
    cJSON *list = curve->n ? cJSON_AddArrayToObject(json, key) : NULL;
    for (int i = 0; i < curve->n; i++) {
        cJSON *point = cJSON_CreateArray();
        cJSON_AddItemToArray(point, exact(curve->size[i]));
        cJSON_AddItemToArray(point, exact(curve->rate[i]));
        cJSON_AddItemToArray(list, point);
    }
}

/* A pair of equal rates is written as one. */
static void write_key(cJSON *json, const Hardware *hardware, const Key *k) {
    const void *from = (const char *)hardware + k->offset;
    const double *value = from;
    if (k->form == CURVE)
        write_curve(json, from, k->key);
    else if (k->form == FLAG && *(const bool *)from)
        cJSON_AddTrueToObject(json, k->key);
    else if (k->form == PAIR && value[0] != value[1])
        for (int p = 1; p >= 0; p--) cJSON_AddItemToObject(json, phase_key(k->key, p).text, exact(value[p]));
    else if (k->form != FLAG && (k->form != OPTIONAL || *value != 0))
        cJSON_AddItemToObject(json, k->key, exact(*value));
}

/* The sources of keys that are there; one of a rate is that of both its phases. */
static void write_sources(cJSON *json, const cJSON *sources) {
    cJSON *written = cJSON_AddObjectToObject(json, "sources");
    for (const cJSON *source = sources->child; source; source = source->next) {
        if (member(json, source->string)) cJSON_AddStringToObject(written, source->string, source->valuestring);
        for (int p = 1; p >= 0 && !member(json, source->string); p--) {
            const KeyName key = phase_key(source->string, p);
            if (member(json, key.text)) cJSON_AddStringToObject(written, key.text, source->valuestring);
        }
    }
}

void hardware_write(const Hardware *hardware, const cJSON *sources, FILE *out) {
    cJSON *json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "name", hardware->name);
    for (int i = 0; i < NKEYS; i++) write_key(json, hardware, &keys[i]);
    if (sources) write_sources(json, sources);
    char *text = cJSON_Print(json);
    fprintf(out, "%s\n", text);
    cJSON_free(text);
    cJSON_Delete(json);
}
