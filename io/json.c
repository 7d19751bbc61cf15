/* json.c: reads JSON with cJSON, and checks what cJSON does not.
 *
 * All JSON that this program reads from outside (config.json, safetensors headers, vocab.json,
 * prompts, hardware files) passes through json_parse. cJSON builds the tree. But cJSON also accepts
 * texts that mean something else to their author or to another reader: it ignores the encoding,
 * skips control characters, cuts a string at \u0000, reads 01 as a number and 1e999 as infinity,
 * and takes the first of two equal keys. So json_parse checks the bytes before cJSON reads them,
 * and the tree afterwards. In a tree that it returns, strings are complete, numbers are finite and
 * the keys of an object are unique.
 * Read next: tokenizer.c. */
#include <cjson/cJSON.h>
#include <ctype.h>
#include <errno.h>
#include <math.h>

#include "io/io.h"

enum { MAX_DEPTH = 64 }; /* levels of nesting */

// -------------------------------------------------------------------------------------------------
// UTF-8
// -------------------------------------------------------------------------------------------------

size_t utf8_step(uint32_t *code, const char *s, size_t len) {
    uint8_t first = *s;
    size_t size = 1 + (first >= 0xC2) + (first >= 0xE0) + (first >= 0xF0);
    /* Bounds of the next byte. Below them are overlong forms, above them surrogates (after 0xED)
     * and what is beyond U+10FFFF (after 0xF4). */
    uint8_t low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
    uint8_t high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
    *code = NO_CHARACTER;
    if ((size == 1 && first >= 0x80) || first > 0xF4)
        return 1;
    uint32_t bits = size > 1 ? first & 0x7F >> size : first;
    for (size_t i = 1; i < size; i++, low = 0x80, high = 0xBF) {
        uint8_t byte = i < len ? s[i] : 0;
        if (byte < low || byte > high)
            return i;
        bits = bits << 6 | (byte & 0x3F);
    }
    *code = bits;
    return size;
}

size_t utf8_invalid_at(const char *s, size_t len) {
    size_t at = 0;
    for (uint32_t code; at < len;) {
        size_t step = utf8_step(&code, s + at, len - at);
        if (code == NO_CHARACTER)
            break;
        at += step;
    }
    return at;
}

bool utf8_valid(const char *s, size_t len) { return utf8_invalid_at(s, len) == len; }

// -------------------------------------------------------------------------------------------------
// Checks of the bytes
// -------------------------------------------------------------------------------------------------

/* A text that is being checked. */
typedef struct {
    char *text; /* changed where a value is dropped */
    size_t len;
    Error *err;
    size_t memory; /* bytes that its tree takes, found by check_bytes */
} Source;

/* Returns the byte at a place, or 0 if the text ends before it. */
static unsigned char byte_at(const Source *s, size_t at) {
    return at < s->len ? (unsigned char)s->text[at] : 0;
}

/* Refuses the text: fills err with a message that shows up to 16 printable bytes at a place, or a
 * single other byte in hex, so that no control byte reaches the terminal. */
static int refuse_at(const Source *s, size_t at, const char *expected) {
    char found[32] = "the text ends here";
    int n = 0;
    while (n < 16 && byte_at(s, at + n) >= ' ' && byte_at(s, at + n) < 127)
        n++;
    if (n > 0)
        snprintf(found, sizeof found, "found '%.*s'", n, s->text + at);
    else if (at < s->len)
        snprintf(found, sizeof found, "found byte 0x%02x", byte_at(s, at));
    return fail(s->err, EXIT_FAILED, "byte %zu: %s; expected %s%s", at, found, expected,
                at < s->len ? "" : " (is the file complete?)");
}

/* Checks the escape at a place. cJSON would read \u as four zeros where four hex digits do not
 * follow. */
