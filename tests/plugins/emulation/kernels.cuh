// Kernels that do nothing wrong: the results tests run them, and every compiler builds them.
#pragma once
#include <type_traits>

#include "common/portable.cuh"

using gpu::load;
using gpu::store;

// ---- one warp ----
GPU_DEVICE float warp_sum(float v) {
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
  return v;
}

// Each lane's results of every shuffle, vote and reduction, in rows of 32.
enum { kShuffles = 12 };
__global__ void shuffles(const int* in, int* out) {
  const int lane = threadIdx.x;
  const int v = load(in + lane);
  const int all[kShuffles] = {
      __shfl_sync(~0u, v, 5),
      __shfl_sync(~0u, v, lane + 3),
      __shfl_sync(~0u, v, 1, 8),
      __shfl_up_sync(~0u, v, 2),
      __shfl_up_sync(~0u, v, 3, 8),
      __shfl_down_sync(~0u, v, 4),
      __shfl_down_sync(~0u, v, 1, 16),
      __shfl_xor_sync(~0u, v, 17),
      __shfl_xor_sync(~0u, v, 5, 8),
      static_cast<int>(__ballot_sync(~0u, v > 0)),
      __any_sync(~0u, v == 1000) * 2 + __all_sync(~0u, v > -1000),
      static_cast<int>(__match_any_sync(~0u, v & 3)),
  };
  GPU_UNROLL
  for (int i = 0; i < kShuffles; ++i) store(out + i * 32 + lane, all[i]);
}

// Odd and even lanes shuffle and vote apart, with masks of their own.
__global__ void half_masks(int* out) {
  const int lane = threadIdx.x;
  const unsigned mask = lane % 2 ? 0xaaaaaaaau : 0x55555555u;
  int v = lane;
  if (lane % 2)
    v = __shfl_xor_sync(mask, v, 2) + static_cast<int>(__ballot_sync(mask, lane > 15));
  else
    v = __shfl_xor_sync(mask, v, 4);
  store(out + lane, v);
}

// The upper lanes leave; a mask may still name them.
__global__ void early_exit(int* out) {
  const int lane = threadIdx.x;
  if (lane >= 20) return;
  store(out + lane, static_cast<int>(__ballot_sync(~0u, 1)) + __any_sync(~0u, lane == 19));
}

// A template, since a compiler for sm_72 does not know __reduce_*_sync.
template <class T>
__global__ void warp_reduce(const T* in, T* out) {
  const int lane = threadIdx.x;
  const T v = load(in + lane);
  const auto u = static_cast<typename std::make_unsigned<T>::type>(v);
  int equal;
  const int all[8] = {
      __reduce_add_sync(~0u, v),
      __reduce_min_sync(~0u, v),
      static_cast<int>(__reduce_min_sync(~0u, u)),
      __reduce_max_sync(~0u, v),
      static_cast<int>(__reduce_max_sync(~0u, u)),
      static_cast<int>(__reduce_and_sync(~0u, u | 3)),
      static_cast<int>(__reduce_or_sync(~0u, u & 0xff)),
      static_cast<int>(__reduce_xor_sync(~0u, u)),
  };
  const unsigned same = __match_all_sync(~0u, lane < 99, &equal);
  if (lane == 0) {
    for (int i = 0; i < 8; ++i) store(out + i, all[i]);
    store(out + 8, static_cast<int>(same) + equal);
  }
}

__global__ void warp_exchange(const int* in, int* out) {
  __shared__ int s[64];
  s[threadIdx.x] = load(in + threadIdx.x);
  __syncwarp();
  store(out + threadIdx.x, s[threadIdx.x ^ 1]);
}

// ---- one block ----
__global__ void __launch_bounds__(1024)
    row_sum(const float* __restrict__ in, float* __restrict__ out, int n) {
  __shared__ float part[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  float sum = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x)
    sum += load(in + static_cast<size_t>(blockIdx.x) * n + i);
  sum = warp_sum(sum);
  if (lane == 0) part[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    sum = warp_sum(lane < warps ? part[lane] : 0.f);
    if (lane == 0) store(out + blockIdx.x, sum);
  }
}

