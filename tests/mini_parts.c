/* mini_parts.c: see mini_parts.h. Types of mini.c have the names of the engine's; so it is compiled here, by itself. These
 * are the functions and variables that both have. */
#undef _GNU_SOURCE  // which mini.c defines itself
#define main mini_main
#define ask mini_ask
#define embed mini_embed
#define find_square mini_find_square
#define load_weight mini_load_weight
#define paper_lp mini_paper_lp
#define place_weights mini_place_weights
#define post mini_post
#define scratch mini_scratch
#define tier_name mini_tier_name
#include "mini.c"
#include "tests/mini_parts.h"

_Static_assert(sizeof(MiniTableau) == sizeof(Tableau) && MINI_COST == (int)COST && MINI_COLUMNS == (int)RIGHT,
               "the tableaus are the same");

void mini_pivot(MiniTableau *after, const MiniTableau *before, int r, int c) {
    Tableau t;
    memcpy(&t, before, sizeof t);
    pivot(&t, r, c);
    memcpy(after, &t, sizeof t);
}

bool mini_minimize(MiniTableau *mini) {
    Tableau t;
    memcpy(&t, mini, sizeof t);
    const bool ended = minimize(&t, COST);
    memcpy(mini, &t, sizeof t);
    return ended;
}
