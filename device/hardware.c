/* hardware.c: a machine as numbers (section 4.3), and the time that an op takes on it.
 *
 * The first chapter answers the cost model and the sim. The others are the hardware file, one JSON
 * object: it has what the paper's Table 8 calls hardware constants, in bytes, bytes/s and FLOP/s. A
 * rate may differ between the two phases, and then comes as a pair of keys with _p (prefill) and _g
 * (generation). A value that is missing, misspelt or impossible is refused by name, never guessed:
 * a wrong rate gives a wrong policy that looks like a right one. The file is a flag's argument, so
 * every fault in it gives EXIT_USAGE. A file that is written is read back to the same bits.
 * Read next: base/team.c. */
#include "device/parts.h"

#include <cjson/cJSON.h>
#include <ctype.h>
#include <math.h>

#include "io/io.h"

// -------------------------------------------------------------------------------------------------
// The time of an op
// -------------------------------------------------------------------------------------------------

double curve_seconds(const Curve *c, double size, double flops) {
    int i = 1;
    if (size <= c->size[0])
        return flops / c->rate[0];
    if (size >= c->size[c->n - 1])
        return flops / c->rate[c->n - 1];
    while (size > c->size[i])
        i++;
    double before = c->size[i - 1] / c->rate[i - 1], after = c->size[i] / c->rate[i];
    double part = (size - c->size[i - 1]) / (c->size[i] - c->size[i - 1]);
    return flops / size * (before + part * (after - before));
}

/* Returns the seconds of an op by the curve that was measured for it; without one, the longer of
 * computing and of reading memory. */
static double op_seconds(const Curve *curve, double size, double flops, double rate, double bytes,
                         double bdw) {
    return curve->n ? curve_seconds(curve, size, flops)
                    : fmax(flops / rate, memory_seconds(bytes, bdw));
}

/* Bytes of a packed number over those of an F16: 4 bits, and a group's header of 32 for 64 numbers.
 */
static const double PACKED = 4.5 / 16;

double linear_seconds(const Hardware *h, bool prefill, Linear y) {
    const Curve *curve = y.packed && h->mm_packed.n ? &h->mm_packed : &h->mm_rows;
    double weights = (y.packed ? PACKED : 1) * 2 * y.n * y.k;
    return op_seconds(curve, y.m, 2 * y.m * y.n * y.k, h->mm_flops[prefill],
                      weights + y.act_bytes * y.m * (y.n + y.k), h->gpu_bdw);
}

double attend_prefill_seconds(const Hardware *h, double nseq, double s, double h1,
                              double act_bytes) {
    return op_seconds(&h->bmm_tokens[1], s, 4 * h1 * nseq * s * (s + 1) / 2, h->bmm_flops[1],
                      nseq * s * h1 * (2 * act_bytes + 4), h->gpu_bdw);
}

double attend_seconds(const Hardware *h, bool on_cpu, bool prefill, double queries, double len,
                      bool packed) {
    const Curve *curve = on_cpu ? &h->cpu_tokens : &h->bmm_tokens[0],
                *of_packed = on_cpu ? &h->cpu_packed : &h->bmm_packed;
    double flops = 4 * queries * len;
    return op_seconds(packed && of_packed->n ? of_packed : curve, len, flops,
                      (on_cpu ? h->cpu_flops : h->bmm_flops)[prefill],
                      packed ? PACKED * flops : flops, on_cpu ? h->cpu_bdw : h->gpu_bdw);
}

// -------------------------------------------------------------------------------------------------
// The keys of a hardware file
// -------------------------------------------------------------------------------------------------

typedef enum { NUMBER, PAIR, OPTIONAL, FLAG, CURVE } Form;

/* A key of the file. The bounds lo and hi keep every size below 2^63 and every quotient of a size
 * and a rate finite. A pair fills two doubles, a curve a Curve: its rates are in FLOP/s, and `unit`
 * is what its sizes count. */