template <int T>
__global__ void tiled_product(const float* a, const float* b, float* c, int M, int N, int K) {
  __shared__ float sa[T][T], sb[T][T + 1];
  const int row = blockIdx.y * T + threadIdx.y, column = blockIdx.x * T + threadIdx.x;
  const int x = threadIdx.x, y = threadIdx.y;
  float sum = 0;
  for (int k = 0; k < K; k += T) {
    sa[y][x] = row < M && k + x < K ? load(a + row * K + k + x) : 0.f;
    sb[y][x] = column < N && k + y < K ? load(b + (k + y) * N + column) : 0.f;
    __syncthreads();
    for (int i = 0; i < T; ++i) sum += sa[y][i] * sb[i][x];
    __syncthreads();
  }
  if (row < M && column < N) store(c + row * N + column, sum);
}

__global__ void histogram(const int* in, int* out, int* positive, int n, int bins) {
  GPU_DYNAMIC_SHARED(int, count);
  for (int i = threadIdx.x; i < bins; i += blockDim.x) count[i] = 0;
  __syncthreads();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const int v = i < n ? load(in + i) : -1;
  const unsigned votes = __ballot_sync(~0u, v > 0);
  if (threadIdx.x % 32 == 0) atomicAdd(positive, __popc(votes));
  if (v >= 0) atomicAdd(&count[v], 1);
  __syncthreads();
  for (int j = threadIdx.x; j < bins; j += blockDim.x)
    if (count[j]) atomicAdd(out + j, count[j]);
}

__global__ void block_votes(const int* in, int* out) {
  const int v = load(in + threadIdx.x);
  const int count = __syncthreads_count(v > 0);
  const int all = __syncthreads_and(v > -1000), any = __syncthreads_or(v == 1000);
  if (threadIdx.x == 0) store(out, count * 4 + all * 2 + any);
}

// Two producer warps hand buffers to two consumer warps, which never wait for each other twice.
__global__ void producer_consumer(const int* in, int* out, int rounds) {
  __shared__ int buffer[2][64];
  const int t = threadIdx.x % 64;
  enum { kFull = 1, kEmpty = 3, kThreads = 128 };
  if (threadIdx.x < 64) {
    for (int r = 0; r < rounds; ++r) {
      if (r >= 2) gpu::barrier_sync(kEmpty + r % 2, kThreads);
      buffer[r % 2][t] = load(in + r * 64 + t);
      gpu::barrier_arrive(kFull + r % 2, kThreads);
    }
  } else {
    for (int r = 0; r < rounds; ++r) {
      gpu::barrier_sync(kFull + r % 2, kThreads);
      store(out + r * 64 + t, buffer[r % 2][63 - t]);
      if (r + 2 < rounds) gpu::barrier_arrive(kEmpty + r % 2, kThreads);
    }
  }
}

// ---- several blocks ----
__global__ void places(int* out) {
  const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  store(out + block * blockDim.x * blockDim.y * blockDim.z + thread, block * 1000 + thread);
}

// The block that finishes last adds up what the others left (threadfence and a counter).
__global__ void last_block_sum(const float* in, float* part, unsigned* done, float* out, int n) {
  __shared__ bool last;
  const int i = blockIdx.x * 32 + threadIdx.x;
  const float sum = warp_sum(i < n ? load(in + i) : 0.f);
  if (threadIdx.x == 0) {
    store(part + blockIdx.x, sum);
    __threadfence();
    last = atomicAdd(done, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  float total = 0;
  for (int b = threadIdx.x; b < static_cast<int>(gridDim.x); b += 32) total += load(part + b);
  total = warp_sum(total);
  if (threadIdx.x == 0) store(out, total);
}

// ---- number formats ----
template <class T2, class T>
__global__ void fused_multiply(const T* x, const T* a, T* y, int pairs, T b) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= pairs) return;
  const T2 v = load(reinterpret_cast<const T2*>(x) + i);
  const T2 s = load(reinterpret_cast<const T2*>(a) + i);
  T2 bb;
  bb.x = bb.y = b;
  store(reinterpret_cast<T2*>(y) + i, __hfma2(v, s, bb));
}

__global__ void dot_int8(const int* a, const int* b, int* out) {
  store(out + threadIdx.x, __dp4a(load(a + threadIdx.x), load(b + threadIdx.x), 1));
}

