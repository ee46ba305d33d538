// IndexPool: pool every `ratio` index keys of a sequence into one vector, as the pools close.
// The definition is edgepool/ops/index_pool.py. One launch, the same on every architecture.
//
// Launch shape. A lane takes an octet of channels, the largest power of two up to Di / 8 and 32
// lanes a pool; 32 to 128 threads a block hold some pools of one head of one sequence, and the
// block with its first pool writes the tail too. Blocks: B Hs ceil(pools that may close / pools a
// block). Shared memory: 4 Di (2 ratio + 1) bytes a pool, at most 48 KiB.
//
// Bytes, for a sequence with o tokens in the open pool of which n come in this step and c pools
// close; s and p bytes an element of T and P, g = 1 with gates and 0 for `mean`:
//   read     Hs Di s (1 + g) n of keys and gates (`query` skips the gates of a closed pool's other
//            tokens), Hs Di s (1 + g) o of tail, Hs Di s ratio c of ape (`gate`), Hs Di^2 s of
//            fusion for a block whose pools close
//   written  2 Hs Di s ratio of tail, Hs (Di p + 4) c of pools and INT8 scales
// In place (tail_out is tail), what stays in an open pool is neither read nor written.
// Operations: about 10 Hs Di a key, and 2 Hs Di^2 a pool with fusion; the bytes take longer.
#pragma once
#include <algorithm>

#include "common/storage.cuh"

namespace edgepool {
namespace index_pool {

enum class Weighting : int32_t { mean, gate, query };
enum class PostNorm : int32_t { none, l2 };

// Device pointers, aligned to 16 bytes. T is `activation`, P is `storage`, U the pools of a page.
struct Params {
  const void *keys, *gates;       // T [B, S, Hs, Di]; no gates for `mean`
  const void* ape;                // T [ratio, Hs, Di]; not for `mean`
  const void* fusion;             // T [Hs, Di, Di]; with `fuse`
  const void* tail;               // T [B, ratio, 2, Hs, Di]
  const int32_t* page_table;      // [B, MP]
  const int32_t *past_len, *new_len;  // [B]
  void* tail_out;                 // like tail, and may be tail
  void* index_pool;               // P [Hs, NP, U, Di], updated in place
  float* index_scale;             // [Hs, NP, U]; for s8
  int32_t B, S, Hs, Di, NP, U, MP;
  int32_t ratio;
  Weighting weighting;
  PostNorm post_norm;
  int32_t fuse;
  float weight_sparsity;
  Type activation, storage;
  cudaStream_t stream;
};

// What keeps the kernel from running, in words; null if nothing does.
const char* problem(const Params&);
cudaError_t launch(const Params&);

namespace detail {

constexpr int kThreads = 128, kSharedBytes = 48 << 10;
constexpr int kTogether = 8;  // pools that share one read of the fusion matrix

struct Shape {
  int lanes;   // of a pool
  int pools;   // of a block
  int chunks;  // blocks of one head of one sequence
};

// In shared memory, per pool: the members' keys and weights [ratio, Di], and the result [Di].
struct Pool {
  float *keys, *weights, *pooled;
};
GPU_DEVICE Pool pool_memory(const Params& p, float* shared, int number) {
  float* keys = shared + number * (2 * p.ratio + 1) * p.Di;
  return {keys, keys + p.ratio * p.Di, keys + 2 * p.ratio * p.Di};
}

GPU_DEVICE void get(const float* from, float (&x)[kOctet]) {
  GPU_UNROLL
  for (int i = 0; i < kOctet; ++i) x[i] = from[i];
}
GPU_DEVICE void put(float* to, const float (&x)[kOctet]) {
  GPU_UNROLL
  for (int i = 0; i < kOctet; ++i) to[i] = x[i];
}
GPU_DEVICE float dot(const float (&x)[kOctet], const float (&y)[kOctet]) {
  float sum = 0;
  GPU_UNROLL
  for (int i = 0; i < kOctet; ++i) sum += x[i] * y[i];
  return sum;
}

// Where a token's key (part 0) or gate (part 1) is; tokens count from the first of the open pool.
template <class T>
GPU_DEVICE const T* token_row(const Params& p, int b, int h, int opened, int token, int part) {
  if (token < opened)
    return static_cast<const T*>(p.tail) +
           (((int64_t{b} * p.ratio + token) * 2 + part) * p.Hs + h) * p.Di;
  const T* fresh = static_cast<const T*>(part ? p.gates : p.keys);
  return fresh + ((int64_t{b} * p.S + token - opened) * p.Hs + h) * p.Di;
}

// Logits of the members, `Di` apart, become weights.
GPU_DEVICE void softmax_members(const Params& p, float* logits) {
  const int end = p.ratio * p.Di;
  float largest = logits[0], sum = 0;
  for (int i = p.Di; i < end; i += p.Di) largest = fmaxf(largest, logits[i]);
  for (int i = 0; i < end; i += p.Di) sum += logits[i] = expf(logits[i] - largest);
  if (p.weight_sparsity > 0) {
    const float least = p.weight_sparsity * sum;
    sum = 0;
    for (int i = 0; i < end; i += p.Di) sum += logits[i] = logits[i] < least ? 0 : logits[i];
  }
  const float share = 1 / sum;
  for (int i = 0; i < end; i += p.Di) logits[i] *= share;
}

// One lane of a pool. It owns the same octets of every vector, so that what it puts into shared
// memory it reads itself, without barriers. A lane without a pool owns none, but takes part in sums.
struct Lane {
  const Params& p;
  Pool pool;
  int lanes, lane, end;

