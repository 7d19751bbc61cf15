/* written.h: the one writer of the checkpoints that tests make, and of what can be wrong with a file. */
#ifndef WRITTEN_H
#define WRITTEN_H
#include "io/io.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* A checkpoint to be written. Tensor t is that of checkpoint_part. */
typedef struct {
    OptConfig config;
    Type type;          /* of its tensors: F16, BF16 or F32 */
    const char *prefix; /* in front of "decoder." in their names: "model." or "" */
    int shards; /* 2 and more: layer j is in file (j + 1) % shards of a.safetensors, b.safetensors, ..., all else in the
                   first */
    bool head;  /* there is an lm_head.weight, though config.json says that the token table is the head */
    Type head_type;
    float (*number)(const OptConfig *config, int t, size_t e); /* element e of a tensor; NULL: any_number */
    int odd; /* the tensor in which element odd_at is odd_number; 0: there is none, so that it cannot be the token table */
    size_t odd_at;
    float odd_number;
} Model;
/* Returns element e of tensor t, as write_model writes it. */
float model_number(const Model *model, int t, size_t e);
/* Returns a random number in [-.1, .1), which depends on t and e only. */
float any_number(int t, size_t e);
void write_config(const char *dir, const OptConfig *config);
/* Writes config.json, the files of safetensors, without blanks in their headers, and the index of several. */
void write_model(const char *dir, const Model *model);
/* Writes a model to a fresh directory, and returns its path as temp_dir does. */
const char *model_dir(Model model);

/* Returns the same temporary directory each time, for a file that is written anew for each case. */
const char *suite_dir(void);

/* What is wrong with a file, and the part of the program's refusal that says so. */
typedef struct {
    const char *from, *to, *says;
} Fault;
/* Replaces the first `from` in a text by `to`; with "" appends to the text, and with NULL replaces all of it. In files of
 * safetensors the text is the header, and the data stays. A text without `from` ends the program. */
void spoil(const char *dir, const char *file, const char *from, const char *to);

/* Asserts that an error has this code, is one line and contains `part`; then clears it. */
void said(Error *err, int code, const char *part);
/* Opens and closes what `name` names: a directory, mostly. Returns false and fills err if it is refused. */
typedef bool Opens(const char *name, Error *err);
bool checkpoint_opens(const char *dir, Error *err);
/* Asserts that it is refused with this code, in one line that begins with the name and contains `says`. */
void refuses(Opens *opens_it, int code, const char *name, const char *says);
/* Asserts this for each of n faults in a file of a directory. The file is afterwards as it was. */
void refuses_each(Opens *opens_it, int code, const char *dir, const char *file, const Fault *fault, size_t n);
/* Opens a checkpoint. If it is refused, the test ends. */
Checkpoint *opens(const char *dir);
#endif
