/* json.c: strict JSON on top of cJSON.
 *
 * Everything this program reads from outside that is JSON (config.json, safetensors headers, vocab.json, prompts,
 * hardware files) comes through json_parse. cJSON builds the tree; but it also accepts much that is not JSON, cuts a string
 * at \u0000 and lets the first of two equal keys win, and each of these makes a file mean something else than its
 * author or another reader thinks. So the text is first scanned against the grammar of RFC 8259, where each fault has a
 * byte offset, then cJSON parses it, and then every object's keys are compared. What passes here is a tree whose strings
 * are whole, whose numbers are finite and whose keys are unique.
 * Read next: tokenizer.c. */
#include <cjson/cJSON.h>
#include <ctype.h>
#include <math.h>

#include "io/text.h"

enum { MAX_DEPTH = 64, MAX_NUMBER = 60 /* characters; cJSON cuts a number at 63 */ };

// ---------------------------------------------------------------------------------------------------------------
// UTF-8
// ---------------------------------------------------------------------------------------------------------------

size_t utf8_step(const char *s, size_t len, bool *valid) {
    unsigned char c = (unsigned char)s[0], low = 0x80, high = 0xBF;
    size_t more = c < 0x80 ? 0 : c >= 0xC2 && c <= 0xDF ? 1 : c >= 0xE0 && c <= 0xEF ? 2 : c >= 0xF0 && c <= 0xF4 ? 3 : 4;
    *valid = more < 4;
    if (!*valid) return 1;
    if (c == 0xE0) low = 0xA0;  /* shorter forms exist */
    if (c == 0xED) high = 0x9F; /* surrogates */
    if (c == 0xF0) low = 0x90;
    if (c == 0xF4) high = 0x8F; /* above U+10FFFF */
    for (size_t i = 1; i <= more; i++, low = 0x80, high = 0xBF) {
        *valid = i < len && (unsigned char)s[i] >= low && (unsigned char)s[i] <= high;
        if (!*valid) return i;
    }
    return more + 1;
}

size_t utf8_invalid_at(const char *s, size_t len) {
    size_t at = 0;
    while (at < len) {
        bool valid;
        size_t step = utf8_step(s + at, len - at, &valid);
        if (!valid) break;
        at += step;
    }
    return at;
}

bool utf8_valid(const char *s, size_t len) { return utf8_invalid_at(s, len) == len; }

// ---------------------------------------------------------------------------------------------------------------
// The grammar
// ---------------------------------------------------------------------------------------------------------------

typedef struct {
    const char *text;
    size_t len, at; /* at: the next byte to look at */
    const char *what;
    Error *err;
} Scan;

/* The fault at s->at: what is found there, and what should be. */
static int refuse_here(Scan *s, const char *expected) {
    if (s->at >= s->len)
        return fail(s->err, EXIT_FAILED, "%s: byte %zu: the text ends here; expected %s (is the file complete?)", s->what,
                    s->at, expected);
    int n = 0; /* as much of the text as can be shown: a hostile byte must not reach the terminal */
    while (n < 16 && s->at + n < s->len && s->text[s->at + n] >= ' ' && s->text[s->at + n] < 127) n++;
    if (n == 0)
        return fail(s->err, EXIT_FAILED, "%s: byte %zu: found byte 0x%02x; expected %s", s->what, s->at,
                    (unsigned char)s->text[s->at], expected);
    return fail(s->err, EXIT_FAILED, "%s: byte %zu: found '%.*s'; expected %s", s->what, s->at, n, s->text + s->at,
                expected);
}

/* The next byte, or -1 at the end. */
static int peek(const Scan *s) { return s->at < s->len ? (unsigned char)s->text[s->at] : -1; }

static int skip_space(Scan *s) {
    while (peek(s) == ' ' || peek(s) == '\t' || peek(s) == '\n' || peek(s) == '\r') s->at++;
    return peek(s);
}

/* The code unit of the escape \uXXXX at s->at, or -1. */
static int hex4(const Scan *s) {
    char digits[5] = "";
    if (s->len - s->at < 6 || s->text[s->at] != '\\' || s->text[s->at + 1] != 'u') return -1;
    memcpy(digits, s->text + s->at + 2, 4);
    return strspn(digits, "0123456789abcdefABCDEF") == 4 ? (int)strtol(digits, NULL, 16) : -1;
}

static int scan_escape(Scan *s) {
    char kind = s->at + 1 < s->len ? s->text[s->at + 1] : 0;
    if (kind && strchr("\"\\/bfnrt", kind)) return s->at += 2, 0;
    int unit = hex4(s);
    if (unit < 0) return refuse_here(s, "an escape: \\\" \\\\ \\/ \\b \\f \\n \\r \\t or \\u and four hex digits");
    if (unit == 0) return refuse_here(s, "no \\u0000 (text with a zero byte is not accepted)");
    if (unit >= 0xDC00 && unit <= 0xDFFF) return refuse_here(s, "a high surrogate before this low one");
    if (unit >= 0xD800 && unit <= 0xDBFF) {
        Scan next = *s;
        next.at += 6;
        int low = hex4(&next);
        if (low < 0xDC00 || low > 0xDFFF) return refuse_here(s, "a low surrogate (\\udc00 to \\udfff) after this high one");
        s->at += 6;
    }
    s->at += 6;
    return 0;
}