// ---- tensor cores: C[M, N] = A[M, K] B[N, K]^T ----
template <int TM, int TN, class T, class Sum>
__global__ void wmma_product(const T* a, const T* b, Sum* c, int N, int K) {
  using namespace nvcuda::wmma;
  const int row = blockIdx.y * TM, column = blockIdx.x * TN;
  fragment<accumulator, TM, TN, 16, Sum> sum;
  fill_fragment(sum, Sum(0));
  for (int k = 0; k < K; k += 16) {
    fragment<matrix_a, TM, TN, 16, T, row_major> fa;
    fragment<matrix_b, TM, TN, 16, T, col_major> fb;
    load_matrix_sync(fa, a + row * K + k, K);
    load_matrix_sync(fb, b + column * K + k, K);
    mma_sync(sum, fa, fb, sum);
  }
  store_matrix_sync(c + row * N + column, sum, N, mem_row_major);
}

// 16 x 8 tiles, one warp each: double-buffered cp.async, ldmatrix, mma.
template <class A>
__global__ void mma_product(const half* a, const half* b, float* c, int N, int K) {
  __shared__ __align__(16) half sa[2][16][16], sb[2][8][16];
  const int lane = threadIdx.x, row = blockIdx.y * 16, column = blockIdx.x * 8;
  auto fetch = [&](int buffer, int k) {
    gpu::cp_async<A>(&sa[buffer][lane / 2][lane % 2 * 8],
                     a + (row + lane / 2) * K + k + lane % 2 * 8);
    if (lane < 16)
      gpu::cp_async<A>(&sb[buffer][lane / 2][lane % 2 * 8],
                       b + (column + lane / 2) * K + k + lane % 2 * 8);
  };
  float sum[4] = {0, 0, 0, 0};
  fetch(0, 0);
  gpu::cp_async_commit<A>();
  for (int k = 0; k < K; k += 16) {
    const int buffer = k / 16 % 2;
    if (k + 16 < K) fetch(buffer ^ 1, k + 16);
    gpu::cp_async_commit<A>();
    gpu::cp_async_wait<A, 1>();
    __syncthreads();
    uint32_t fa[4], fb[2];
    gpu::ldmatrix_x4<A>(fa, &sa[buffer][lane % 16][lane / 16 * 8]);
    gpu::ldmatrix_x2<A>(fb, &sb[buffer][lane % 8][lane / 8 % 2 * 8]);
    gpu::mma_f16<A>(sum, fa, fb, sum);
    __syncthreads();
  }
  for (int i = 0; i < 4; ++i)
    store(c + (row + lane / 4 + i / 2 * 8) * N + column + lane % 4 * 2 + i % 2, sum[i]);
}

template <class A>
__global__ void mma_product_int8(const signed char* a, const signed char* b, int* c, int N, int K) {
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  const int row = blockIdx.y * 16, column = blockIdx.x * 8;
  auto word = [](const signed char* p) { return load(reinterpret_cast<const uint32_t*>(p)); };
  int sum[4] = {0, 0, 0, 0};
  for (int k = 0; k < K; k += 32) {
    const signed char *pa = a + (row + g) * K + k + t * 4, *pb = b + (column + g) * K + k + t * 4;
    const uint32_t fa[4] = {word(pa), word(pa + 8 * K), word(pa + 16), word(pa + 8 * K + 16)};
    const uint32_t fb[2] = {word(pb), word(pb + 16)};
    gpu::mma_s8<A>(sum, fa, fb, sum);
  }
  for (int i = 0; i < 4; ++i)
    store(c + (row + g + i / 2 * 8) * N + column + t * 2 + i % 2, sum[i]);
}

// Each thread copies `filled` of 16, 8 and 4 bytes, asynchronously.
template <class A>
__global__ void async_copies(const char* in, char* out, int filled) {
  __shared__ __align__(16) char s[3][32][16];
  const int t = threadIdx.x;
  for (int i = 0; i < 16; ++i) s[1][t][i] = s[2][t][i] = 77;
  gpu::cp_async<A, 16>(s[0][t], in + t * 16, filled < 16 ? filled : 16);
  gpu::cp_async<A, 8>(s[1][t], in + t * 16, filled < 8 ? filled : 8);
  gpu::cp_async<A, 4>(s[2][t], in + t * 16, filled < 4 ? filled : 4);
  gpu::cp_async_commit<A>();
  gpu::cp_async_wait<A>();
  __syncthreads();
  for (int c = 0; c < 3; ++c)
    for (int i = 0; i < 16; ++i) store(out + (c * 32 + t) * 16 + i, s[c][t ^ 1][i]);
}
