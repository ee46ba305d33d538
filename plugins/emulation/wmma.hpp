// nvcuda::wmma for half and 8-bit integers. Which lane holds which element is nobody's business
// by contract; here element e of a row-major tile is element e % n of lane e / n.
#pragma once
#include <cuda_fp16.h>

#include <type_traits>

#include "memory.hpp"
#include "runtime.hpp"

namespace nvcuda {
namespace wmma {

struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
enum layout_t { mem_row_major, mem_col_major };

template <class Use, int M, int N, int K, class T, class Layout = void>
struct fragment {
  static constexpr int rows = std::is_same_v<Use, matrix_b> ? K : M;
  static constexpr int columns = std::is_same_v<Use, matrix_a> ? K : N;
  static constexpr int num_elements = rows * columns / 32;
  T x[num_elements];
};

template <class U, int M, int N, int K, class T, class L, class V>
inline void fill_fragment(fragment<U, M, N, K, T, L>& f, V v) {
  for (T& element : f.x) element = T(v);
}

}  // namespace wmma
}  // namespace nvcuda

namespace emulation {

template <class T>
constexpr Element element_of() {
  if constexpr (std::is_same_v<T, __half>) return Element::f16;
  if constexpr (std::is_same_v<T, float>) return Element::f32;
  if constexpr (std::is_same_v<T, signed char>) return Element::s8;
  if constexpr (std::is_same_v<T, unsigned char>) return Element::u8;
  if constexpr (std::is_same_v<T, int>) return Element::s32;
}

// The guide asks for 256 bits of alignment; a tile of 8-bit rows keeps 128 when it steps along K.
template <class T>
inline void check_tile(const Site& site, const T* p, unsigned stride) {
  whole_warp(site);
  const size_t alignment = sizeof(T) == 1 ? 16 : 32;
  if (reinterpret_cast<uintptr_t>(p) % alignment)
    fail(site, "misaligned access", "%p is not aligned to %zu bytes", static_cast<const void*>(p),
         alignment);
  if (stride * sizeof(T) % 16)
    fail(site, "misaligned access", "rows of %u elements are not a multiple of 16 bytes", stride);
}

struct Read {
  template <class T>
  EMULATION_INLINE void operator()(T& element, const T* from) const {
    element = read_announced(from);
  }
};
struct Write {
  template <class T>
  EMULATION_INLINE void operator()(const T& element, T* to) const {
    write_announced(to, element);
  }
};

// Calls touch(element, address) for each element that this lane holds.
template <class Fragment, class T, class Touch>
EMULATION_INLINE void for_each_element(Fragment& f, T* tile, unsigned stride, bool by_rows,
                                       bool store, Touch touch) {
  for (int i = 0; i < Fragment::num_elements; ++i) {
    const unsigned e = static_cast<unsigned>(lane() * Fragment::num_elements + i);
    const unsigned row = e / Fragment::columns, column = e % Fragment::columns;
    T* p = tile + (by_rows ? row * size_t{stride} + column : column * size_t{stride} + row);
    count_if_global(p, sizeof(T), store);
    touch(f.x[i], p);
  }
}

}  // namespace emulation

namespace nvcuda {
namespace wmma {

template <class U, int M, int N, int K, class T, class L>
EMULATION_INLINE void load_matrix_sync(fragment<U, M, N, K, T, L>& f, const T* p, unsigned stride,
                                       EMULATION_CALLER) {
  emulation::check_tile(EMULATION_SITE("load_matrix_sync"), p, stride);
  emulation::for_each_element(f, p, stride, std::is_same_v<L, row_major>, false, emulation::Read{});
}
template <int M, int N, int K, class T>
EMULATION_INLINE void load_matrix_sync(fragment<accumulator, M, N, K, T>& f, const T* p,
                                       unsigned stride, layout_t layout, EMULATION_CALLER) {
  emulation::check_tile(EMULATION_SITE("load_matrix_sync"), p, stride);
  emulation::for_each_element(f, p, stride, layout == mem_row_major, false, emulation::Read{});
}
template <int M, int N, int K, class T>
EMULATION_INLINE void store_matrix_sync(T* p, const fragment<accumulator, M, N, K, T>& f,
                                        unsigned stride, layout_t layout, EMULATION_CALLER) {
  emulation::check_tile(EMULATION_SITE("store_matrix_sync"), p, stride);
  emulation::for_each_element(f, p, stride, layout == mem_row_major, true, emulation::Write{});
}

template <int M, int N, int K, class T, class LA, class LB, class D, class C>
inline void mma_sync(fragment<accumulator, M, N, K, D>& d,
                     const fragment<matrix_a, M, N, K, T, LA>& a,
                     const fragment<matrix_b, M, N, K, T, LB>& b,
                     const fragment<accumulator, M, N, K, C>& c, EMULATION_CALLER) {
  static_assert(K == 16 && M * N == 256 && (M == 8 || M == 16 || M == 32),
                "wmma shapes are m16n16k16, m32n8k16 and m8n32k16");
  static_assert(sizeof(T) == 1 ? std::is_same_v<D, int> && std::is_same_v<C, int>
                               : !std::is_same_v<D, int> && !std::is_same_v<C, int>,
                "half accumulates in half or float, 8-bit integers in int");
  using emulation::element_of;
  emulation::wmma(EMULATION_SITE("wmma::mma_sync"),
                  {M, N, K, element_of<T>(), element_of<C>(), element_of<D>()}, a.x, b.x, c.x, d.x);
}

}  // namespace wmma
}  // namespace nvcuda
