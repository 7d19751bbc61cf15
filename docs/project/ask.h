/* ask.h: what the judge of the open project and an entry say to each other: to its standard input a
 * question and the bytes behind it; from its file 3 the number of bytes of the answer, and these.
 */
#ifndef ASK_H
#define ASK_H
#include "project.h"

typedef enum { ASK_PACK, ASK_UNPACK, ASK_PAGES, ASK_ENTER } AskKind;
typedef struct {
    int32_t kind, bytes; /* bytes behind this struct */
    Matrix matrix;       /* of ASK_PACK and ASK_UNPACK */
    int32_t pages;       /* of ASK_PAGES, whose bytes are mass[pages] and age[pages] */
} Ask;
enum { ANSWERS_FD = 3 };
#endif
