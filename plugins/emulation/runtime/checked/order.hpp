// Which accesses are ordered before which, from barriers alone. No schedule enters into it, so a
// missing barrier is found whatever order the threads happened to run in.
//
// In a block, a block barrier starts a new epoch, and what came before is ordered. Within an
// epoch each thread has a clock, and knows how far it has seen the clocks of others: warp and
// named barriers let it see more. Shuffles and votes order no memory.
//
// Blocks are ordered only by a fence and an atomic in the one, then an atomic on the same address
// in the other (the pattern by which the last block adds up what the others left).
#pragma once
#include <cstddef>
#include <cstdint>

#include "../scheduler.hpp"
#include "shadow.hpp"

namespace emulation {
namespace order {

void launch_begins();
void block_begins(uint64_t block_number);
void block_barrier();
void warp_barrier(const Lanes&);
void named_barrier_arrival(int id);
void named_barrier_departure(int id, Thread&);
void named_barrier_reset(int id);
void fence();
void atomic_on(const void* address);

// The stamp of an access that the current thread makes now.
Stamp now(uint64_t site, bool is_atomic);
// True if the access may have been at the same time as what the current thread does now.
bool unordered(const Stamp& past, bool in_shared_memory);
bool in_this_block(const Stamp& past);
uint64_t block_of(const Stamp& past);  // its number in the grid

}  // namespace order
}  // namespace emulation
