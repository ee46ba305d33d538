// Affinities of a tile of 32 pools with columns of 8 index queries, by one warp, in three ways that
// hold their results alike: lane (g, t) = (lane / 4, lane % 4) has those of the pools g + 8 i, i < 4,
// with the columns 2 t and 2 t + 1. That is the accumulator of mma.m16n8k16, twice.
//
// In all, a lane loads 16 bytes at 16 t of each 64-byte chunk of its four pools. Which channels meet
// in which instruction does not matter as long as the index queries lie in the same order, which
// is what `place` says.
#pragma once
#include "plan.cuh"

namespace edgepool {
namespace index_pool_select {
namespace detail {

constexpr int kRows = 4;  // pools of a lane

// A 64-byte chunk of a stored vector: `kChannels` channels, of which a lane has `kOwn`.
template <class P>
struct Chunk {
  static constexpr int kOwn = 16 / static_cast<int>(sizeof(P)), kChannels = 4 * kOwn;
  static constexpr int kSteps = kOwn / 4;  // of four channels a lane
  // Where channel k (a multiple of 4) of an index query lies for a lane: [chunk][step][t][4].
  GPU_DEVICE static int by_lane(int k) {
    const int chunk = k / kChannels, t = k % kChannels / kOwn, step = k % kOwn / 4;
    return ((chunk * kSteps + step) * 4 + t) * 4;
  }
};

// Between values. Of elements of an array clang would choose the address, so the array would be in
// local memory.
GPU_DEVICE float choose(bool first, float a, float b) { return first ? a : b; }

GPU_DEVICE unsigned word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Four stored channels as floats. A code is put into the mantissa of 2^23, which is exact, and
// costs no conversion (those run at a quarter of the rate).
template <class P>
GPU_DEVICE void channels(const uint4& raw, int step, float (&x)[4]);
template <>
GPU_DEVICE void channels<float>(const uint4& raw, int, float (&x)[4]) {
  GPU_UNROLL
  for (int i = 0; i < 4; ++i) x[i] = __uint_as_float(word(raw, i));
}
template <>
GPU_DEVICE void channels<int8_t>(const uint4& raw, int step, float (&x)[4]) {
  const unsigned codes = word(raw, step) ^ 0x80808080u;  // code + 128
  GPU_UNROLL
  for (unsigned i = 0; i < 4; ++i)
    x[i] = __uint_as_float(__byte_perm(codes, 0x4b000000u, 0x7440u + i)) - 8388736.f;
}

// The same as two pairs of halves; a code is put into the mantissa of 2^10.
GPU_DEVICE half2 as_halves(unsigned w) { return *reinterpret_cast<const half2*>(&w); }
template <class P>
GPU_DEVICE void pairs(const uint4& raw, int step, unsigned& low, unsigned& high);
template <>
GPU_DEVICE void pairs<half>(const uint4& raw, int step, unsigned& low, unsigned& high) {
  low = word(raw, 2 * step), high = word(raw, 2 * step + 1);
}
template <>
GPU_DEVICE void pairs<int8_t>(const uint4& raw, int step, unsigned& low, unsigned& high) {
  const unsigned codes = word(raw, step) ^ 0x80808080u;
  const half2 offset = __half2half2(__float2half_rn(1152.f));  // 1024 + 128
  const half2 a = __hsub2(as_halves(__byte_perm(codes, 0x64646464u, 0x4140u)), offset);
  const half2 b = __hsub2(as_halves(__byte_perm(codes, 0x64646464u, 0x4342u)), offset);
  low = *reinterpret_cast<const unsigned*>(&a), high = *reinterpret_cast<const unsigned*>(&b);
}

// By mma.m16n8k16: halves, exact products, float sums. Codes are exact halves.
template <class A, class P, int Tiles>
struct MmaProduct {
  using Query = half;
  static constexpr int kTiles = Tiles;       // of 8 columns
  static constexpr size_t kStageBytes = 0;   // of a warp, in shared memory
  float sums[Tiles][2][4];