static int check_escape(const Source *s, size_t at) {
    if (byte_at(s, at + 1) != 'u')
        return 0;
    for (size_t digit = at + 2; digit < at + 6; digit++)
        if (!isxdigit(byte_at(s, digit)))
            return refuse_at(s, at, "four hex digits after \\u");
    return memcmp(s->text + at + 2, "0000", 4)
               ? 0
               : refuse_at(s, at, "no \\u0000 (text with a zero byte is not accepted)");
}

/* Refuses what cJSON would skip or change. Also refuses a text that ends inside brackets or quotes,
 * because some versions of cJSON would read beyond its end. */
static int check_bytes(Source *s) {
    enum { NODE = 96 }; /* bytes, with what malloc and check_tree add; a quote takes fewer */
    size_t invalid = utf8_invalid_at(s->text, s->len);
    bool in_string = false;
    bool number = false; /* the byte before belongs to a number */
    int depth = 0;
    s->memory = 2 * s->len; /* for the strings */
    if (invalid < s->len)
        return refuse_at(s, invalid, "UTF-8");
    if (s->len >= 3 && memcmp(s->text, "\xEF\xBB\xBF", 3) == 0)
        return refuse_at(s, 0, "JSON without a byte order mark");
    for (size_t at = 0; at < s->len; at++) {
        unsigned char c = byte_at(s, at);
        if (c < ' ' && (in_string || !c || !strchr("\t\n\r", c)))
            return refuse_at(s, at, "no control characters (in a string they are escaped)");
        if (in_string && c == '\\') {
            if (check_escape(s, at))
                return -1;
            at++;
        }
        if (c == '"')
            in_string = !in_string;
        if (in_string)
            continue;
        s->memory += strchr("\",{[", c) ? NODE : 0;
        size_t digit = at + (c == '-');
        if (!number && byte_at(s, digit) == '0' && isdigit(byte_at(s, digit + 1)))
            return refuse_at(s, at, "no leading zero");
        if (c == '.' && (!isdigit(byte_at(s, at - 1)) || !isdigit(byte_at(s, at + 1))))
            return refuse_at(s, at, "digits before and behind a point");
        number = isdigit(c) || strchr("+-.eE", c);
        if (c == '{' || c == '[')
            depth++;
        if (c == '}' || c == ']')
            depth--;
        if (depth > MAX_DEPTH)
            return refuse_at(s, at, "nesting of at most 64 levels");
    }
    if (!in_string && depth <= 0)
        return 0;
    return refuse_at(s, s->len, in_string ? "the closing quote of a string" : "a closing bracket");
}

// -------------------------------------------------------------------------------------------------
// Checks of the tree
// -------------------------------------------------------------------------------------------------

static int compare_strings(const void *a, const void *b) {
    return strcmp(*(char **)a, *(char **)b);
}

const char *sort_strings(const char **strings, size_t n) {
    qsort(strings, n, sizeof *strings, compare_strings);
    for (size_t i = 1; i < n; i++)
        if (!strcmp(strings[i - 1], strings[i]))
            return strings[i];
    return NULL;
}

/* Refuses two equal keys in one object, and numbers that a double cannot hold. Sorts the keys to
 * compare them, because a vocabulary is one object with 50,000 keys. */
static int check_tree(const cJSON *node, Error *err) {
    if (cJSON_IsNumber(node) && !isfinite(node->valuedouble))
        return json_refuse(err, node->string ? node->string : "a number", node,
                           "a number of at most 1.7e308");
    const char **keys = xcalloc(cJSON_GetArraySize(node), sizeof *keys);
    size_t n = 0;
    int status = 0;
    for (const cJSON *child = node->child; child && !status; child = child->next) {
        keys[n++] = child->string;
        status = check_tree(child, err);
    }
    const char *twice = cJSON_IsObject(node) ? sort_strings(keys, n) : NULL;
    free(keys);
    if (status || !twice)
        return status;
    return fail(err, EXIT_FAILED,
                "the key \"%.200s\" occurs twice in one object; expected each key once", twice);
}

// -------------------------------------------------------------------------------------------------
// Parsing
// -------------------------------------------------------------------------------------------------

