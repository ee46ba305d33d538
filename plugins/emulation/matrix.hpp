// ldmatrix and mma.sync, with the register layouts of the PTX ISA.
#pragma once
#include "memory.hpp"
#include "runtime.hpp"

namespace emulation {

struct alignas(16) Row {
  uint16_t element[8];
};

// The row that this lane brings is read here, in the kernel's own code, so that the checks see it.
template <int Matrices, bool Transposed>
EMULATION_INLINE void load_matrices(const Site& site, uint32_t* registers, const void* row) {
  if (lane() >= 8 * Matrices) return ldmatrix(site, nullptr, Matrices, Transposed, registers);
  require_aligned(static_cast<const Row*>(row), site);
  const Row copy = *static_cast<const Row*>(row);
  ldmatrix(site, &copy, Matrices, Transposed, registers);
}

}  // namespace emulation

namespace gpu {

// 8 x 8 matrices of 16-bit elements from shared memory; lane l gives the address of row l % 8 of
// matrix l / 8.
template <class A, bool Transposed = false>
EMULATION_INLINE void ldmatrix_x1(uint32_t& r, const void* row, EMULATION_CALLER) {
  static_assert(A::has_ldmatrix, "this architecture has no ldmatrix");
  emulation::load_matrices<1, Transposed>(EMULATION_SITE("ldmatrix_x1"), &r, row);
}
template <class A, bool Transposed = false>
EMULATION_INLINE void ldmatrix_x2(uint32_t (&r)[2], const void* row, EMULATION_CALLER) {
  static_assert(A::has_ldmatrix, "this architecture has no ldmatrix");
  emulation::load_matrices<2, Transposed>(EMULATION_SITE("ldmatrix_x2"), r, row);
}
template <class A, bool Transposed = false>
EMULATION_INLINE void ldmatrix_x4(uint32_t (&r)[4], const void* row, EMULATION_CALLER) {
  static_assert(A::has_ldmatrix, "this architecture has no ldmatrix");
  emulation::load_matrices<4, Transposed>(EMULATION_SITE("ldmatrix_x4"), r, row);
}

// mma.sync.m16n8k16, half inputs, float accumulators: d = a b + c.
template <class A>
inline void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                    const float (&c)[4], EMULATION_CALLER) {
  static_assert(A::has_mma, "this architecture has no mma.m16n8k16");
  emulation::mma_f16(EMULATION_SITE("mma_f16"), d, a, b, c);
}
// mma.sync.m16n8k32, int8 inputs, int32 accumulators: d = a b + c.
template <class A>
inline void mma_s8(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const int (&c)[4],
                   EMULATION_CALLER) {
  static_assert(A::has_mma, "this architecture has no mma.m16n8k32");
  emulation::mma_s8(EMULATION_SITE("mma_s8"), d, a, b, c);
}

}  // namespace gpu