  GPU_DEVICE Lane(const Params& params, Pool memory, int all, bool closes)
      : p(params), pool(memory), lanes(all), lane(static_cast<int>(threadIdx.x) % all),
        end(closes ? params.Di : 0) {}

  template <class F>
  GPU_DEVICE void octets(F f) const {
    for (int c = lane * kOctet; c < end; c += lanes * kOctet) f(c);
  }
  GPU_DEVICE float sum(float v) const {
    for (int o = lanes / 2; o; o /= 2) v += __shfl_xor_sync(0xffffffffu, v, o);
    return v;
  }
  GPU_DEVICE unsigned largest(unsigned v) const {
    for (int o = lanes / 2; o; o /= 2) v = max(v, __shfl_xor_sync(0xffffffffu, v, o));
    return v;
  }
  // A weight for all channels is kept once a lane.
  GPU_DEVICE float& common_weight(int member) const {
    return pool.weights[member * p.Di + lane * kOctet];
  }

  template <class T>
  GPU_DEVICE void load_keys(int b, int h, int opened, int first_token) const {
    for (int i = 0; i < p.ratio; ++i)
      octets([&](int c) {
        float x[kOctet];
        load_octet(token_row<T>(p, b, h, opened, first_token + i, 0) + c, x);
        put(pool.keys + i * p.Di + c, x);
      });
  }

  template <class T>
  GPU_DEVICE void weigh_by_gate(int b, int h, int opened, int first_token) const {
    const T* ape = static_cast<const T*>(p.ape);
    for (int i = 0; i < p.ratio; ++i)
      octets([&](int c) {
        float gate[kOctet], place[kOctet];
        load_octet(token_row<T>(p, b, h, opened, first_token + i, 1) + c, gate);
        load_octet(ape + (int64_t{i} * p.Hs + h) * p.Di + c, place);
        GPU_UNROLL
        for (int e = 0; e < kOctet; ++e) gate[e] += place[e];
        put(pool.weights + i * p.Di + c, gate);
      });
    octets([&](int c) {
      for (int e = 0; e < kOctet; ++e) softmax_members(p, pool.weights + c + e);
    });
  }

  template <class T>
  GPU_DEVICE void weigh_by_query(int b, int h, int opened, int first_token) const {
    const T* ape = static_cast<const T*>(p.ape);
    octets([&](int c) {
      float query[kOctet];
      load_octet(token_row<T>(p, b, h, opened, first_token + p.ratio - 1, 1) + c, query);
      put(pool.pooled + c, query);
    });
    const float scale = 1 / sqrtf(static_cast<float>(p.Di));
    for (int i = 0; i < p.ratio; ++i) {
      float affinity = 0;
      octets([&](int c) {
        float key[kOctet], query[kOctet];
        get(pool.keys + i * p.Di + c, key);
        get(pool.pooled + c, query);
        affinity += dot(key, query);
      });
      affinity *= scale;
      if (lane == 0 && end) affinity += to_float(gpu::load(ape + (int64_t{i} * p.Hs + h) * p.Di));
      affinity = sum(affinity);
      if (end) common_weight(i) = affinity;
    }
    if (end) softmax_members(p, &common_weight(0));
  }

  GPU_DEVICE float weight(int member, int channel) const {
    if (p.weighting == Weighting::mean) return 1.f / static_cast<float>(p.ratio);
    return p.weighting == Weighting::gate ? pool.weights[member * p.Di + channel]
                                          : common_weight(member);
  }

  GPU_DEVICE void average() const {
    octets([&](int c) {
      float x[kOctet] = {};
      for (int i = 0; i < p.ratio; ++i) {
        float key[kOctet];
        get(pool.keys + i * p.Di + c, key);
        GPU_UNROLL
        for (int e = 0; e < kOctet; ++e) x[e] += weight(i, c + e) * key[e];
      }
      put(pool.pooled + c, x);
    });
  }