/* Allocates memory for cJSON. Without memory, cJSON would return NULL or leave out a member; here
 * lack of memory ends the program, as everywhere. */
static void *json_memory(size_t size) { return xcalloc(size, 1); }
__attribute__((constructor)) static void json_open(void) {
    cJSON_InitHooks(&(cJSON_Hooks){.malloc_fn = json_memory, .free_fn = free});
}

cJSON *json_parse(const char *text, size_t len, Error *err) {
    Source s = {(char *)text, len, err, 0};
    const char *end = text; /* becomes the end of the value, or where cJSON gave up */
    if (check_bytes(&s) || input_fits("its JSON", s.memory, err))
        return NULL;
    cJSON *tree = cJSON_ParseWithLengthOpts(text, len, &end, false);
    size_t rest = end - text;
    while (isspace(byte_at(&s, rest)))
        rest++;
    bool escape = byte_at(&s, rest) == '\\';
    if (!tree)
        refuse_at(&s, rest,
                  escape ? "an escape of JSON, surrogates in pairs" : "JSON here or just before");
    else if (rest < len)
        refuse_at(&s, rest, "nothing after the value");
    else if (!check_tree(tree, err))
        return tree;
    cJSON_Delete(tree);
    return NULL;
}

cJSON *json_object(const char *text, size_t len, Error *err) {
    cJSON *tree = json_parse(text, len, err);
    if (!tree || cJSON_IsObject(tree))
        return tree;
    cJSON_Delete(tree);
    fail(err, EXIT_FAILED, "holds no JSON object; expected { ... }");
    return NULL;
}

cJSON *json_read(const char *path, size_t max_bytes, Error *err) {
    size_t len;
    char *text = file_read(path, max_bytes, &len, err);
    cJSON *tree = text ? json_object(text, len, err) : NULL;
    if (text && !tree)
        fail_at(err, path);
    free(text);
    return tree;
}

int json_read_if(cJSON **tree, const char *path, size_t max_bytes, Error *err) {
    struct stat st;
    *tree = NULL;
    if (lstat(path, &st) && errno == ENOENT)
        return 0;
    *tree = json_read(path, max_bytes, err);
    return *tree ? 0 : -1;
}

// -------------------------------------------------------------------------------------------------
// Values that are not built
// -------------------------------------------------------------------------------------------------

/* Returns the first place from `at` on that is no white space. */
static size_t skip_blanks(const Source *s, size_t at) {
    while (isspace(byte_at(s, at)))
        at++;
    return at;
}

/* Returns true if a key, which begins with its quote, is one of those that are wanted. One with an
 * escape may be. */
static bool is_wanted(const char *key, const char *wanted) {
    size_t n = 2 + strcspn(key + 1, "\"\\"); /* with the quotes */
    return key[n - 1] == '\\' || memmem(wanted, strlen(wanted), key, n);
}

/* Returns the first place behind the value at a place, and behind the white space after it, or 0 if
 * there is no value. cJSON builds one number, string or word of it at a time. Overwrites the values
 * of an object's members that nobody wants by 0; wanted NULL: all stay. */
static size_t value_end(const Source *s, size_t at, const char *wanted) {
    bool object = byte_at(s, at) == '{';
    char close = object ? '}' : ']';
    if (!object && byte_at(s, at) != '[') {
        const char *end;
        cJSON *leaf = cJSON_ParseWithLengthOpts(s->text + at, s->len - at, &end, false);
        bool is = leaf != NULL;
        cJSON_Delete(leaf);
        return is ? skip_blanks(s, end - s->text) : 0;
    }
    size_t inside = skip_blanks(s, at + 1);
    if (byte_at(s, inside) == close)
        return skip_blanks(s, inside + 1);
    do {
        size_t key = at = skip_blanks(s, at + 1);
        if (object) {
            at = byte_at(s, key) == '"' ? value_end(s, key, NULL) : 0;
            if (byte_at(s, at) != ':')
                return 0;
            at = skip_blanks(s, at + 1);
        }
        size_t value = at;
        at = value_end(s, value, NULL);
        if (at && wanted && !is_wanted(s->text + key, wanted)) {
            memset(s->text + value, ' ', at - value);
            s->text[value] = '0';
        }
    } while (byte_at(s, at) == ',');
    return byte_at(s, at) == close ? skip_blanks(s, at + 1) : 0;
}

