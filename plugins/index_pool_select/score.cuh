// Reads the index once and scores it: a block takes some rows (index queries of one head of one
// sequence) and one segment of the sequence's pools, its warps tiles of 32 pools.
#pragma once
#include "products.cuh"

namespace edgepool {
namespace index_pool_select {
namespace detail {

enum class Pass {
  relu,        // stores scores
  statistics,  // stores each index query's largest affinity and sum of exponentials; affinities too
  combine      // affinities again, with the statistics: stores scores
};

constexpr float kMinusInfinity = -INFINITY;
// Stands for the affinity of a pool that is no candidate. No arithmetic makes this NaN.
constexpr unsigned kExcluded = 0xffffffffu;

// A NaN is the maximum, as in PyTorch.
GPU_DEVICE float maximum(float a, float b) { return a > b || a != a ? a : b; }
GPU_DEVICE float positive_part(float x) { return x < 0 ? 0 : x; }

// Softmax statistics of two sets; `sum` 0 is the empty set.
GPU_DEVICE float2 merge(float2 a, float2 b) {
  if (b.y == 0) return a;
  if (a.y == 0) return b;
  const float most = fmaxf(a.x, b.x);
  return make_float2(most, a.y * expf(a.x - most) + b.y * expf(b.x - most));
}
GPU_DEVICE float2 merge_lanes(float2 v, int first, int last) {
  for (int o = first; o <= last; o *= 2)
    v = merge(v, make_float2(__shfl_xor_sync(0xffffffffu, v.x, o),
                             __shfl_xor_sync(0xffffffffu, v.y, o)));
  return v;
}
// (largest, 1 / sum) of one index query over all splits that its candidates lie in; by one warp.
GPU_DEVICE float2 load_statistics(const Plan& plan, int64_t row, int queries, int query, int high) {
  const int splits = (high + plan.segment - 1) / plan.segment;
  const float2* from = plan.statistics + (row * queries + query) * plan.splits;
  float2 all = make_float2(0, 0);
  for (int i = static_cast<int>(threadIdx.x) % 32; i < splits; i += 32)
    all = merge(all, gpu::load(from + i));
  all = merge_lanes(all, 1, 16);
  return make_float2(all.x, all.y == 0 ? 0 : 1 / all.y);
}

// Where a scoring block is.
struct Place {
  int b, h, s, rows;  // the first of its rows, and how many are real
  int64_t first_row;  // number in the launch
  int split;

  GPU_DEVICE Place(const Params& p, const Plan& plan, int fresh) {
    const int block = static_cast<int>(blockIdx.x), tiles = tiles_of(plan);
    split = block % plan.splits;
    const int tile = block / plan.splits % tiles;
    const int head = block / plan.splits / tiles;
    h = head % p.Hs;
    b = plan.first_batch + head / p.Hs;
    const int offset = tile * plan.rows_together;
    s = plan.first_query + offset;
    first_row = int64_t{head} * plan.queries + offset;
    rows = min(plan.rows_together, min(plan.queries - offset, fresh - s));
  }
  GPU_DEVICE static int tiles_of(const Plan& plan) {
    return (plan.queries + plan.rows_together - 1) / plan.rows_together;
  }
  GPU_DEVICE static int sequence(const Params& p, const Plan& plan) {
    return plan.first_batch +
           static_cast<int>(blockIdx.x) / plan.splits / tiles_of(plan) / p.Hs;
  }
};

// Shared memory of a scoring block.
template <class Product>
struct Board {
  typename Product::Query* queries;  // [columns, stride], by Product::place
  unsigned char* stage;  // of this warp
  float2* factor;  // [columns]: relu (weight, -), combine (largest, 1 / sum)
  int* high;       // [columns]: the pool after the last candidate of the column's row
  int* pages;      // physical pages of the segment
  GPU_DEVICE Board(unsigned char* memory, const Plan& plan)
      : queries(reinterpret_cast<typename Product::Query*>(memory)),
        stage(memory + query_bytes(plan) + threadIdx.x / 32 * Product::kStageBytes),
        factor(reinterpret_cast<float2*>(memory + query_bytes(plan) +
                                         kWarps * Product::kStageBytes)),
        high(reinterpret_cast<int*>(factor + plan.columns)), pages(high + plan.columns) {}

