// What the attention of SharedKVAttention and SharedKVRead is asked to do, and how its work is cut.
#pragma once
#include <algorithm>

#include "common/storage.cuh"

namespace edgepool {
namespace shared_kv_attention {

// The attention: SharedKVRead, and the second half of SharedKVAttention, which alone changes pools
// and scales. Device pointers, aligned to 16 bytes; tensors are dense. T is `activation` (but for the
// page size), P is `storage`. Names: edgepool/ops/shared_kv_attention.py.
struct ReadParams {
  const void* q;                      // T [B, S, H, D]
  void *k_pool, *v_pool;              // P [NP, Hkv, T, D]
  float *k_scale, *v_scale;           // [NP, Hkv, T]; for s8
  const int32_t* page_table;          // [B, MP]
  const int32_t *past_len, *new_len;  // [B]
  const int32_t* selected;            // [B, S, Hs, K]; with `select`
  void* out;                          // T [B, S, H, D]
  void* workspace;                    // workspace_bytes() of it, whatever is in it
  int32_t B, S, H, D, Hkv, NP, T, MP, Hs, K;
  int32_t window, sinks, block_tokens;
  float scale;
  int32_t select;
  Type activation, storage;
  cudaStream_t stream;
};

constexpr int kMaxD = 256, kMaxGroup = 16, kMaxGrid = 65535;
constexpr int kMaxTokens = 1 << 29, kMaxRows = 1 << 30;
constexpr int64_t kMaxElements = 0x7fffffff;
constexpr int kLanes = 32, kWarps = 4, kThreads = kLanes * kWarps;
constexpr int kMostRows = 16;  // of a warp; a row is one head of one query
constexpr int kStep = 32;  // tokens that a warp takes at a time
constexpr unsigned kAll = ~0u;  // lanes

inline int storage_bytes(const ReadParams& p) {
  return p.storage == Type::s8 ? 1 : p.storage == Type::f16 ? 2 : 4;
}

// What keeps the kernel from running, in words; null if nothing does.
inline const char* problem(const ReadParams& p) {
  const auto product = [](int64_t x, int64_t y) { return x * y; };
  if (p.B < 0 || p.S < 0 || p.NP < 0 || p.MP < 0 || p.K < 0) return "a size is negative";
  if (p.H < 1 || p.Hkv < 1 || p.H % p.Hkv) return "H is no multiple of Hkv";
  if (p.H / p.Hkv > kMaxGroup) return "more than 16 query heads share a key-value head";
  if (p.D < 8 || p.D > kMaxD || p.D % 8) return "D is no multiple of 8 up to 256";
  if (p.D * storage_bytes(p) % 16) return "D is no multiple of 16, as int8 pages need it";
  if (p.B > kMaxGrid || p.Hkv > kMaxGrid) return "B or Hkv is over 65,535";
  if (product(product(p.B, p.S), p.H) > kMaxRows) return "B * S * H is over 2^30";
  if (p.block_tokens < 1 || p.T < 1 || p.T % p.block_tokens)
    return "T is no multiple of block_tokens";
  if (p.window < 0 || p.sinks < 0) return "window or sinks is negative";
  if (p.select != 0 && p.select != 1) return "select is neither 0 nor 1";
  if (p.select && p.Hs != 1 && p.Hs != p.Hkv) return "selected has neither 1 nor Hkv heads";
  if (product(p.MP, p.T) > kMaxTokens) return "MP * T is over 2^29";
  if (p.select && product(p.K, p.block_tokens) > kMaxTokens)
    return "K * block_tokens is over 2^29";
  if (int64_t{p.NP} * p.Hkv > kMaxElements / (int64_t{p.T} * p.D))
    return "a pool has 2^31 elements or more";
  if (p.activation == Type::s8) return "q is neither float32 nor float16";
  if (p.storage != Type::s8 && p.storage != p.activation)
    return "k_pool is neither int8 nor of the type of q";
  return nullptr;
}

// A tile is `queries` consecutive queries with the G heads that share a key-value head; a block
// takes one tile and one of `splits` parts of what it attends. `streamed`: the tile's queries have
// lists of selected blocks, which are merged on the way.
struct Plan {
  int group, queries, tiles, splits;
  int row_warps;  // that a tile's rows take; the other warps share the tokens with them
  bool streamed;
};

constexpr int kBlocks = 512;       // blocks that are enough to fill any GPU
constexpr int kFewQueries = 8;     // of these each has a block of its own if select = 1
constexpr int kLeastTokens = 128;  // for a split: one step of each warp

// A split of n tokens reads about 2 * n * D * storage bytes; its result is written and read again,
// 8 * rows * D bytes. This many tokens keep that below one part in twenty.
inline int least_tokens(int rows, int storage) {
  return std::max(kLeastTokens, 80 * rows / storage);
}

// The most tokens that a query can attend.
inline int64_t most_tokens(const ReadParams& p) {
  const int64_t context = int64_t{p.MP} * p.T;
  if (!p.select && !p.window) return context;
  const int64_t chosen = p.select ? (int64_t{p.K} + 1) * p.block_tokens : 0;
  return std::min(context, chosen + p.sinks + p.window);
}

// From shapes and attributes alone, so that one input always gives the same bits.
inline Plan plan(const ReadParams& p) {
  Plan plan{};
  plan.group = p.H / p.Hkv;
  plan.streamed = p.select && p.S > kFewQueries;
  const int most_rows = p.D > 128 ? 2 * kMostRows : 4 * kMostRows;
  const bool tiled = plan.streamed || !p.select;
  plan.queries = tiled ? std::max(1, std::min({kLanes, most_rows / plan.group, p.S})) : 1;
  plan.tiles = (p.S + plan.queries - 1) / plan.queries;
  const int rows = plan.queries * plan.group;
  const int64_t blocks = std::max<int64_t>(1, int64_t{p.B} * p.Hkv * plan.tiles);
  const int64_t splits =
      std::min(kBlocks / blocks, most_tokens(p) / least_tokens(rows, storage_bytes(p)));
  plan.splits = plan.streamed ? 1 : static_cast<int>(std::max<int64_t>(1, splits));
  return plan;
}

// Enough for `p` and for every smaller B, S, MP and K: of each row and split D values, the highest
// score and the sum of weights.
inline size_t workspace_bytes(const ReadParams& p) {
  const int group = p.H / p.Hkv;
  const int64_t rows = int64_t{p.B} * p.S * p.H;
  const int64_t by_tokens = rows * (most_tokens(p) / least_tokens(group, storage_bytes(p)));
  const int most_queries = p.select ? 1 : std::min(p.S, std::max(1, 4 * kMostRows / group));
  const int64_t by_blocks = int64_t{kBlocks} * most_queries * group;
  return static_cast<size_t>(std::min(by_tokens, by_blocks)) * sizeof(float) *
         static_cast<size_t>(p.D + 2);
}

}  // namespace shared_kv_attention
}  // namespace edgepool