typedef struct {
    const char *key;
    size_t offset;
    Form form;
    const char *unit;
    double lo, hi;
    const char *measured; /* how profile.c measures the number */
} Key;

#define AT(field) offsetof(Hardware, field)
#define RATE 1e-9, 1e30
#define CAPACITY(field) #field, AT(field), NUMBER, "bytes", 1, 1e18
#define LINK(field) #field, AT(field), PAIR, "bytes/s", RATE
#define COMPUTE(field) #field, AT(field), PAIR, "FLOP/s", RATE
#define MEMORY(field) #field, AT(field), OPTIONAL, "bytes/s", RATE
#define SECONDS(field) #field, AT(field), OPTIONAL, "seconds", 0, 1e9
#define BY(sizes, field) AT(field), CURVE, sizes, RATE
static const Key keys[] = {
    {CAPACITY(gmem), "capacity of the GPU tier at that time"},
    {CAPACITY(cmem), "capacity of the CPU tier at that time"},
    {CAPACITY(nmem), "capacity of the disk tier at that time"},
    {LINK(ctog_bdw), "copies of 8 MiB from the CPU tier to the GPU tier, out of cold memory"},
    {LINK(gtoc_bdw), "copies of 8 MiB from the GPU tier to the CPU tier, out of cold memory"},
    {LINK(dtoc_bdw), "the offload file read back in pieces of 8 MiB, past the page cache"},
    {LINK(ctod_bdw), "the offload file written in pieces of 8 MiB, each until it is on the disk"},
    {COMPUTE(mm_flops), "the curve mm_rows at 1024 rows (prefill) and at 16 (generation)"},
    {COMPUTE(bmm_flops), "the curves bmm_tokens_p and bmm_tokens_g at 512 tokens"},
    {COMPUTE(cpu_flops), "the curve cpu_tokens at 512 tokens"},
    {MEMORY(gpu_bdw), "layernorm: bytes read and written"},
    {MEMORY(cpu_bdw),
     "the best of cpu_tokens, which does a flop for each byte of K and V that it reads"},
    {SECONDS(op_s), "a chain of layernorms of 16 numbers, from lane to lane"},
    {SECONDS(copy_core_s),
     "linear of 16 rows beside copies to the GPU tier: seconds lost over bytes copied"},
    {SECONDS(disk_core_s),
     "linear of 16 rows beside reads of the offload file: seconds lost over bytes read"},
    {"shared_cores", AT(shared_cores), FLAG, "", 0, 1,
     "the host device computes and copies on the same cores"},
    {"mm_rows", BY("rows", mm_rows), "linear of a layer's four shapes with cold weights"},
    {"bmm_tokens_p", BY("tokens", bmm_tokens[1]), "attend_prefill of prompts of so many tokens"},
    {"bmm_tokens_g", BY("tokens", bmm_tokens[0]), "attend over cold pages on the GPU tier"},
    {"cpu_tokens", BY("tokens", cpu_tokens), "attend over cold pages on the CPU tier"},
    {"mm_packed", BY("rows", mm_packed), "as mm_rows, weights in 4-bit groups of 64"},
    {"bmm_packed", BY("tokens", bmm_packed), "as bmm_tokens_g, pages in 4-bit groups of 64"},
    {"cpu_packed", BY("tokens", cpu_packed), "as cpu_tokens, pages in 4-bit groups of 64"},
};
enum { NKEYS = sizeof keys / sizeof *keys, MAX_KEY = 32, MAX_HARDWARE_FILE = 1 << 20 };
static const double MOST_SIZE = 1e15;

/* The end of a pair's member in the file: for generation [0], for prefill [1], and for BOTH. */
static const char *const ending[] = {"_g", "_p", ""};
enum { BOTH = 2 };

/* Writes the name of a key's member, and returns it. */
static const char *member(char name[MAX_KEY], const Key *k, int phase) {
    snprintf(name, MAX_KEY, "%s%s", k->key, ending[phase]);
    return name;
}

