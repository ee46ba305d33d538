// Global memory through functions that count bytes, and asynchronous copies to shared memory.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "runtime.hpp"

namespace emulation {

// In a build for the checked runtime, accesses that gpu::load and gpu::store have announced are
// not announced again by the compiler's instrumentation.
#ifdef EMULATION_CHECKED
#define EMULATION_ANNOUNCED inline __attribute__((noinline, no_sanitize("thread")))
#else
#define EMULATION_ANNOUNCED EMULATION_INLINE
#endif

// By memcpy, since the copy constructors of half2 and its like are functions of their own.
template <class T>
EMULATION_ANNOUNCED T read_announced(const T* p) {
  T v;
  std::memcpy(static_cast<void*>(&v), p, sizeof v);
  return v;
}
template <class T>
EMULATION_ANNOUNCED void write_announced(T* p, const T& v) {
  std::memcpy(static_cast<void*>(p), &v, sizeof v);
}
EMULATION_ANNOUNCED void copy_announced(const Copy& copy) {
  std::memcpy(copy.to, copy.from, static_cast<size_t>(copy.filled));
  std::memset(static_cast<char*>(copy.to) + copy.filled, 0,
              static_cast<size_t>(copy.bytes - copy.filled));
}

// Accesses of 1 to 16 bytes are aligned to their size on a GPU, whatever C++ says of T.
template <class T>
EMULATION_INLINE void require_aligned(const T* p, const Site& site) {
  static_assert(sizeof(T) <= 16 && (sizeof(T) & (sizeof(T) - 1)) == 0,
                "an access is 1, 2, 4, 8 or 16 bytes");
  if (reinterpret_cast<uintptr_t>(p) % sizeof(T))
    fail(site, "misaligned access", "%p is not aligned to %zu bytes", static_cast<const void*>(p),
         sizeof(T));
}

}  // namespace emulation

namespace gpu {

template <class T>
EMULATION_INLINE T load(const T* p, EMULATION_CALLER) {
  emulation::require_aligned(p, EMULATION_SITE("load"));
  emulation::global_load(p, sizeof(T));
  return emulation::read_announced(p);
}
template <class T>
EMULATION_INLINE T load_readonly(const T* p, EMULATION_CALLER) {
  return load(p, file_, line_);
}
template <class T>
EMULATION_INLINE T load_streaming(const T* p, EMULATION_CALLER) {
  return load(p, file_, line_);
}
// By value, so that the kernel itself reads what it stores, where the checks see it.
template <class T>
EMULATION_INLINE void store(T* p, std::common_type_t<T> v, EMULATION_CALLER) {
  emulation::require_aligned(p, EMULATION_SITE("store"));
  emulation::global_store(p, sizeof(T));
  emulation::write_announced<T>(p, v);
}

// cp.async (sm_80): Bytes (4, 8 or 16) from global to shared memory, of which the last
// Bytes - filled are zeros. The data is there after cp_async_wait in the thread that issued it,
// and for others after a barrier that follows.
template <class A, int Bytes = 16>
EMULATION_INLINE void cp_async(void* shared, const void* global, int filled = Bytes,
                               EMULATION_CALLER) {
  static_assert(A::has_cp_async, "this architecture has no cp.async");
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "cp.async copies 4, 8 or 16 bytes");
  emulation::copy_start(EMULATION_SITE("cp_async"), {shared, global, Bytes, filled});
}
template <class A>
inline void cp_async_commit() {
  static_assert(A::has_cp_async, "this architecture has no cp.async");
  emulation::copy_commit();
}
// Waits until at most Keep of the thread's committed groups are in flight.
template <class A, int Keep = 0>
inline void cp_async_wait() {
  static_assert(A::has_cp_async, "this architecture has no cp.async");
  emulation::Copy copy;
  while (emulation::copy_next(Keep, copy)) emulation::copy_announced(copy);
}

}  // namespace gpu

template <class T>
EMULATION_INLINE T __ldg(const T* p, EMULATION_CALLER) {
  return gpu::load(p, file_, line_);
}
