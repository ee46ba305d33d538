// Stored elements as floats and as pairs of halves, four bytes at a time.
#pragma once
#include "common/portable.cuh"

namespace edgepool {
namespace shared_kv_attention {

// Bytes that move as one.
template <int Bytes>
struct alignas(Bytes) Vector {
  uint32_t word[Bytes / 4];
};

template <int Bytes, class T>
GPU_DEVICE Vector<Bytes> load_vector(const T* p) {
  return gpu::load_readonly(reinterpret_cast<const Vector<Bytes>*>(p));
}

template <int Bytes>
GPU_DEVICE Vector<Bytes> zero_vector() {
  Vector<Bytes> v;
  GPU_UNROLL
  for (uint32_t& word : v.word) word = 0;
  return v;
}

GPU_DEVICE uint32_t bits_of(const __half2& v) { return *reinterpret_cast<const uint32_t*>(&v); }
GPU_DEVICE __half2 half2_of(const uint32_t& bits) {
  return *reinterpret_cast<const __half2*>(&bits);
}

// One word as floats. INT8 without the slow conversion instruction: the byte, its sign flipped, is
// the low mantissa of 2^23.
GPU_DEVICE void unpack(uint32_t word, float (&x)[1]) { x[0] = __uint_as_float(word); }
GPU_DEVICE void unpack(uint32_t word, float (&x)[2]) {
  const __half2 pair = half2_of(word);
  x[0] = __low2float(pair);
  x[1] = __high2float(pair);
}
GPU_DEVICE void unpack(uint32_t word, float (&x)[4]) {
  const uint32_t flipped = word ^ 0x80808080u;
  GPU_UNROLL
  for (unsigned i = 0; i < 4; ++i)
    x[i] = __uint_as_float(__byte_perm(flipped, 0x4B000000u, 0x7440u + i)) - 8388736.f;
}

// Bytes 0 and 1 (or 2 and 3) of a word of INT8 as halves, by the same trick on 2^10.
GPU_DEVICE uint32_t int8_pair(uint32_t word, bool high) {
  const uint32_t both = __byte_perm(word ^ 0x80808080u, 0x64646464u, high ? 0x4342u : 0x4140u);
  return bits_of(__hsub2(half2_of(both), half2_of(0x64806480u)));
}

template <class T>
GPU_DEVICE T from_float(float x);
template <>
GPU_DEVICE float from_float<float>(float x) {
  return x;
}
template <>
GPU_DEVICE __half from_float<__half>(float x) {
  return __float2half_rn(x);
}

}  // namespace shared_kv_attention
}  // namespace edgepool