/* Finds the key of a member whose name has len characters. *phase is BOTH if the name is the key
 * itself. Returns NULL if there is none. */
static const Key *find_key(int *phase, const char *name, size_t len) {
    char known[MAX_KEY];
    for (const Key *k = keys; k < keys + NKEYS; k++)
        for (*phase = k->form == PAIR ? 0 : BOTH; *phase <= BOTH; ++*phase)
            if (!strncmp(member(known, k, *phase), name, len) && !known[len])
                return k;
    return NULL;
}

// -------------------------------------------------------------------------------------------------
// Reading a hardware file
// -------------------------------------------------------------------------------------------------

/* The reading of one file. */
typedef struct {
    const cJSON *json;
    Hardware *to;
    Error *err;
} Reader;

static bool in_range(const cJSON *value, double lo, double hi) {
    return cJSON_IsNumber(value) && value->valuedouble >= lo && value->valuedouble <= hi;
}

/* Reads a number within the key's bounds. name: how messages call the value. */
static int read_number(double *number, const Reader *r, const cJSON *value, const Key *k,
                       const char *name) {
    if (!in_range(value, k->lo, k->hi))
        return json_refuse(r->err, name, value, "a number of %s from %g to %g",
                           k->form == CURVE ? "FLOP/s" : k->unit, k->lo, k->hi);
    *number = value->valuedouble;
    return 0;
}

/* Reads point i of a curve, counted from 1 for people: [size, rate], the size above the one before
 * it. */
static int read_point(Curve *curve, int i, const Reader *r, const cJSON *point, const Key *k) {
    const cJSON *size = cJSON_GetArrayItem(point, 0), *rate = cJSON_GetArrayItem(point, 1);
    double before = i > 1 ? curve->size[i - 2] : 1;
    char name[MAX_KEY + 40];
    snprintf(name, sizeof name, "%s: point %d", k->key, i);
    if (!cJSON_IsArray(point))
        return json_refuse(r->err, name, point, "[%s, FLOP/s]", k->unit);
    if (cJSON_GetArraySize(point) != 2)
        return fail(r->err, EXIT_USAGE, "%s is a list of %d; expected [%s, FLOP/s]", name,
                    cJSON_GetArraySize(point), k->unit);
    snprintf(name, sizeof name, "%s: the size of point %d", k->key, i);
    if (!in_range(size, i > 1 ? nextafter(before, INFINITY) : 1, MOST_SIZE))
        return json_refuse(r->err, name, size, "a number of %s %s %.15g, to %g", k->unit,
                           i > 1 ? "above" : "from", before, MOST_SIZE);
    snprintf(name, sizeof name, "%s: the rate of point %d", k->key, i);
    curve->size[i - 1] = size->valuedouble;
    return read_number(&curve->rate[i - 1], r, rate, k, name);
}

static int read_curve(Curve *curve, const Reader *r, const cJSON *list, const Key *k) {
    int n = cJSON_GetArraySize(list);
    const cJSON *point = list->child;
    if (!cJSON_IsArray(list))
        return json_refuse(r->err, k->key, list, "a list of points [%s, FLOP/s]", k->unit);
    if (n < 1 || n > MAX_POINTS)
        return fail(r->err, EXIT_USAGE, "%s has %d points; expected 1 to %d", k->key, n,
                    MAX_POINTS);
    for (int i = 1; i <= n; i++, point = point->next)
        if (read_point(curve, i, r, point, k))
            return -1;
    curve->n = n;
    return 0;
}

