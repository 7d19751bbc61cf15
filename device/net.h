/* net.h: what a pipeline of machines needs of a network (section 4.4). pipeline.c provides it over MPI, sim.c between
 * simulated machines (where only tokens use it), and for the tests tests/local_net.c between the threads of one process. */
#ifndef NET_H
#define NET_H
#include "check.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Net Net;

/* Messages of different kinds never wait for each other: hidden states; new tokens, on their way round; what is agreed on
 * before the run. */
typedef enum { NET_STATES, NET_TOKENS, NET_SETUP, NKINDS_OF_MESSAGES } NetKind;

/* One stage's end of the network. All functions but close may be called by several threads at once, for a pair of stages
 * and a kind by one at a time. Messages of one kind from one stage to another arrive in the order in which they were sent.
 * They fail, with -1 and one line that names the stage, when any stage has failed; over MPI the launcher then ends all
 * processes instead. What a function was given is not touched any more once it has returned, however it ends. */
struct Net {
    int stage, stages; /* stages are counted from 0 */
    int neighbours;    /* stages on this machine, with this one; 0: not known */
    /* Returns when the bytes may be changed again; that may be before or after they have arrived. */
    int (*send)(Net *, int to, NetKind kind, const void *bytes, size_t size, Error *);
    /* Returns when they are here. A message of another size is an error, and as if this stage had failed. */
    int (*receive)(Net *, int from, NetKind kind, void *bytes, size_t size, Error *);
    /* Copies the bytes, and returns at once. */
    int (*post)(Net *, int to, NetKind kind, const void *bytes, size_t size, Error *);
    /* All stages call it: stage 0's bytes come to all. */
    int (*share)(Net *, void *bytes, size_t size, Error *);
    /* All stages call it, each with how far it has come: 0, or -1 and err. Returns 0 if all are well; else -1 to all, with
     * err, which names the stage, of the first that is not. The network goes on in either case. */
    int (*agree)(Net *, int status, Error *);
    /* This stage has failed: everybody's functions end with "stage 2: <text>", of the first one that fails. Over MPI it
     * ends the job, and does not return; its caller has said why. */
    void (*fail)(Net *, const Error *);
    /* All stages call it, when no other function is running. It waits until they have. */
    void (*close)(Net *);
};

/* The network that mpirun has started this process in. NULL and err if there is one and it cannot be used; NULL and err's
 * text empty, at once and without loading MPI, if there is none or this process is alone in it. bytes_s, delay_s: the wire
 * is slowed to so many bytes/s, and a message takes so many seconds more (0: it is not); what is agreed on is not slowed.
 */
Net *net_open(double bytes_s, double delay_s, Error *err);

/* The same out of the library for MPI, which net_open loads from beside the program. share and agree are left to it. */
Net *net_open_mpi(double bytes_s, double delay_s, Error *err);
/* share and agree on top of send and receive, for all who provide a Net. */
int net_share(Net *, void *bytes, size_t size, Error *);
int net_agree(Net *, int status, Error *);

#ifdef __cplusplus
}
#endif
#endif
