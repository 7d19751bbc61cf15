/* choose.h: where a task runs, its policy and its plan (choose.c). Functions that can fail return -1 and err. */
#ifndef CHOOSE_H
#define CHOOSE_H
#include "cost/cost.h"

/* Decides everything before anything is allocated or written: where the task runs, under which policy, and where every byte
 * of it lies. What does not fit is refused. one_block: as for search_for. */
int plan_task(TaskRun *run, Task *task, bool one_block, Error *err);
/* Threads that compute: as many as are given, or one for each processor, as far as a quota of CPU keeps them busy. */
void choose_threads(TaskRun *run);
/* Where the task runs, with how many threads and how much memory. on_paper: nothing runs, and a machine of --hardware is
 * all numbers, as for the sim. Beside the CPU's attention the lanes of a GPU post, copy and wait: they get cores as well.
 */
int choose_machine(TaskRun *run, bool on_paper, Error *err);
/* The machine of --hardware, with the numbers that --with changes. */
int read_machine(Hardware *hardware, const Options *options, Error *err);
/* The machine that the search is for: a file's, or this one, measured; with its links as slow as they will be. */
int know_machine(const TaskRun *run, Error *err);
/* How the flags, or a packed checkpoint, say that weights and cache are packed; and who attends sparsely. */
int settle_compression(const TaskRun *run, Error *err);
/* What is searched for: what the flags leave open. one_block: the task is as long as a block may be, and ends behind the
 * policy's. */
Search search_for(const TaskRun *run, const Task *task, bool one_block);
/* The best policies, at most `most`, or the one that the flags give in full, its token table where there is room; with what
 * is expected of them, if the machine is known (found not NULL). Returns their number, or -1 and err. */
int find_policies(Found *found, int most, Search *s, Error *err);
/* The machines of a pipeline, which are processes or made of numbers, and what is between them. */
Cluster cluster_of(const TaskRun *run);
/* All that the process is expected to have besides the tiers, now that the plan is known: four moves for each page of a
 * batch in the schedule and in every lane's queue, and two notes for each page in each batch that passes through staging.
 * In a trace a lane has two slices at most for a layer and a batch. */
size_t process_planned(const TaskRun *run);
/* How many traces the file that this process writes has: one for each stage. */
int trace_count(const TaskRun *run);
/* A stage behind the first, which has nothing to say. */
bool follows(const TaskRun *run);

#endif