/* Reads the member of a key; of a pair the two members KEY_p and KEY_g, or KEY for both. */
static int read_key(const Reader *r, const Key *k) {
    char name[MAX_KEY];
    void *to = (char *)r->to + k->offset;
    const cJSON *both = json_get(r->json, k->key);
    if (k->form == CURVE)
        return both ? read_curve(to, r, both, k) : 0;
    if (k->form == FLAG) {
        *(bool *)to = cJSON_IsTrue(both);
        return !both || cJSON_IsBool(both) ? 0 : json_refuse(r->err, k->key, both, "true or false");
    }
    for (int phase = 0; phase <= (k->form == PAIR); phase++) {
        const cJSON *one = json_get(r->json, member(name, k, phase)), *value = both ? both : one;
        if (both && one)
            return fail(r->err, EXIT_USAGE,
                        "has both %s and %s; expected %s alone, or %s_p and %s_g", k->key, name,
                        k->key, k->key, k->key);
        if (!value && k->form != OPTIONAL)
            return fail(r->err, EXIT_USAGE,
                        "has no %s; expected %s, a number of %s (a rate may also be a pair, "
                        "KEY_p and KEY_g)",
                        k->form == PAIR ? name : k->key, k->key, k->unit);
        if (value && read_number((double *)to + phase, r, value, k, value->string))
            return -1;
    }
    return 0;
}

/* Reads the name, which is printed on lines of its own. */
static int read_name(const Reader *r) {
    const cJSON *name = json_get(r->json, "name");
    const char *text = cJSON_IsString(name) ? name->valuestring : "";
    bool good = *text && strlen(text) <= MOST_NAME;
    for (const char *c = text; *c; c++)
        good = good && !iscntrl((unsigned char)*c);
    if (!good)
        return json_refuse(r->err, "name", name,
                           "a text of 1 to %d bytes without control characters, which says which "
                           "machine this is",
                           MOST_NAME);
    strcpy(r->to->name, text);
    return 0;
}

/* Checks that every source is for a key of this file. */
static int check_sources(const Reader *r, const cJSON *sources) {
    const cJSON *source;
    char name[80];
    if (sources && !cJSON_IsObject(sources))
        return json_refuse(r->err, "sources", sources, "an object of texts, one a key");
    cJSON_ArrayForEach(source, sources) {
        snprintf(name, sizeof name, "sources: %.60s", source->string);
        if (!cJSON_IsString(source))
            return json_refuse(r->err, name, source, "a text that says where the value is from");
        if (!json_get(r->json, source->string))
            return fail(
                r->err, EXIT_USAGE,
                "sources: has \"%.60s\", which is no key of this file; expected one that is",
                source->string);
    }
    return 0;
}

static int read_object(const Reader *r) {
    const cJSON *name = json_get(r->json, "name"), *sources = json_get(r->json, "sources"), *child;
    int phase;
    cJSON_ArrayForEach(child, r->json) {
        if (child != name && child != sources &&
            !find_key(&phase, child->string, strlen(child->string)))
            return fail(r->err, EXIT_USAGE,
                        "has an unknown key \"%.60s\"; expected only the keys of a hardware file",
                        child->string);
    }
    if (read_name(r) || check_sources(r, sources))
        return -1;
    for (int i = 0; i < NKEYS; i++)
        if (read_key(r, &keys[i]))
            return -1;
    return 0;
}

int hardware_read(Hardware *hardware, const char *path, Error *err) {
    Hardware read = {0};
    cJSON *json = json_read(path, MAX_HARDWARE_FILE, err);
    int status = json ? read_object(&(Reader){json, &read, err}) : -1;
    if (!status)
        *hardware = read;
    else if (json)
        fail_at(err, path);
    if (status)
        err->code = EXIT_USAGE;
    cJSON_Delete(json);
    return status;
}

/* Returns true if a curve replaces a rate in some phase. */
static bool has_curve(const Hardware *h, const Key *k) {
    return (k->offset == AT(mm_flops) && h->mm_rows.n) ||
           (k->offset == AT(cpu_flops) && h->cpu_tokens.n) ||
           (k->offset == AT(bmm_flops) && (h->bmm_tokens[0].n || h->bmm_tokens[1].n));
}