  // The members' norms, each weighted by the mean of its weights.
  GPU_DEVICE float mean_norm() const {
    float norm = 0;
    for (int i = 0; i < p.ratio; ++i) {
      float squares = 0, weights = 0;
      octets([&](int c) {
        float key[kOctet];
        get(pool.keys + i * p.Di + c, key);
        squares += dot(key, key);
        for (int e = 0; e < kOctet; ++e) weights += weight(i, c + e);
      });
      norm += sum(weights) / static_cast<float>(p.Di) * sqrtf(sum(squares));
    }
    return norm;
  }

  GPU_DEVICE void set_norm(float norm) const {
    float squares = 0;
    octets([&](int c) {
      float x[kOctet];
      get(pool.pooled + c, x);
      squares += dot(x, x);
    });
    const float length = sqrtf(sum(squares));
    const float factor = __fdiv_rn(norm, length < 1e-12f ? 1e-12f : length);  // a NaN stays
    octets([&](int c) {
      for (int e = 0; e < kOctet; ++e) pool.pooled[c + e] *= factor;
    });
  }

  template <class P>
  GPU_DEVICE void store_pool(int64_t slot, P* vectors, float*) const {
    octets([&](int c) {
      float x[kOctet];
      get(pool.pooled + c, x);
      store_octet(vectors + slot * p.Di + c, x);
    });
  }
  GPU_DEVICE void store_pool(int64_t slot, int8_t* vectors, float* scales) const {
    unsigned most = 0;
    octets([&](int c) {
      for (int e = 0; e < kOctet; ++e) most = max(most, magnitude(pool.pooled[c + e]));
    });
    const float scale = int8_scale(largest(most));
    octets([&](int c) {
      float x[kOctet];
      get(pool.pooled + c, x);
      store_codes(vectors + slot * p.Di + c, x, scale);
    });
    if (lane == 0 && end) gpu::store(scales + slot, scale);
  }
};

// pooled = fusion pooled, for all pools of the block by all its threads. The result takes the place
// of the keys.
template <class T>
GPU_DEVICE void fuse_pools(const Params& p, float* shared, int h, int pools) {
  const T* matrix = static_cast<const T*>(p.fusion) + int64_t{h} * p.Di * p.Di;
  for (int row = static_cast<int>(threadIdx.x); row < p.Di; row += static_cast<int>(blockDim.x))
    for (int first = 0; first < pools; first += kTogether) {
      float sums[kTogether] = {};
      for (int c = 0; c < p.Di; c += kOctet) {
        float m[kOctet];
        load_octet(matrix + int64_t{row} * p.Di + c, m);
        GPU_UNROLL
        for (int i = 0; i < kTogether; ++i)
          if (first + i < pools) {
            float x[kOctet];
            get(pool_memory(p, shared, first + i).pooled + c, x);
            sums[i] += dot(m, x);
          }
      }
      GPU_UNROLL
      for (int i = 0; i < kTogether; ++i)
        if (first + i < pools) pool_memory(p, shared, first + i).keys[row] = sums[i];
    }
}

// The tokens after the last closed pool, and zeros; word by word, so that no bit changes.
template <class T>
GPU_DEVICE void write_tail(const Params& p, int b, int h, int opened, int total, int closed) {
  constexpr int kWord = static_cast<int>(sizeof(uint4) / sizeof(T));
  const int words = p.Di / kWord;
  for (int i = static_cast<int>(threadIdx.x); i < p.ratio * 2 * words;
       i += static_cast<int>(blockDim.x)) {
    const int slot = i / words / 2, part = i / words % 2, c = i % words * kWord;
    const int token = closed * p.ratio + slot;
    if (token < opened && p.tail_out == p.tail) continue;
    const bool absent = token >= total ||
                        (part == 1 && token >= opened && p.weighting == Weighting::mean);
    T* to = static_cast<T*>(p.tail_out) +
            (((int64_t{b} * p.ratio + slot) * 2 + part) * p.Hs + h) * p.Di + c;
    gpu::store(reinterpret_cast<uint4*>(to),
               absent ? make_uint4(0, 0, 0, 0)
                      : gpu::load(reinterpret_cast<const uint4*>(
                            token_row<T>(p, b, h, opened, token, part) + c)));
  }
}

template <class T, class P>
__global__ void __launch_bounds__(kThreads, 4) pool_keys(const Params p, const Shape shape) {
  GPU_DYNAMIC_SHARED(float, shared);
  const int block = static_cast<int>(blockIdx.x), chunk = block % shape.chunks;
  const int h = block / shape.chunks % p.Hs, b = block / shape.chunks / p.Hs;
  const int past = max(load_uniform(p.past_len + b), 0);
  const int fresh = clamp(load_uniform(p.new_len + b), 0, p.S);
  const int opened = past % p.ratio, total = opened + fresh, closed = total / p.ratio;

  const int first = chunk * shape.pools, pools = min(shape.pools, closed - first);
  if (pools > 0) {
    const int number = static_cast<int>(threadIdx.x) / shape.lanes;
    const Lane lane(p, pool_memory(p, shared, number), shape.lanes, number < pools);
    const int token = (first + number) * p.ratio;
    lane.load_keys<T>(b, h, opened, token);
    if (p.weighting == Weighting::gate) lane.weigh_by_gate<T>(b, h, opened, token);
    if (p.weighting == Weighting::query) lane.weigh_by_query<T>(b, h, opened, token);
    lane.average();
    const float norm = p.post_norm == PostNorm::l2 ? lane.mean_norm() : 0;
    Lane result = lane;
    if (p.fuse) {
      __syncthreads();
      fuse_pools<T>(p, shared, h, pools);
      __syncthreads();
      result.pool.pooled = lane.pool.keys;
    }
    if (p.post_norm == PostNorm::l2) result.set_norm(norm);

    const unsigned per_page = static_cast<unsigned>(p.U);
    const unsigned place = static_cast<unsigned>(past / p.ratio) + static_cast<unsigned>(first + number);
    int page = 0;
    if (lane.lane == 0 && number < pools)
      page = physical_page(p.page_table + int64_t{b} * p.MP, place / per_page, p.MP, p.NP);
    page = __shfl_sync(0xffffffffu, page, 0, shape.lanes);
    if (page == 0) result.end = 0;  // nothing is written for the null page
    result.store_pool((int64_t{h} * p.NP + page) * p.U + place % per_page,
                      static_cast<P*>(p.index_pool), p.index_scale);
  }
  if (chunk == 0) {
    __syncthreads();  // the first pool has been read, and tail_out may be tail
    write_tail<T>(p, b, h, opened, total, closed);
  }
}

inline size_t shared_bytes(const Params& p, int pools) {
  return sizeof(float) * (2 * size_t(p.ratio) + 1) * size_t(p.Di) * size_t(pools);
}

template <class T, class P>
cudaError_t launch(const Params& p) {
  Shape shape{32, 0, 0};
  while (shape.lanes * kOctet > p.Di) shape.lanes /= 2;
  const int may_close = p.S ? (p.S - 1) / p.ratio + 1 : 1;
  int threads = kThreads;
  if (!p.fuse)
    while (threads > 32 && threads / 2 / shape.lanes >= may_close) threads /= 2;
  shape.pools = std::min(threads / shape.lanes, static_cast<int>(kSharedBytes / shared_bytes(p, 1)));
  shape.chunks = (may_close - 1) / shape.pools + 1;
  const int64_t blocks = int64_t{p.B} * p.Hs * shape.chunks;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  return gpu::launch(pool_keys<T, P>, dim3(static_cast<unsigned>(blocks)),
                     dim3(static_cast<unsigned>(threads)), shared_bytes(p, shape.pools), p.stream,
                     p, shape);
}

}  // namespace detail

inline const char* problem(const Params& p) {
  if (p.B < 0 || p.S < 0 || p.Hs < 1 || p.NP < 1 || p.U < 1 || p.MP < 0) return "a size is negative or zero";
  if (p.ratio < 1) return "ratio is below 1";
  if (p.Di < 16 || p.Di % 16) return "Di is no multiple of 16";
  if (detail::shared_bytes(p, 1) > detail::kSharedBytes) return "ratio * Di is over 6,000";
  if (!(p.weight_sparsity * static_cast<float>(p.ratio) < 1)) return "weight_sparsity is not below 1 / ratio";
  if (p.activation == Type::s8) return "keys are neither float32 nor float16";
  if (p.storage != Type::s8 && p.storage != p.activation) return "index_pool is neither int8 nor of the type of keys";
  return nullptr;
}

inline cudaError_t launch(const Params& p) {
  if (problem(p)) return cudaErrorInvalidValue;
  if (p.B == 0 || (p.S == 0 && p.tail_out == p.tail)) return cudaSuccess;
  const bool codes = p.storage == Type::s8;
  if (p.activation == Type::f32)
    return codes ? detail::launch<float, int8_t>(p) : detail::launch<float, float>(p);
  return codes ? detail::launch<half, int8_t>(p) : detail::launch<half, half>(p);
}

}  // namespace index_pool
}  // namespace edgepool
