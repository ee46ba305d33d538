// The calls that -fsanitize=thread,alignment puts into code, answered by the checked runtime.
#include "../fault.hpp"
#include "watch.hpp"

using emulation::Access;
using emulation::watch;

#define CODE __builtin_return_address(0)

#define ACCESSES(bytes)                                                                 \
  void __tsan_read##bytes(void* p) { watch(p, bytes, Access::load, CODE); }             \
  void __tsan_write##bytes(void* p) { watch(p, bytes, Access::store, CODE); }           \
  void __tsan_unaligned_read##bytes(void* p) { watch(p, bytes, Access::load, CODE); }   \
  void __tsan_unaligned_write##bytes(void* p) { watch(p, bytes, Access::store, CODE); } \
  void __tsan_read_write##bytes(void* p) {                                              \
    watch(p, bytes, Access::load, CODE);                                                \
    watch(p, bytes, Access::store, CODE);                                               \
  }

// Atomics are announced by atomics.hpp; here they are only carried out. The order arguments of
// the compiler's calls are ignored: sequential consistency is the strongest.
#define ATOMICS(bits, T)                                                                           \
  T __tsan_atomic##bits##_load(const volatile T* p, int) {                                         \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                   \
  }                                                                                                \
  void __tsan_atomic##bits##_store(volatile T* p, T v, int) {                                      \
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                                      \
  }                                                                                                \
  T __tsan_atomic##bits##_exchange(volatile T* p, T v, int) {                                      \
    return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);                                            \
  }                                                                                                \
  T __tsan_atomic##bits##_fetch_add(volatile T* p, T v, int) {                                     \
    return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);                                             \
  }                                                                                                \
  T __tsan_atomic##bits##_fetch_sub(volatile T* p, T v, int) {                                     \
    return __atomic_fetch_sub(p, v, __ATOMIC_SEQ_CST);                                             \
  }                                                                                                \
  T __tsan_atomic##bits##_fetch_and(volatile T* p, T v, int) {                                     \
    return __atomic_fetch_and(p, v, __ATOMIC_SEQ_CST);                                             \
  }                                                                                                \
  T __tsan_atomic##bits##_fetch_or(volatile T* p, T v, int) {                                      \
    return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST);                                              \
  }                                                                                                \
  T __tsan_atomic##bits##_fetch_xor(volatile T* p, T v, int) {                                     \
    return __atomic_fetch_xor(p, v, __ATOMIC_SEQ_CST);                                             \
  }                                                                                                \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile T* p, T* expected, T v, int, int) {   \
    return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  }                                                                                                \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile T* p, T* expected, T v, int, int) {     \
    return __atomic_compare_exchange_n(p, expected, v, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);  \
  }                                                                                                \
  T __tsan_atomic##bits##_compare_exchange_val(volatile T* p, T expected, T v, int, int) {         \
    __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);       \
    return expected;                                                                               \
  }

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_read(void*) {}
void __tsan_vptr_update(void*, void*) {}

ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void* p, size_t bytes) { watch(p, bytes, Access::load, CODE); }
void __tsan_write_range(void* p, size_t bytes) { watch(p, bytes, Access::store, CODE); }

ATOMICS(8, uint8_t)
ATOMICS(16, uint16_t)
ATOMICS(32, uint32_t)
ATOMICS(64, uint64_t)
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __tsan_atomic_signal_fence(int) {}

// -fsanitize=alignment: what the compiler says of a pointer that is not aligned for its type.
struct TypeMismatch {
  const char* file;
  uint32_t line, column;
  const void* type;
  unsigned char log_alignment, kind;
};
void __ubsan_handle_type_mismatch_v1(TypeMismatch* at, void* p) {
  emulation::report(at->file, static_cast<int>(at->line), "misaligned access",
                    emulation::text("%p is not aligned to %d bytes", p, 1 << at->log_alignment));
}

}  // extern "C"