int hardware_change(Hardware *h, const char *change, Error *err) {
    const char *text = strchr(change, '=');
    int phase;
    const Key *k = text ? find_key(&phase, change, text - change) : NULL;
    char *end, name[sizeof h->name];
    if (!k || k->form == FLAG || k->form == CURVE)
        return fail(err, EXIT_USAGE,
                    "--with %.60s: expected KEY=NUMBER of a hardware file, such as ctog_bdw=24e9",
                    change);
    double number = strtod(text + 1, &end);
    if (end == text + 1 || *end || !(number >= k->lo && number <= k->hi))
        return fail(err, EXIT_USAGE, "--with %.60s: expected a number of %s from %g to %g", change,
                    k->unit, k->lo, k->hi);
    if (has_curve(h, k))
        return fail(err, EXIT_USAGE,
                    "--with %.60s: the machine has a curve in its place; name one without, or "
                    "change its file",
                    change);
    double *to = (double *)((char *)h + k->offset);
    if (phase != BOTH)
        to += phase;
    else if (k->form == PAIR)
        to[1] = number;
    *to = number;
    if (snprintf(name, sizeof name, "%s, %s", h->name, change) < (int)sizeof name)
        strcpy(h->name, name);
    return 0;
}

// -------------------------------------------------------------------------------------------------
// Writing a hardware file
// -------------------------------------------------------------------------------------------------

static cJSON *exact(double number) {
    char text[100];
    return cJSON_CreateRaw(json_number(text, number));
}

static cJSON *curve_points(const Curve *curve) {
    cJSON *list = cJSON_CreateArray();
    for (int i = 0; i < curve->n; i++) {
        cJSON *point = cJSON_CreateArray();
        cJSON_AddItemToArray(point, exact(curve->size[i]));
        cJSON_AddItemToArray(point, exact(curve->rate[i]));
        cJSON_AddItemToArray(list, point);
    }
    return list;
}

/* Returns a key's value, of one phase if it is a pair, or NULL if the file leaves it out. */
static cJSON *value_of(const Key *k, const void *from, int phase) {
    const double *number = from;
    if (k->form == CURVE)
        return ((const Curve *)from)->n ? curve_points(from) : NULL;
    if (k->form == FLAG)
        return *(const bool *)from ? cJSON_CreateTrue() : NULL;
    return number[phase] != 0 ? exact(number[phase]) : NULL;
}

/* Writes a key into the file, and how it was measured into the sources. A pair of equal rates is
 * written as one; optional keys are left out where they are 0. */
static void write_key(cJSON *json, cJSON *sources, const Hardware *h, const Key *k) {
    char name[MAX_KEY];
    const double *from = (const double *)((const char *)h + k->offset);
    bool pair = k->form == PAIR && from[0] != from[1],
         disk = k->offset == AT(dtoc_bdw) || k->offset == AT(ctod_bdw);
    for (int phase = pair; phase >= 0; phase--) {
        cJSON *value = value_of(k, from, phase);
        if (!value)
            return;
        cJSON_AddItemToObject(json, member(name, k, pair ? phase : BOTH), value);
        cJSON_AddStringToObject(
            sources, name,
            disk && *from == NO_DISK ? "not measured: there was no disk to write to" : k->measured);
    }
}

void hardware_write(const Hardware *hardware, const char *measured, FILE *out) {
    cJSON *json = cJSON_CreateObject(), *sources = measured ? cJSON_CreateObject() : NULL;
    cJSON_AddStringToObject(json, "name", hardware->name);
    cJSON_AddStringToObject(sources, "name", measured); /* adds nothing to NULL */
    for (int i = 0; i < NKEYS; i++)
        write_key(json, sources, hardware, &keys[i]);
    cJSON_AddItemToObject(json, "sources", sources);
    json_print(out, json);
    cJSON_Delete(json);
}