  GPU_DEVICE static int place(int k) { return Chunk<P>::by_lane(k); }
  GPU_DEVICE void start(unsigned char*) {
    GPU_UNROLL
    for (int n = 0; n < Tiles; ++n)
      GPU_UNROLL
      for (int i = 0; i < 8; ++i) sums[n][i / 4][i % 4] = 0;
  }
  // `queries` begins at the first column; `tiles` of them are there.
  GPU_DEVICE void add(const uint4 (&raw)[kRows], const half* queries, int stride, int chunk,
                      int tiles, unsigned) {
    const int g = static_cast<int>(threadIdx.x) % 32 / 4, t = static_cast<int>(threadIdx.x) % 4;
    GPU_UNROLL
    for (int step = 0; step < Chunk<P>::kSteps; ++step) {
      uint32_t a[2][4];
      GPU_UNROLL
      for (int m = 0; m < 2; ++m) {
        pairs<P>(raw[2 * m], step, a[m][0], a[m][2]);
        pairs<P>(raw[2 * m + 1], step, a[m][1], a[m][3]);
      }
      const half* at = queries + g * stride + ((chunk * Chunk<P>::kSteps + step) * 4 + t) * 4;
      GPU_UNROLL
      for (int n = 0; n < Tiles; ++n)
        if (n < tiles) {
          const uint2 v = *reinterpret_cast<const uint2*>(at + n * 8 * stride);
          const uint32_t b[2] = {v.x, v.y};
          gpu::mma_f16<A>(sums[n][0], a[0], b, sums[n][0]);
          gpu::mma_f16<A>(sums[n][1], a[1], b, sums[n][1]);
        }
    }
  }
  // The lane's sums with the columns of tile n.
  GPU_DEVICE void affinities(int n, float (&of)[2][4]) const {
    GPU_UNROLL
    for (int i = 0; i < 8; ++i) of[i / 4][i % 4] = sums[n][i / 4][i % 4];
  }
};

// The same by wmma, for Volta, whose registers no other instruction knows: through shared memory.
template <class P, int Tiles>
struct WmmaProduct {
  using Query = half;
  static constexpr int kTiles = Tiles, kRow = stage_row(Chunk<P>::kChannels);
  static constexpr size_t kStageBytes = sizeof(half) * kTile * kRow;
  nvcuda::wmma::fragment<nvcuda::wmma::accumulator, kTile, 8, 16, float> products[Tiles];
  half* stage;

