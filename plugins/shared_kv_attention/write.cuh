// New keys and values into their pages, quantised on the way if the pages are INT8.
#pragma once
#include "plan.cuh"
#include "vectors.cuh"

namespace edgepool {
namespace shared_kv_attention {

struct Params {
  ReadParams attention;
  const void *k, *v;  // T [B, S, Hkv, D]
};

constexpr int kWriteWarps = 8;

// One warp for each new key or value vector: rows [2, B, S, Hkv].
template <class T, class P>
__global__ void __launch_bounds__(kWriteWarps * kLanes) write_new(const Params params) {
  constexpr int kElements = 16 / static_cast<int>(sizeof(T)), kWord = kElements / 4;
  constexpr int kVectors = kMaxD / (kLanes * kElements);
  const ReadParams& p = params.attention;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t rows = int64_t{p.B} * p.S * p.Hkv;
  int64_t row = int64_t{blockIdx.x} * kWriteWarps + threadIdx.x / kLanes;
  if (row >= 2 * rows) return;
  const bool value = row >= rows;
  if (value) row -= rows;
  const int head = static_cast<int>(row % p.Hkv), s = static_cast<int>(row / p.Hkv % p.S);
  const int b = static_cast<int>(row / (int64_t{p.S} * p.Hkv));

  if (s >= load_uniform(p.new_len + b)) return;
  const int64_t position = int64_t{max(load_uniform(p.past_len + b), 0)} + s;
  const int page = physical_page(p.page_table + int64_t{b} * p.MP, position / p.T, p.MP, p.NP);
  if (page == 0) return;
  const int64_t place = (int64_t{page} * p.Hkv + head) * p.T + position % p.T;

  const T* from = static_cast<const T*>(value ? params.v : params.k) + row * p.D;
  P* to = static_cast<P*>(value ? p.v_pool : p.k_pool) + place * p.D;
  Vector<16> x[kVectors];
  unsigned largest = 0;
  GPU_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    const int column = (i * kLanes + lane) * kElements;
    x[i] = column < p.D ? load_vector<16>(from + column) : zero_vector<16>();
    if constexpr (sizeof(P) != 1) {
      if (column < p.D) gpu::store(reinterpret_cast<Vector<16>*>(to + column), x[i]);
    } else {
      GPU_UNROLL
      for (uint32_t word : x[i].word) {
        float e[kWord];
        unpack(word, e);
        GPU_UNROLL
        for (float y : e) largest = max(largest, magnitude(y));
      }
    }
  }
  if constexpr (sizeof(P) == 1) {
    GPU_UNROLL
    for (int other = kLanes / 2; other; other /= 2)
      largest = max(largest, __shfl_xor_sync(kAll, largest, other));
    const float scale = int8_scale(largest);
    GPU_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      const int column = (i * kLanes + lane) * kElements;
      if (column >= p.D) continue;
      auto codes = zero_vector<kElements>();
      GPU_UNROLL
      for (int w = 0; w < 4; ++w) {
        float e[kWord];
        unpack(x[i].word[w], e);
        GPU_UNROLL
        for (int j = 0; j < kWord; ++j) {
          const int k = w * kWord + j;
          codes.word[k / 4] |= (static_cast<uint32_t>(int8_code(e[j], scale)) & 0xFF) << k % 4 * 8;
        }
      }
      gpu::store(reinterpret_cast<Vector<kElements>*>(to + column), codes);
    }
    if (lane == 0) gpu::store((value ? p.v_scale : p.k_scale) + place, scale);
  }
}

template <class T, class P>
cudaError_t launch_write(const Params& params) {
  const ReadParams& p = params.attention;
  const int64_t blocks = (2 * int64_t{p.B} * p.S * p.Hkv - 1) / kWriteWarps + 1;
  return gpu::launch(write_new<T, P>, dim3(static_cast<unsigned>(blocks)), kWriteWarps * kLanes, 0,
                     p.stream, params);
}

inline cudaError_t write(const Params& params) {
  const ReadParams& p = params.attention;
  if (problem(p)) return cudaErrorInvalidValue;
  if (p.B == 0 || p.S == 0) return cudaSuccess;
  const bool codes = p.storage == Type::s8;
  if (p.activation == Type::f32)
    return codes ? launch_write<float, int8_t>(params) : launch_write<float, float>(params);
  return codes ? launch_write<half, int8_t>(params) : launch_write<half, half>(params);
}

}  // namespace shared_kv_attention
}  // namespace edgepool
