// Barriers and fences. Every call carries its place in the source, for the report of a fault.
#pragma once
#include "runtime.hpp"

inline constexpr const uint3& threadIdx = emulation::index.thread;
inline constexpr const uint3& blockIdx = emulation::index.block;
inline constexpr const dim3& blockDim = emulation::index.block_size;
inline constexpr const dim3& gridDim = emulation::index.grid_size;
inline constexpr int warpSize = 32;

inline void __syncthreads(EMULATION_CALLER) {
  emulation::block_barrier(EMULATION_SITE("__syncthreads"), false);
}
inline int __syncthreads_count(int predicate, EMULATION_CALLER) {
  return emulation::block_barrier(EMULATION_SITE("__syncthreads_count"), predicate != 0)
      .predicate_true;
}
inline int __syncthreads_and(int predicate, EMULATION_CALLER) {
  const auto r = emulation::block_barrier(EMULATION_SITE("__syncthreads_and"), predicate != 0);
  return r.predicate_true == r.threads;
}
inline int __syncthreads_or(int predicate, EMULATION_CALLER) {
  return emulation::block_barrier(EMULATION_SITE("__syncthreads_or"), predicate != 0)
             .predicate_true != 0;
}
inline void __syncwarp(unsigned mask = ~0u, EMULATION_CALLER) {
  emulation::warp_barrier(EMULATION_SITE("__syncwarp"), mask);
}
inline void __threadfence() { emulation::fence(); }
inline void __threadfence_system() { emulation::fence(); }
inline void __threadfence_block() {}

namespace gpu {

// bar.sync and bar.arrive: `threads` of the block (a multiple of 32) meet at barrier `id` (1-15).
inline void barrier_sync(int id, int threads, EMULATION_CALLER) {
  emulation::named_barrier(EMULATION_SITE("barrier_sync"), id, threads, true);
}
inline void barrier_arrive(int id, int threads, EMULATION_CALLER) {
  emulation::named_barrier(EMULATION_SITE("barrier_arrive"), id, threads, false);
}

}  // namespace gpu
