// Shuffles, votes, matches and reductions within a warp.
#pragma once
#include <cstring>
#include <type_traits>

#include "runtime.hpp"

namespace emulation {

template <class T>
inline uint64_t to_bits(T v) {
  static_assert(sizeof(T) <= 8, "warp collectives take values of at most 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, static_cast<const void*>(&v), sizeof v);
  return bits;
}
template <class T>
inline T from_bits(uint64_t bits) {
  T v;
  std::memcpy(static_cast<void*>(&v), &bits, sizeof v);
  return v;
}
template <class T>
inline T shuffle_value(const Site& site, unsigned mask, T v, int source) {
  return from_bits<T>(shuffle(site, mask, to_bits(v), source));
}

}  // namespace emulation

// A width below 32 splits the warp into segments; a source outside the segment is the lane itself.
template <class T>
inline T __shfl_sync(unsigned mask, T v, int source, int width = 32, EMULATION_CALLER) {
  const int segment = emulation::lane() & ~(width - 1);
  return emulation::shuffle_value(EMULATION_SITE("__shfl_sync"), mask, v,
                                  segment | (source & (width - 1)));
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32, EMULATION_CALLER) {
  const int l = emulation::lane(), source = l - static_cast<int>(delta);
  return emulation::shuffle_value(EMULATION_SITE("__shfl_up_sync"), mask, v,
                                  source < (l & ~(width - 1)) ? l : source);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32, EMULATION_CALLER) {
  const int l = emulation::lane(), source = l + static_cast<int>(delta);
  return emulation::shuffle_value(EMULATION_SITE("__shfl_down_sync"), mask, v,
                                  source > (l | (width - 1)) ? l : source);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T v, int lane_mask, int width = 32, EMULATION_CALLER) {
  const int l = emulation::lane(), source = l ^ lane_mask;
  // Lower segments may be read, higher ones not (CUDA C++ Programming Guide, "Warp Shuffle").
  return emulation::shuffle_value(EMULATION_SITE("__shfl_xor_sync"), mask, v,
                                  source > (l | (width - 1)) ? l : source);
}

inline unsigned __activemask() { return emulation::active_lanes(); }
inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATION_CALLER) {
  return emulation::reduce(EMULATION_SITE("__ballot_sync"), mask, emulation::Reduction::ballot,
                           predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate, EMULATION_CALLER) {
  return emulation::reduce(EMULATION_SITE("__any_sync"), mask, emulation::Reduction::ballot,
                           predicate != 0) != 0;
}
inline int __all_sync(unsigned mask, int predicate, EMULATION_CALLER) {
  return emulation::reduce(EMULATION_SITE("__all_sync"), mask, emulation::Reduction::ballot,
                           predicate == 0) == 0;
}
template <class T>
inline unsigned __match_any_sync(unsigned mask, T v, EMULATION_CALLER) {
  return emulation::reduce(EMULATION_SITE("__match_any_sync"), mask,
                           emulation::Reduction::match_any, emulation::to_bits(v));
}
template <class T>
inline unsigned __match_all_sync(unsigned mask, T v, int* all_equal, EMULATION_CALLER) {
  const unsigned lanes = emulation::reduce(EMULATION_SITE("__match_all_sync"), mask,
                                           emulation::Reduction::match_all, emulation::to_bits(v));
  *all_equal = lanes != 0;
  return lanes;
}

// __reduce_*_sync, from sm_80. CUDA has them for int and unsigned.
#define EMULATION_REDUCE(name, T, operation)                                                      \
  inline T name(unsigned mask, T v, EMULATION_CALLER) {                                           \
    emulation::require(EMULATION_SITE(#name), 80);                                                \
    return static_cast<T>(emulation::reduce(                                                      \
        EMULATION_SITE(#name), mask, emulation::Reduction::operation, static_cast<unsigned>(v))); \
  }
EMULATION_REDUCE(__reduce_add_sync, unsigned, add)
EMULATION_REDUCE(__reduce_add_sync, int, add)
EMULATION_REDUCE(__reduce_min_sync, unsigned, min)
EMULATION_REDUCE(__reduce_min_sync, int, min_signed)
EMULATION_REDUCE(__reduce_max_sync, unsigned, max)
EMULATION_REDUCE(__reduce_max_sync, int, max_signed)
EMULATION_REDUCE(__reduce_and_sync, unsigned, bit_and)
EMULATION_REDUCE(__reduce_or_sync, unsigned, bit_or)
EMULATION_REDUCE(__reduce_xor_sync, unsigned, bit_xor)
#undef EMULATION_REDUCE