static int scan_string(Scan *s) {
    if (peek(s) != '"') return refuse_here(s, "a string in double quotes");
    s->at++;
    for (int c; (c = peek(s)) != '"';) {
        if (c < ' ')
            return refuse_here(s, c < 0 ? "the closing quote of a string" : "control characters in strings to be escaped");
        if (c != '\\')
            s->at++;
        else if (scan_escape(s) != 0)
            return -1;
    }
    s->at++;
    return 0;
}

/* Steps over one of these characters, if it is next. */
static bool step_over(Scan *s, const char *characters) {
    bool found = peek(s) > 0 && strchr(characters, peek(s));
    s->at += found;
    return found;
}

/* Steps over digits; false if there is none. */
static bool digits(Scan *s) {
    size_t from = s->at;
    while (step_over(s, "0123456789")) continue;
    return s->at > from;
}

static int scan_number(Scan *s) {
    const size_t from = s->at;
    step_over(s, "-");
    const bool zero = step_over(s, "0");
    if (!zero && !digits(s)) return refuse_here(s, "a digit");
    if (zero && isdigit(peek(s))) return refuse_here(s, "no digit after a leading zero");
    if (step_over(s, ".") && !digits(s)) return refuse_here(s, "a digit after the decimal point");
    if (step_over(s, "eE")) {
        step_over(s, "+-");
        if (!digits(s)) return refuse_here(s, "a digit in the exponent");
    }
    char number[MAX_NUMBER + 1];
    int n = snprintf(number, sizeof number, "%.*s", (int)(s->at - from), s->text + from);
    if (n <= MAX_NUMBER && isfinite(strtod(number, NULL))) return 0;
    s->at = from;
    return refuse_here(s, "a number of at most 60 characters and 1.7e308");
}

static int scan_value(Scan *s, int depth);

/* An object or an array, with s->at on its opening bracket. */
static int scan_container(Scan *s, int depth) {
    bool object = peek(s) == '{';
    int close = object ? '}' : ']';
    if (depth == MAX_DEPTH) return refuse_here(s, "nesting of at most 64 levels");
    s->at++;
    if (skip_space(s) == close) return s->at++, 0;
    for (;;) {
        if (object) {
            skip_space(s);
            if (scan_string(s) != 0) return -1;
            if (skip_space(s) != ':') return refuse_here(s, "':' after a key");
            s->at++;
        }
        if (scan_value(s, depth + 1) != 0) return -1;
        int c = skip_space(s);
        if (c != ',' && c != close) return refuse_here(s, object ? "',' or '}'" : "',' or ']'");
        s->at++;
        if (c == close) return 0;
    }
}

static int scan_value(Scan *s, int depth) {
    static const char *const words[] = {"true", "false", "null"};
    int c = skip_space(s);
    if (c == '{' || c == '[') return scan_container(s, depth);
    if (c == '"') return scan_string(s);
    if (c == '-' || (c >= '0' && c <= '9')) return scan_number(s);
    for (int i = 0; i < 3; i++) {
        size_t n = strlen(words[i]);
        if (s->len - s->at >= n && memcmp(s->text + s->at, words[i], n) == 0) return s->at += n, 0;
    }
    return refuse_here(s, "a JSON value");
}

// ---------------------------------------------------------------------------------------------------------------
// The tree and its values
// ---------------------------------------------------------------------------------------------------------------