char json_kind(const char *text, size_t len) {
    Error ignored;
    Source s = {(char *)text, len, &ignored, 0};
    size_t begin = skip_blanks(&s, 0);
    return !check_bytes(&s) && value_end(&s, begin, NULL) == len ? text[begin] : 0;
}

cJSON *line_parse(const Lines *l, const char *wanted, Error *err) {
    Source s = {(char *)l->line, l->size, err, 0};
    if (l->size > MAX_LINE) {
        fail(err, EXIT_FAILED, "has more than %d MiB; shorten it", MAX_LINE >> 20);
        return NULL;
    }
    if (!check_bytes(&s))
        value_end(&s, skip_blanks(&s, 0), wanted);
    return json_object(l->line, l->size, err); /* which names all faults */
}

// -------------------------------------------------------------------------------------------------
// Values
// -------------------------------------------------------------------------------------------------

const cJSON *json_get(const cJSON *object, const char *key) {
    return cJSON_GetObjectItemCaseSensitive(object, key);
}

const char *json_number(char text[100], double number) {
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(text, 100, "%.*g", digits, number);
        if (strtod(text, NULL) == number)
            break;
    }
    return text;
}

const char *json_describe(char text[100], const cJSON *value) {
    if (!value)
        return "nothing";
    if (cJSON_IsObject(value))
        return "an object";
    if (cJSON_IsArray(value))
        return "a list";
    if (cJSON_IsNull(value))
        return "null";
    if (cJSON_IsBool(value))
        return cJSON_IsTrue(value) ? "true" : "false";
    if (cJSON_IsNumber(value))
        return json_number(text, value->valuedouble);
    snprintf(text, 100, "\"%.80s\"", value->valuestring);
    return text;
}

int json_refuse(Error *err, const char *name, const cJSON *value, const char *expected, ...) {
    char found[100], what[300];
    va_list args;
    va_start(args, expected);
    vsnprintf(what, sizeof what, expected, args);
    va_end(args);
    return fail(err, EXIT_FAILED, "%s is %s; expected %s", name, json_describe(found, value), what);
}

void json_print(FILE *out, const cJSON *tree) {
    char *text = cJSON_Print(tree);
    fprintf(out, "%s\n", text);
    free(text);
}

bool json_whole(const cJSON *value, size_t *number) {
    double d = cJSON_IsNumber(value) ? value->valuedouble : -1;
    if (!(d >= 0 && d <= 0x1p53) || d != floor(d))
        return false; /* above 2^53 a double cannot hold every whole number */
    *number = (size_t)d;
    return true;
}

/* Returns true for what json_write_string writes as \uXXXX: control characters, which must be
 * escaped, and U+0085, U+2028 and U+2029, at which many programs end a line. */
static bool is_escaped(uint32_t code) {
    return code < ' ' || code == 127 || code == 0x85 || code == 0x2028 || code == 0x2029;
}

void json_write_string(FILE *out, const char *s, size_t len) {
    static const char special[] = "\"\\\n\t\r", letters[] = "\"\\ntr";
    putc('"', out);
    for (size_t at = 0, step; at < len; at += step) {
        uint32_t code;
        step = utf8_step(&code, s + at, len - at);
        const char *escape = s[at] ? strchr(special, s[at]) : NULL;
        if (escape)
            fprintf(out, "\\%c", letters[escape - special]);
        else if (code == NO_CHARACTER)
            putc('?', out);
        else if (is_escaped(code))
            fprintf(out, "\\u%04x", code);
        else
            fwrite(s + at, 1, step, out);
    }
    putc('"', out);
}
