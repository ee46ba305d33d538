// What the runtime tells whoever watches memory accesses. plain/ watches nothing; checked/ keeps a
// shadow of every byte. A runtime has one of the two.
#pragma once
#include <cstddef>
#include <cstdint>

#include "scheduler.hpp"

namespace emulation {

// ---- device memory ----
void* device_allocate(size_t bytes);  // 256-byte aligned; null if there is none
bool device_release(void*);           // false if it was not allocated
bool device_contains(const void*);
// The host filled device memory (cudaMemcpy, cudaMemset, pinned memory).
void host_wrote(const void*, size_t bytes);

// The dynamic shared memory of a launch; exactly `bytes` may be touched.
void* allocate_dynamic_shared(size_t bytes);
void release_dynamic_shared(void*);

namespace access {

// ---- order between threads ----
void launch_begins(const void* kernel_function, const void* dynamic, size_t dynamic_bytes);
void block_begins(uint64_t block_number);
void block_barrier();
void warp_barrier(const Lanes&);
void named_barrier_arrival(int id);             // of the current thread
void named_barrier_departure(int id, Thread&);  // of each that waited, once all have arrived
void named_barrier_reset(int id);               // after the last departure

// ---- copies in flight; `code` is an address in the kernel ----
void copy_starts(const Copy&, const void* code);
void copy_ends(const Copy&);

}  // namespace access
}  // namespace emulation
