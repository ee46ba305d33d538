// What the operators' kernels share: element types, octets of a vector, INT8 storage, page tables.
#pragma once
#include "common/portable.cuh"

namespace edgepool {

// Of a tensor's elements. Activations are f32 or f16; pools and pages are of that type or s8.
enum class Type : int32_t { f32, f16, s8 };

// ---- octets: eight neighbouring channels, what a thread takes at a time ----
constexpr int kOctet = 8;

GPU_DEVICE void unpack(const uint4& word, float (&x)[kOctet]) {
  const unsigned w[4] = {word.x, word.y, word.z, word.w};
  GPU_UNROLL
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __half22float2(*reinterpret_cast<const half2*>(&w[i]));
    x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
  }
}
GPU_DEVICE float to_float(float x) { return x; }
GPU_DEVICE float to_float(half x) { return __half2float(x); }
GPU_DEVICE unsigned pack(float low, float high) {
  const half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&pair);
}

GPU_DEVICE void load_octet(const half* p, float (&x)[kOctet]) {
  unpack(gpu::load(reinterpret_cast<const uint4*>(p)), x);
}
GPU_DEVICE void load_octet(const float* p, float (&x)[kOctet]) {
  GPU_UNROLL
  for (int i = 0; i < 2; ++i) {
    const float4 v = gpu::load(reinterpret_cast<const float4*>(p) + i);
    x[4 * i] = v.x, x[4 * i + 1] = v.y, x[4 * i + 2] = v.z, x[4 * i + 3] = v.w;
  }
}
GPU_DEVICE void store_octet(half* p, const float (&x)[kOctet]) {
  gpu::store(reinterpret_cast<uint4*>(p), make_uint4(pack(x[0], x[1]), pack(x[2], x[3]),
                                                     pack(x[4], x[5]), pack(x[6], x[7])));
}
GPU_DEVICE void store_octet(float* p, const float (&x)[kOctet]) {
  GPU_UNROLL
  for (int i = 0; i < 2; ++i)
    gpu::store(reinterpret_cast<float4*>(p) + i,
               make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]));
}

// ---- INT8 storage: edgepool/ops/quantization.py, to the bit ----
// |x| as an integer in the same order, in which a NaN is above everything: the maximum of a vector
// that holds one is a NaN.
GPU_DEVICE unsigned magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

GPU_DEVICE float int8_scale(unsigned largest) {
  return __fdiv_rn(__uint_as_float(largest), 127.f);
}
GPU_DEVICE int int8_code(float x, float scale) {
  const float quotient = __fdiv_rn(x, scale);
  // A zero vector or one whose scale underflows, or a vector with a NaN or an infinity.
  if (scale == 0.f || quotient != quotient) return 0;
  return static_cast<int>(fminf(fmaxf(rintf(quotient), -127.f), 127.f));
}
GPU_DEVICE void store_codes(int8_t* p, const float (&x)[kOctet], float scale) {
  unsigned w[2] = {0, 0};
  GPU_UNROLL
  for (int i = 0; i < kOctet; ++i)
    w[i / 4] |= (static_cast<unsigned>(int8_code(x[i], scale)) & 0xffu) << 8 * (i % 4);
  gpu::store(reinterpret_cast<uint2*>(p), make_uint2(w[0], w[1]));
}

// ---- sequences and page tables: edgepool/ops/paging.py, for any bits ----
GPU_DEVICE int clamp(int value, int low, int high) {
  return value < low ? low : value > high ? high : value;
}
// What all lanes of a warp want to know, loaded once.
GPU_DEVICE int load_uniform(const int* p) {
  return __shfl_sync(0xffffffffu, threadIdx.x % 32 == 0 ? gpu::load_readonly(p) : 0, 0);
}
// The physical page of a logical one: 0, the null page, beyond the table and for an id that is none.
GPU_DEVICE int physical_page(const int* table, int64_t logical, int columns, int pages) {
  if (logical < 0 || logical >= columns) return 0;
  const int page = gpu::load_readonly(table + logical);
  return page > 0 && page < pages ? page : 0;
}

}  // namespace edgepool
