/* team.h: the threads that compute, one team for the whole process, and working memory for each (team.c). It knows nothing
 * of the program. */
#ifndef TEAM_H
#define TEAM_H
#include <stddef.h>

/* Threads that compute from now on: the one that calls and those that help it, which are started here. 0 asks for all the
 * processors that this process may use. Returns the number, which is less where the system does not let so many be
 * started. Before the first call it is 1. Not while anybody computes. */
int host_set_threads(int threads);
int host_processors(void);      /* those that this process may run on */
int host_threads(void);         /* that number */
int host_threads_missing(void); /* by how much it is less than what was asked for */

/* Does numbers first .. first+n-1 of a loop. */
typedef void (*LoopPart)(const void *what, int first, int n);

/* Calls part(what, ...) for all of 0 .. count-1, dealt to whoever of the team is free, and returns when all is done. Which
 * thread does which must not matter. Any thread may call at any time, and loops of several callers run side by side. work:
 * how many multiplications it is (or as much of something else); little is done by the caller alone, at once. */
void host_share(double work, int count, LoopPart part, const void *what);

/* This thread's working memory, at least that many floats with anything in them, the first at the beginning of a cache
 * line. It grows to the largest need, so a steady loop allocates nothing; it is freed when the thread ends. Valid until
 * the thread asks again. */
float *scratch(size_t floats);

#endif
