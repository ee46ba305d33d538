// Atomics: relaxed, as CUDA's are, and real ones, so that sanitizers know them.
#pragma once
#include <cstring>
#include <type_traits>

#include "runtime.hpp"

namespace emulation {

// *p = change(*p) in one step; returns what was there.
template <class T, class Change>
EMULATION_INLINE T read_modify_write(T* p, Change change) {
  using Bits = std::conditional_t<sizeof(T) == 8, uint64_t,
                                  std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>;
  static_assert(sizeof(Bits) == sizeof(T), "atomics take 2, 4 or 8 bytes");
  atomic(p, sizeof(T));
  Bits* bits = reinterpret_cast<Bits*>(p);
  Bits before = __atomic_load_n(bits, __ATOMIC_RELAXED), after;
  T old;
  do {
    std::memcpy(static_cast<void*>(&old), &before, sizeof old);
    const T changed = change(old);
    std::memcpy(&after, static_cast<const void*>(&changed), sizeof after);
  } while (!__atomic_compare_exchange_n(bits, &before, after, false, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED));
  return old;
}

template <class T>
using Same = std::common_type_t<T>;  // takes no part in deduction

}  // namespace emulation

#define EMULATION_ATOMIC(name, expression)                                        \
  template <class T>                                                              \
  EMULATION_INLINE T name(T* p, emulation::Same<T> v) {                           \
    return emulation::read_modify_write(p, [v](T old) { return T(expression); }); \
  }
EMULATION_ATOMIC(atomicAdd, old + v)
EMULATION_ATOMIC(atomicSub, old - v)
EMULATION_ATOMIC(atomicMax, old < v ? v : old)
EMULATION_ATOMIC(atomicMin, v < old ? v : old)
EMULATION_ATOMIC(atomicExch, (static_cast<void>(old), v))
EMULATION_ATOMIC(atomicAnd, (old & v))
EMULATION_ATOMIC(atomicOr, old | v)
EMULATION_ATOMIC(atomicXor, old ^ v)
EMULATION_ATOMIC(atomicInc, old >= v ? T(0) : old + 1)
EMULATION_ATOMIC(atomicDec, old == 0 || old > v ? v : old - 1)
#undef EMULATION_ATOMIC

template <class T>
EMULATION_INLINE T atomicCAS(T* p, emulation::Same<T> expected, emulation::Same<T> v) {
  return emulation::read_modify_write(p, [=](T old) { return old == expected ? v : old; });
}
