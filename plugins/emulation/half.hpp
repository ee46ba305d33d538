// The half and bfloat16 functions that NVIDIA's headers keep for the device: computed in a wider
// type and rounded once.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "intrinsics.hpp"

inline __half __hfma(__half a, __half b, __half c) {
  return __double2half(std::fma(static_cast<double>(__half2float(a)), __half2float(b),
                                static_cast<double>(__half2float(c))));
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  return __half2(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y));
}
inline __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
  return __double2bfloat16(std::fma(static_cast<double>(__bfloat162float(a)), __bfloat162float(b),
                                    static_cast<double>(__bfloat162float(c))));
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  return __nv_bfloat162(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y));
}

#define EMULATION_HALF(name, expression)       \
  inline __half name(__half a) {               \
    const float x = __half2float(a);           \
    return __float2half_rn(expression);        \
  }                                            \
  inline __nv_bfloat16 name(__nv_bfloat16 a) { \
    const float x = __bfloat162float(a);       \
    return __float2bfloat16_rn(expression);    \
  }
EMULATION_HALF(hexp, std::exp(x))
EMULATION_HALF(hexp2, std::exp2(x))
EMULATION_HALF(hlog, std::log(x))
EMULATION_HALF(hlog2, std::log2(x))
EMULATION_HALF(hsqrt, std::sqrt(x))
EMULATION_HALF(hrsqrt, 1.f / std::sqrt(x))
EMULATION_HALF(hrcp, 1.f / x)
EMULATION_HALF(hsin, std::sin(x))
EMULATION_HALF(hcos, std::cos(x))
#undef EMULATION_HALF

inline __half2 h2exp(__half2 a) { return __half2(hexp(a.x), hexp(a.y)); }
inline __half2 h2exp2(__half2 a) { return __half2(hexp2(a.x), hexp2(a.y)); }
inline __half2 h2sqrt(__half2 a) { return __half2(hsqrt(a.x), hsqrt(a.y)); }
inline __half2 h2rsqrt(__half2 a) { return __half2(hrsqrt(a.x), hrsqrt(a.y)); }
inline __half2 h2rcp(__half2 a) { return __half2(hrcp(a.x), hrcp(a.y)); }
inline int __half2int_rn(__half a) { return __float2int_rn(__half2float(a)); }