  __host__ __device__ static size_t query_bytes(const Plan& plan) {
    return sizeof(typename Product::Query) * size_t(plan.columns) * size_t(plan.stride);
  }
  static size_t bytes(const Params& p, const Plan& plan) {
    return query_bytes(plan) + kWarps * Product::kStageBytes +
           (sizeof(float2) + sizeof(int)) * size_t(plan.columns) +
           sizeof(int) * (size_t(plan.segment) / size_t(p.U) + 2);
  }
};

GPU_DEVICE void put_four(float* to, const float* x) {
  *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
}
GPU_DEVICE void put_four(half* to, const float* x) {
  *reinterpret_cast<uint2*>(to) = make_uint2(pack(x[0], x[1]), pack(x[2], x[3]));
}

template <class T, class P, class Product>
GPU_DEVICE void fill_queries(const Params& p, const Plan& plan, const Place& at,
                             typename Product::Query* queries) {
  constexpr int kChannels = Chunk<P>::kChannels;
  const int octets = (p.Di + kChannels - 1) / kChannels * kChannels / kOctet;
  for (int i = static_cast<int>(threadIdx.x); i < plan.columns * octets; i += kScoreThreads) {
    const int column = i / octets, k = i % octets * kOctet;
    const int row = column / plan.width, query = column % plan.width;
    float x[kOctet] = {};
    if (row < at.rows && query < p.Hq && k < p.Di) {
      const int64_t vector = ((int64_t{at.b} * p.S + at.s + row) * p.Hs + at.h) * p.Hq + query;
      load_octet(static_cast<const T*>(p.q) + vector * p.Di + k, x);
    }
    put_four(queries + column * plan.stride + Product::place(k), x);
    put_four(queries + column * plan.stride + Product::place(k + 4), x + 4);
  }
}

template <Pass kPass, class T>
GPU_DEVICE void fill_columns(const Params& p, const Plan& plan, const Place& at,
                             const Candidates& candidates, float2* factor, int* high) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  for (int column = static_cast<int>(threadIdx.x); column < plan.columns; column += kScoreThreads) {
    const int row = column / plan.width, query = column % plan.width;
    const bool real = row < at.rows && query < p.Hq;
    high[column] = real ? candidates.high(p, at.s + row) * p.block : 0;
    if (kPass == Pass::relu) {
      float weight = 0;
      if (real)
        weight = to_float(gpu::load_readonly(
            static_cast<const T*>(p.w) +
            ((int64_t{at.b} * p.S + at.s + row) * p.Hs + at.h) * p.Hq + query));
      factor[column] = make_float2(weight, 0);
    }
  }
  if (kPass == Pass::combine)
    for (int column = warp; column < plan.columns; column += kWarps) {
      const int row = column / plan.width, query = column % plan.width;
      float2 v = make_float2(0, 0);
      if (row < at.rows && query < p.Hq)
        v = load_statistics(plan, at.first_row + row, p.Hq, query,
                            candidates.high(p, at.s + row) * p.block);
      if (lane == 0) factor[column] = v;
    }
}

// Four pools of a lane: where they are stored and what to multiply their sums by.
template <class P>
struct Rows {
  const P* vector[kRows];  // null for a pool that no query may choose
  float scale[kRows];

