// Arithmetic intrinsics. An approximate one is computed exactly, so its last bits differ from a
// GPU's; those with a rounding in their name (_rn) are IEEE on both.
#pragma once
#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "runtime.hpp"

// ---- bits ----
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (x >> i & 1) << (31 - i);
  return reversed;
}
// Byte i of the result is byte `selector nibble i` of y:x; the nibble's top bit replicates a sign.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = uint64_t{y} << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned nibble = selector >> 4 * i & 0xF;
    auto byte = static_cast<unsigned>(bytes >> 8 * (nibble & 7) & 0xFF);
    if (nibble & 8) byte = byte & 0x80 ? 0xFF : 0;
    result |= byte << 8 * i;
  }
  return result;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (shift & 31));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) << (shift & 31) >> 32);
}

namespace emulation {
template <class To, class From>
inline To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
}  // namespace emulation
inline int __float_as_int(float x) { return emulation::same_bits<int>(x); }
inline unsigned __float_as_uint(float x) { return emulation::same_bits<unsigned>(x); }
inline float __int_as_float(int x) { return emulation::same_bits<float>(x); }
inline float __uint_as_float(unsigned x) { return emulation::same_bits<float>(x); }

// ---- integers ----
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 32; i += 8) c += static_cast<int8_t>(a >> i) * static_cast<int8_t>(b >> i);
  return c;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  for (int i = 0; i < 32; i += 8) c += (a >> i & 0xFF) * (b >> i & 0xFF);
  return c;
}
inline int __mulhi(int a, int b) { return static_cast<int>(int64_t{a} * b >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(uint64_t{a} * b >> 32);
}
template <class A, class B>
inline std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>)
    return std::fmin(T(a), T(b));  // the number, if one is NaN
  else
    return T(b) < T(a) ? T(b) : T(a);
}
template <class A, class B>
inline std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>)
    return std::fmax(T(a), T(b));
  else
    return T(a) < T(b) ? T(b) : T(a);
}

// ---- conversions: NaN is 0, and what does not fit is the nearest that does ----
namespace emulation {
inline int clamped_int(float whole) {
  if (std::isnan(whole)) return 0;
  if (whole >= 2147483648.f) return INT_MAX;
  return whole < -2147483648.f ? INT_MIN : static_cast<int>(whole);
}
}  // namespace emulation
inline int __float2int_rn(float x) { return emulation::clamped_int(std::nearbyint(x)); }
inline int __float2int_rd(float x) { return emulation::clamped_int(std::floor(x)); }
inline int __float2int_ru(float x) { return emulation::clamped_int(std::ceil(x)); }
inline int __float2int_rz(float x) { return emulation::clamped_int(std::trunc(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }

// ---- floating point ----
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __saturatef(float x) { return std::isnan(x) ? 0.f : std::min(std::max(x, 0.f), 1.f); }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline float __exp2f(float x) { return std::exp2(x); }
inline float __exp10f(float x) { return std::pow(10.f, x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float __powf(float x, float y) { return std::pow(x, y); }

[[noreturn]] inline void __trap(EMULATION_CALLER) {
  emulation::fail(EMULATION_SITE("__trap"), "trap", "the kernel gave up");
  __builtin_trap();
}