static int compare_strings(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

const char *sort_strings(const char **strings, size_t n) {
    qsort(strings, n, sizeof *strings, compare_strings);
    for (size_t i = 1; i < n; i++)
        if (strcmp(strings[i - 1], strings[i]) == 0) return strings[i];
    return NULL;
}

/* Refuses two equal keys in one object, here and below. Sorted, because a vocabulary is one object of 50,000 keys. */
static int check_unique(const cJSON *node, const char *what, Error *err) {
    size_t n = 0;
    for (const cJSON *child = node->child; child; child = child->next, n++)
        if (child->child && check_unique(child, what, err) != 0) return -1;
    if (!cJSON_IsObject(node) || n < 2) return 0;
    const char **keys = (const char **)xcalloc(n, sizeof *keys);
    n = 0;
    for (const cJSON *child = node->child; child; child = child->next) keys[n++] = child->string;
    const char *twice = sort_strings(keys, n);
    free(keys);
    return !twice ? 0
                  : fail(err, EXIT_FAILED, "%s: the key \"%.200s\" occurs twice in one object; expected each key once",
                         what, twice);
}

/* cJSON gives NULL for a tree or a text, or leaves out a member, when there is no memory; here that is the end, as
 * everywhere. */
static void *json_memory(size_t size) { return xcalloc(size, 1); }
__attribute__((constructor)) static void json_open(void) {
    cJSON_InitHooks(&(cJSON_Hooks){.malloc_fn = json_memory, .free_fn = free});
}

cJSON *json_parse(const char *text, size_t len, const char *what, Error *err) {
    Scan s = {text, len, 0, what, err};
    if ((s.at = utf8_invalid_at(text, len)) < len) return refuse_here(&s, "UTF-8"), NULL;
    s.at = 0;
    if (len >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0) return refuse_here(&s, "JSON without a byte order mark"), NULL;
    if (scan_value(&s, 0) != 0) return NULL;
    if (skip_space(&s) != -1) return refuse_here(&s, "nothing after the value"), NULL;
    cJSON *tree = cJSON_ParseWithLength(text, len);
    if (!tree) return fail(err, EXIT_FAILED, "%s: cJSON cannot parse this text", what), NULL;
    if (check_unique(tree, what, err) == 0) return tree;
    cJSON_Delete(tree);
    return NULL;
}

cJSON *json_object(const char *text, size_t len, const char *what, Error *err) {
    cJSON *tree = json_parse(text, len, what, err);
    if (!tree || cJSON_IsObject(tree)) return tree;
    cJSON_Delete(tree);
    return fail(err, EXIT_FAILED, "%s: holds no JSON object; expected { ... }", what), NULL;
}

cJSON *json_read(const char *path, size_t max_bytes, Error *err) {
    size_t len;
    char *text = file_read(path, max_bytes, &len, err);
    cJSON *tree = text ? json_object(text, len, path, err) : NULL;
    free(text);
    return tree;
}

const cJSON *json_get(const cJSON *object, const char *key) { return cJSON_GetObjectItemCaseSensitive(object, key); }

const char *json_number(char text[100], double number) {
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(text, 100, "%.*g", digits, number);
        if (strtod(text, NULL) == number) break;
    }
    return text;
}

const char *json_describe(char text[100], const cJSON *value) {
    if (!value) return "nothing";
    if (cJSON_IsObject(value)) return "an object";
    if (cJSON_IsArray(value)) return "a list";
    if (cJSON_IsNull(value)) return "null";
    if (cJSON_IsBool(value)) return cJSON_IsTrue(value) ? "true" : "false";
    if (cJSON_IsNumber(value)) return json_number(text, value->valuedouble);
    snprintf(text, 100, "\"%.80s\"", value->valuestring);
    return text;
}

int json_refuse(Error *err, const char *where, const char *name, const cJSON *value, const char *expected, ...) {
    char found[100], what[300];
    va_list args;
    va_start(args, expected);
    vsnprintf(what, sizeof what, expected, args);
    va_end(args);
    return fail(err, EXIT_FAILED, "%s: %s is %s; expected %s", where, name, json_describe(found, value), what);
}

void json_print(FILE *out, const cJSON *tree) {
    char *text = cJSON_Print(tree);
    fprintf(out, "%s\n", text);
    free(text);
}

bool json_whole(const cJSON *value, size_t *number) {
    const double d = cJSON_IsNumber(value) ? value->valuedouble : -1;
    if (!(d >= 0 && d <= 0x1p53) || d != floor(d)) return false; /* beyond 2^53 a double skips some */
    *number = (size_t)d;
    return true;
}

/* What must be written as \uXXXX, or may: controls, and U+0085, U+2028, U+2029, where many readers of lines break them.
 * 0: nothing. */
static unsigned escaped(const char *s, size_t step) {
    if (step == 1 && ((unsigned char)*s < ' ' || *s == 127)) return (unsigned char)*s;
    if (step == 2 && !memcmp(s, "\xC2\x85", 2)) return 0x85;
    return step == 3 && !memcmp(s, "\xE2\x80", 2) && (s[2] == '\xA8' || s[2] == '\xA9') ? 0x2000 | (s[2] & 0x3F) : 0;
}

void json_write_string(FILE *out, const char *s, size_t len) {
    static const char special[] = "\"\\\n\t\r", letters[] = "\"\\ntr";
    putc('"', out);
    for (size_t at = 0, step; at < len; at += step) {
        bool valid;
        step = utf8_step(s + at, len - at, &valid);
        const char *escape = s[at] ? strchr(special, s[at]) : NULL;
        if (escape)
            fprintf(out, "\\%c", letters[escape - special]);
        else if (!valid)
            putc('?', out);
        else if (!s[at] || escaped(s + at, step))
            fprintf(out, "\\u%04x", escaped(s + at, step));
        else
            fwrite(s + at, 1, step, out);
    }
    putc('"', out);
}