  // Of the tile from pool `first`, of which those in [low, high) count. pages[0] is the page that
  // begins with pool `paged`.
  GPU_DEVICE Rows(const Params& p, const Plan& plan, int h, const int* pages, int paged, int first,
                  int low, int high) {
    const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
    const float root = 1 / sqrtf(static_cast<float>(p.Di));
    int64_t mine = -1;
    GPU_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const int pool = first + g + 8 * i;
      vector[i] = nullptr;
      scale[i] = root;
      if (pool < low || pool >= high) continue;
      const auto local = static_cast<unsigned>(pool - paged);
      const int page = static_cast<int>(local * plan.page_factor >> 32), physical = pages[page];
      if (physical == 0) continue;
      const int64_t place = (int64_t{h} * p.NP + physical) * p.U + (pool - paged - page * p.U);
      vector[i] = static_cast<const P*>(p.index_pool) + place * p.Di;
      if (i == t) mine = place;
    }
    if (sizeof(P) == 1) {
      const float own = mine < 0 ? 0 : gpu::load_readonly(p.index_scale + mine);
      GPU_UNROLL
      for (int i = 0; i < kRows; ++i)
        scale[i] *= __shfl_sync(0xffffffffu, own, (lane & ~3) | i);
    }
  }
  GPU_DEVICE void load(const Params& p, int chunk, uint4 (&raw)[kRows]) const {
    const int channel = chunk * Chunk<P>::kChannels +
                        static_cast<int>(threadIdx.x) % 4 * Chunk<P>::kOwn;
    GPU_UNROLL
    for (int i = 0; i < kRows; ++i)
      raw[i] = vector[i] && channel < p.Di
                   ? gpu::load_readonly(reinterpret_cast<const uint4*>(vector[i] + channel))
                   : make_uint4(0, 0, 0, 0);
  }
};

// Two chunks are on their way at a time: 4 KiB a warp.
template <class P, class Product>
GPU_DEVICE void multiply(const Params& p, const Plan& plan, const Rows<P>& rows,
                         const Board<Product>& board, int column, int tiles, Product& product) {
  const int chunks = (p.Di + Chunk<P>::kChannels - 1) / Chunk<P>::kChannels;
  const typename Product::Query* queries = board.queries + column * plan.stride;
  unsigned used = 0;
  for (int n = 0; n < 8; ++n) used |= ((column + n) % plan.width < p.Hq ? 1u : 0u) << n;
  product.start(board.stage);
  for (int c = 0; c < chunks; c += 2) {
    uint4 even[kRows], odd[kRows];
    rows.load(p, c, even);
    if (c + 1 < chunks) rows.load(p, c + 1, odd);
    product.add(even, queries, plan.stride, c, tiles, used);
    if (c + 1 < chunks) product.add(odd, queries, plan.stride, c + 1, tiles, used);
  }
}

// Stores a row's scores of the lane's pools, the largest of every 2^fold neighbours. All lanes take
// part; those without a row (null) store nothing.
GPU_DEVICE void store_scores(const Plan& plan, float* scores, int first, float (&v)[kRows]) {
  const int g = static_cast<int>(threadIdx.x) % 32 / 4, together = 1 << plan.fold;
  for (int o = 1; o < min(together, 8); o *= 2) {
    GPU_UNROLL
    for (int i = 0; i < kRows; ++i)
      v[i] = maximum(v[i], __shfl_xor_sync(0xffffffffu, v[i], 4 * o));
  }
  if (together >= 16) v[0] = maximum(v[0], v[1]), v[2] = maximum(v[2], v[3]);
  if (together >= 32) v[0] = maximum(v[0], v[2]);
  if (!scores) return;
  GPU_UNROLL
  for (int i = 0; i < kRows; ++i) {
    const int pool = first + g + 8 * i;
    if ((pool & (together - 1)) == 0 && pool < plan.pools)
      gpu::store(scores + (pool >> plan.fold), v[i]);
  }
}

// Scores of a tile in some columns become scores of rows. A row of more columns than these goes on
// in `total`.
template <Pass kPass, class P, class Product>
GPU_DEVICE void store_rows(const Plan& plan, const Place& at, const Rows<P>& rows,
                           const Product& product, const float2* factor, int first,
                           int first_column, int tiles, float (&total)[kRows]) {
  const int t = static_cast<int>(threadIdx.x) % 4;
  GPU_UNROLL
  for (int n = 0; n < Product::kTiles; ++n) {
    if (n >= tiles) break;
    float sums[2][4];
    product.affinities(n, sums);
    const int column = first_column + 8 * n + 2 * t;
    float v[2][kRows];
    GPU_UNROLL
    for (int e = 0; e < 2; ++e) {
      const float2 f = factor[column + e];
      GPU_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const float affinity = sums[i / 2][i % 2 * 2 + e] * rows.scale[i];
        v[e][i] = kPass == Pass::relu ? f.x * positive_part(affinity) : f.y * expf(affinity - f.x);
      }
    }
    for (int e = 0; e < (plan.width == 1 ? 2 : 1); ++e) {
      // The row whose last columns these are.
      const int row = (column + e) / plan.width;
      const bool last = (first_column + 8 * n + 8) % plan.width == 0 || plan.width < 8;
      bool writes = row < at.rows;
      GPU_UNROLL
      for (int i = 0; i < kRows; ++i) {
        float sum = plan.width == 1 ? choose(e == 0, v[0][i], v[1][i]) : v[0][i] + v[1][i];
        if (plan.width >= 4) sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        if (plan.width >= 8) sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        total[i] = plan.width > 8 ? total[i] + sum : sum;
      }
      if (plan.width == 4) writes = writes && t % 2 == 0;
      if (plan.width >= 8) writes = writes && t == 0;
      if (!last) continue;
      float score[kRows];
      GPU_UNROLL
      for (int i = 0; i < kRows; ++i) {
        score[i] = rows.vector[i] ? total[i] : kMinusInfinity;
        total[i] = 0;
      }
      const int64_t length = plan.pools >> plan.fold;
      store_scores(plan, writes ? plan.scores + (at.first_row + row) * length : nullptr, first,
                   score);
    }
  }
}

