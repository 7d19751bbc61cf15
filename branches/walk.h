/* walk.h: the branches of admission.c, and those that walk.c calls. */
#ifndef BRANCHES_WALK_H
#define BRANCHES_WALK_H
#include "plan.h"

/* admission.c: for each schedule, the function that returns how many prompts may take a seat before
 * sweep a->sweep; 0 or less: none. */
extern int (*seats_for[])(const Admission *a);

/* ledger.c: returns true if the tier has pages for the prompt in every sweep in which it will take
 * part. */
bool pages_fit(const Admission *a, const Prompt *q, Tier kv);
/* Adds to the ledger the pages that the prompt of a seat holds from the sweep of its token `first`
 * to that of its last one (sign 1), or takes them back (sign -1). */
void reserve_pages(Admission *a, const Seat *seat, int first, int sign);
/* Makes `sweep` the next sweep of the flight, and drops what the ledger has of those before it. */
void advance_ledger(Admission *a, long sweep);

/* diagonal.c: returns how many prompts may take a seat before a->sweep. */
int diagonal_seats(const Admission *a);
/* Returns true if prompts may enter before the next sequence leaves; row and zig-zag let none. */
bool more_may_enter(const Admission *a);

/* work.c: adds to the plan the work of a stretch: of sweep a->sweep, in which sequences prefill or
 * not, and of the sweeps after it up to `until`. */
void note_work(Plan *p, const Admission *a, bool prefill, long until);
/* Returns the KV term of A.2.1's peak memory, in bytes. */
double a21_cache(const Plan *p, const Task *task);
#endif
