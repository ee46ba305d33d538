/* What a test or a harness asks of the emulation: the schedule, the architecture, faults, counters.
   A C interface, so that Python reaches it through ctypes. */
#pragma once
#include <stdint.h>

/* One line a counter: its name in EmulationCounters and in emulation_counter(). Bytes are those
   that kernels asked for in global memory (gpu::load, gpu::store, cp.async, atomics, wmma). */
#define EMULATION_COUNTERS(X)                                                       \
  X(launches)          /* kernels started */                                        \
  X(blocks)            /* blocks executed */                                        \
  X(threads)           /* threads executed */                                       \
  X(load_bytes)        /* read from global memory */                                \
  X(store_bytes)       /* written to global memory */                               \
  X(atomic_bytes)      /* global memory touched by atomics, once per atomic */      \
  X(block_barriers)    /* barriers completed by a whole block */                    \
  X(warp_collectives)  /* shuffles, votes, warp barriers and matrix instructions */ \
  X(allocations)       /* device and pinned memory */                               \
  X(releases)          /* the same, given back */                                   \
  X(blocking_calls)    /* synchronisations and copies that wait */                  \
  X(stream_operations) /* launches, copies and fills put on a stream */             \
  X(default_stream)    /* those of them put on the default stream */

#ifdef __cplusplus
extern "C" {
#endif

typedef struct EmulationCounters {
#define EMULATION_FIELD(name) uint64_t name;
  EMULATION_COUNTERS(EMULATION_FIELD)
#undef EMULATION_FIELD
} EmulationCounters;

/* Forgets faults and the last error, and sets every counter to zero. */
void emulation_reset(void);

const EmulationCounters* emulation_counters(void);
/* The counter of that name; UINT64_MAX if there is none. */
uint64_t emulation_counter(const char* name);

/* Faults since the last reset, oldest first, each as
   "FILE:LINE: KIND: what happened [kernel, block, thread]". */
int emulation_fault_count(void);
const char* emulation_fault(int i);

/* "seq", "rev" or "rand:SEED": the order of blocks and threads. 0, or -1 for anything else.
   The environment variable EMULATION_SCHEDULE sets the first one. */
int emulation_set_schedule(const char* schedule);

/* The device to imitate: 72, 80, 86, 87, 89, 90, 100 or 120. 0, or -1 for anything else.
   The environment variable EMULATION_ARCH sets the first one (87 if absent). */
int emulation_set_architecture(int sm);

/* Execute one block in `every`, so that the traffic of a large grid can be sampled; 1 is all. With
   more than 1, reading global memory that nobody wrote is no fault. */
void emulation_set_block_sampling(uint64_t every);

/* 1 if this runtime watches every access of kernels compiled for it (see README.md). */
int emulation_checks_accesses(void);

#ifdef __cplusplus
}
#endif