// Adds a tile to the statistics of the columns, and stores its affinities if they are wanted.
template <class P, class Product>
GPU_DEVICE void add_statistics(const Params& p, const Plan& plan, const Place& at,
                               const Rows<P>& rows, const Product& product, const int* high,
                               int first, int first_column, int tiles,
                               float2 (&statistics)[Product::kTiles][2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  GPU_UNROLL
  for (int n = 0; n < Product::kTiles; ++n) {
    if (n >= tiles) break;
    float sums[2][4];
    product.affinities(n, sums);
    GPU_UNROLL
    for (int e = 0; e < 2; ++e) {
      const int column = first_column + 8 * n + 2 * t + e, end = high[column];
      const float2 before = statistics[n][e];
      float affinity[kRows], most = before.x;
      GPU_UNROLL
      for (int i = 0; i < kRows; ++i) {
        affinity[i] = sums[i / 2][i % 2 * 2 + e] * rows.scale[i];
        if (rows.vector[i] && first + g + 8 * i < end) most = fmaxf(most, affinity[i]);
      }
      float sum = before.y == 0 ? 0 : before.y * expf(before.x - most);
      GPU_UNROLL
      for (int i = 0; i < kRows; ++i)
        if (rows.vector[i] && first + g + 8 * i < end) sum += expf(affinity[i] - most);
      statistics[n][e] = make_float2(most, sum);
      if (plan.stored && end > 0) {
        const int row = column / plan.width, query = column % plan.width;
        float* to = plan.scores + ((at.first_row + row) * p.Hq + query) * plan.pools;
        GPU_UNROLL
        for (int i = 0; i < kRows; ++i) {
          const int pool = first + g + 8 * i;
          if (pool < end)
            gpu::store(to + pool, rows.vector[i] ? affinity[i] : __uint_as_float(kExcluded));
        }
      }
    }
  }
}

// Merges the statistics of a block's warps. `board` holds a value of every column and warp.
template <int kTiles>
GPU_DEVICE void store_statistics(const Params& p, const Plan& plan, const Place& at,
                                 int first_column, int tiles, float2 (&statistics)[kTiles][2],
                                 float2* board) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  GPU_UNROLL
  for (int n = 0; n < kTiles; ++n) {
    if (n >= tiles) break;
    GPU_UNROLL
    for (int e = 0; e < 2; ++e) {
      const float2 all = merge_lanes(statistics[n][e], 4, 16);
      if (lane < 4) board[warp * kTiles * 8 + 8 * n + 2 * lane + e] = all;
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < tiles * 8; i += kScoreThreads) {
    const int column = first_column + i, row = column / plan.width, query = column % plan.width;
    float2 all = board[i];
    for (int other = 1; other < kWarps; ++other) all = merge(all, board[other * kTiles * 8 + i]);
    if (row < at.rows && query < p.Hq)
      gpu::store(plan.statistics + ((at.first_row + row) * p.Hq + query) * plan.splits + at.split,
                 all);
  }
  __syncthreads();
}

// The 1: ptxas shall not spill registers for one more block of a multiprocessor.
template <Pass kPass, class T, class P, class Product>
__global__ void __launch_bounds__(kScoreThreads, 1) score_pools(const Params p, const Plan plan) {
  GPU_DYNAMIC_SHARED(unsigned char, memory);
  __shared__ float2 merged[kPass == Pass::statistics ? kWarps * Product::kTiles * 8 : 1];
  const int sequence = Place::sequence(p, plan);
  const Candidates candidates(p, load_uniform(p.past_len + sequence),
                              load_uniform(p.new_len + sequence));
  const Place at(p, plan, candidates.fresh);
  if (at.rows <= 0) return;
  const int start = at.split * plan.segment;
  const int low = candidates.low * p.block;
  const int high = candidates.high(p, at.s + at.rows - 1) * p.block;
  const int end = min(start + plan.segment, high);
  if (start >= end) return;

  const Board<Product> board(memory, plan);
  const int paged = start / p.U * p.U;
  for (int i = static_cast<int>(threadIdx.x); paged + i * p.U < end; i += kScoreThreads)
    board.pages[i] =
        physical_page(p.page_table + int64_t{at.b} * p.MP, paged / p.U + i, p.MP, p.NP);
  fill_queries<T, P, Product>(p, plan, at, board.queries);
  fill_columns<kPass, T>(p, plan, at, candidates, board.factor, board.high);
  __syncthreads();

  constexpr int kWide = 8 * Product::kTiles;
  const int first_tile = start + static_cast<int>(threadIdx.x) / 32 * kTile;
  if constexpr (kPass == Pass::statistics) {
    for (int column = 0; column < plan.columns; column += kWide) {
      const int tiles = min(Product::kTiles, (plan.columns - column) / 8);
      float2 statistics[Product::kTiles][2];
      GPU_UNROLL
      for (int i = 0; i < Product::kTiles * 2; ++i)
        statistics[i / 2][i % 2] = make_float2(kMinusInfinity, 0);
      for (int first = first_tile; first < end; first += kWarps * kTile) {
        if (first + kTile <= low) continue;
        const Rows<P> rows(p, plan, at.h, board.pages, paged, first, low, end);
        Product product;
        multiply(p, plan, rows, board, column, tiles, product);
        add_statistics(p, plan, at, rows, product, board.high, first, column, tiles, statistics);
      }
      store_statistics<Product::kTiles>(p, plan, at, column, tiles, statistics, merged);
    }
  } else {
    for (int first = first_tile; first < end; first += kWarps * kTile) {
      if (first + kTile <= low) continue;
      const Rows<P> rows(p, plan, at.h, board.pages, paged, first, low, end);
      float total[kRows] = {};
      for (int column = 0; column < plan.columns; column += kWide) {
        const int tiles = min(Product::kTiles, (plan.columns - column) / 8);
        Product product;
        multiply(p, plan, rows, board, column, tiles, product);
        store_rows<kPass>(plan, at, rows, product, board.factor, first, column, tiles, total);
      }
    }
  }
}

}  // namespace detail
}  // namespace index_pool_select
}  // namespace edgepool