  GPU_DEVICE static int place(int k) { return k; }
  GPU_DEVICE void start(unsigned char* memory) {
    stage = reinterpret_cast<half*>(memory);
    GPU_UNROLL
    for (int n = 0; n < Tiles; ++n) nvcuda::wmma::fill_fragment(products[n], 0.f);
  }
  GPU_DEVICE void add(const uint4 (&raw)[kRows], const half* queries, int stride, int chunk,
                      int tiles, unsigned) {
    const int g = static_cast<int>(threadIdx.x) % 32 / 4, t = static_cast<int>(threadIdx.x) % 4;
    GPU_UNROLL
    for (int i = 0; i < kRows; ++i)
      GPU_UNROLL
      for (int step = 0; step < Chunk<P>::kSteps; ++step) {
        uint2 four;
        pairs<P>(raw[i], step, four.x, four.y);
        half* to = stage + (g + 8 * i) * kRow + t * Chunk<P>::kOwn + 4 * step;
        *reinterpret_cast<uint2*>(to) = four;
      }
    __syncwarp();
    GPU_NO_UNROLL  // clang would spill
    for (int k = 0; k < Chunk<P>::kChannels; k += 16) {
      nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, kTile, 8, 16, half, nvcuda::wmma::row_major> a;
      nvcuda::wmma::load_matrix_sync(a, stage + k, kRow);
      GPU_UNROLL
      for (int n = 0; n < Tiles; ++n)
        if (n < tiles) {
          nvcuda::wmma::fragment<nvcuda::wmma::matrix_b, kTile, 8, 16, half,
                                 nvcuda::wmma::col_major> b;
          nvcuda::wmma::load_matrix_sync(
              b, queries + n * 8 * stride + chunk * Chunk<P>::kChannels + k,
              static_cast<unsigned>(stride));
          nvcuda::wmma::mma_sync(products[n], a, b, products[n]);
        }
    }
    __syncwarp();
  }
  GPU_DEVICE void affinities(int n, float (&of)[2][4]) const {
    const int g = static_cast<int>(threadIdx.x) % 32 / 4, t = static_cast<int>(threadIdx.x) % 4;
    float* tile = reinterpret_cast<float*>(stage);  // [32 pools, 8 columns]
    nvcuda::wmma::store_matrix_sync(tile, products[n], 8, nvcuda::wmma::mem_row_major);
    __syncwarp();
    GPU_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const float2 v = *reinterpret_cast<const float2*>(tile + (g + 8 * i) * 8 + 2 * t);
      of[i / 2][i % 2 * 2] = v.x, of[i / 2][i % 2 * 2 + 1] = v.y;
    }
    __syncwarp();
  }
};

// By multiplications and additions of floats, on any architecture.
template <class P>
struct ScalarProduct {
  using Query = float;
  static constexpr int kTiles = 1;
  static constexpr size_t kStageBytes = 0;
  float partial[kRows][8];  // over the lane's channels, with all columns

  GPU_DEVICE static int place(int k) { return Chunk<P>::by_lane(k); }
  GPU_DEVICE void start(unsigned char*) {
    GPU_UNROLL
    for (int i = 0; i < kRows * 8; ++i) partial[i / 8][i % 8] = 0;
  }
  // Bit n of `used` is clear for a column of padding.
  GPU_DEVICE void add(const uint4 (&raw)[kRows], const float* queries, int stride, int chunk, int,
                      unsigned used) {
    const int t = static_cast<int>(threadIdx.x) % 4;
    GPU_UNROLL
    for (int step = 0; step < Chunk<P>::kSteps; ++step) {
      float x[kRows][4];
      GPU_UNROLL
      for (int i = 0; i < kRows; ++i) channels<P>(raw[i], step, x[i]);
      const float* at = queries + ((chunk * Chunk<P>::kSteps + step) * 4 + t) * 4;
      GPU_UNROLL
      for (int n = 0; n < 8; ++n)
        if (used >> n & 1) {
          const float4 v = *reinterpret_cast<const float4*>(at + n * stride);
          GPU_UNROLL
          for (int i = 0; i < kRows; ++i)
            partial[i][n] += x[i][0] * v.x + x[i][1] * v.y + x[i][2] * v.z + x[i][3] * v.w;
        }
    }
  }
  // Adds the four lanes of a pool up; each ends with its two columns.
  GPU_DEVICE void affinities(int, float (&of)[2][4]) const {
    const int t = static_cast<int>(threadIdx.x) % 4;
    GPU_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float half_sums[4];
      GPU_UNROLL
      for (int n = 0; n < 4; ++n)
        half_sums[n] = own_half(partial[i][n], partial[i][4 + n], t & 2, 2);
      GPU_UNROLL
      for (int n = 0; n < 2; ++n)
        of[i / 2][i % 2 * 2 + n] = own_half(half_sums[n], half_sums[2 + n], t & 1, 1);
    }
  }
  // The sum over two lanes of the value that the lane keeps; its partner keeps the other one.
  GPU_DEVICE static float own_half(float low, float high, bool upper, int partner) {
    const float other = __shfl_xor_sync(0xffffffffu, choose(upper, low, high), partner);
    return choose(upper, high, low) + other;
  }
};

}  // namespace detail
}  // namespace index_pool_select
}  // namespace edgepool
