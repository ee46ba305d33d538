// What IndexPoolSelect's kernels are told, and how the host cuts the work into launches.
#pragma once
#include "common/storage.cuh"

namespace edgepool {
namespace index_pool_select {

enum class Scoring : int32_t { relu, softmax };

// Device pointers, aligned to 16 bytes. T is `activation`, P is `storage`, U the pools of a page.
struct Params {
  const void* q;                      // T [B, S, Hs, Hq, Di]
  const void* w;                      // T [B, S, Hs, Hq]; for relu
  const void* index_pool;             // P [Hs, NP, U, Di]
  const float* index_scale;           // [Hs, NP, U]; for s8
  const int32_t* page_table;          // [B, MP]
  const int32_t *past_len, *new_len;  // [B]
  int32_t* selected;                  // [B, S, Hs, k]
  void* workspace;                    // aligned to 256 bytes
  size_t workspace_size;              // of it, in bytes
  int32_t B, S, Hs, Hq, Di, NP, U, MP;
  Scoring scoring;
  int32_t k, block, ratio, window, sinks;
  Type activation, storage;
  int32_t sm, multiprocessors;  // of the device
  cudaStream_t stream;
};

namespace detail {

constexpr int kWarps = 4, kScoreThreads = 32 * kWarps;  // of a scoring block
constexpr int kTile = 32;                               // pools that a warp scores at a time
constexpr int kColumns = 64;                            // index queries of a scoring block
constexpr int kLeastSegment = 256, kMostSegment = 2048; // pools of a scoring block
constexpr int kMostPerPage = 32768;                     // pools
constexpr int kQueryBytes = 36 << 10;  // for its index queries and stages in shared memory
constexpr int kBestThreads = 512;
constexpr int kPart = 8192;  // blocks that one thread block chooses from
constexpr size_t kWorkspace = 64 << 20;  // enough for many queries at once

// A row is one query of one selection head. A launch takes `queries` queries of each of `batches`
// sequences; its rows are numbered [batches, Hs, queries].
struct Plan {
  int width;          // columns of a row: Hq, with padding
  int rows_together;  // rows of a scoring block
  int columns;        // of a scoring block, a multiple of 8
  int stride;         // elements of a column in shared memory
  int pools;          // of a sequence
  int fold;           // log2 of the pools that share one stored score
  uint64_t page_factor;  // n / U = n * page_factor >> 32, for n up to kMostSegment + U
  int segment, splits;  // pools of a scoring block; how many make a sequence
  int parts, keep;    // of a row when its best blocks are chosen in two steps; kept of each
  bool stored;        // softmax: affinities are stored, not computed twice
  int first_batch, batches, first_query, queries;
  // Workspace.
  float* scores;      // [rows, pools >> fold], or affinities [rows, Hq, pools]
  float2* statistics; // [rows, Hq, splits]: largest affinity, sum of exp(affinity - largest)
  unsigned* keys;     // [rows, parts, keep]: what the parts chose ...
  int* numbers;       // ... and the numbers of these blocks
};

inline int divide_up(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }
inline size_t element_size(Type type) { return type == Type::f32 ? 4 : type == Type::f16 ? 2 : 1; }
inline size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

// How affinities are computed (products.cuh): halves by tensor cores, floats one by one.
enum class Method { mma, wmma, scalar };
inline Method method(const Params& p) {
  if (p.activation != Type::f16) return Method::scalar;
  return p.sm >= 80 ? Method::mma : Method::wmma;
}
// A warp of `wmma` lays 64 bytes of each stored vector out as halves, in rows of this many.
constexpr int stage_row(int channels) { return channels + 8; }

// Everything that does not depend on how much is in flight.
inline Plan basic_plan(const Params& p) {
  Plan plan{};
  plan.width = 1;
  while (plan.width < p.Hq && plan.width < 8) plan.width *= 2;
  if (p.Hq > 8) plan.width = divide_up(p.Hq, 8) * 8;

  // Columns lie so that the lanes of a product read different banks.
  const int channels = 64 / static_cast<int>(element_size(p.storage));
  plan.stride = divide_up(p.Di, channels) * channels;
  int size = 4, room = kQueryBytes;
  if (method(p) == Method::mma) {
    size = 2;
    while (plan.stride % 64 != 16) plan.stride += 16;
  } else if (method(p) == Method::wmma) {
    size = 2;
    plan.stride += 8;
    room -= kWarps * kTile * stage_row(channels) * size;
  }
  const int fit = room / (plan.stride * size);
  plan.rows_together = (fit < kColumns ? fit : kColumns) / plan.width;
  if (plan.rows_together > p.S) plan.rows_together = p.S;
  plan.columns = divide_up(plan.rows_together * plan.width, 8) * 8;

  plan.pools = p.MP * p.U;
  while (1 << plan.fold < kTile && p.block % (2 << plan.fold) == 0) ++plan.fold;
  plan.page_factor = (uint64_t{1} << 32) / static_cast<uint64_t>(p.U) + 1;
  plan.parts = plan.pools > 0 ? divide_up(plan.pools / p.block, kPart) : 1;
  plan.keep = p.k < kPart ? p.k : kPart;
  // Storing and reading an affinity of every index query, against reading the index again.
  plan.stored = p.scoring == Scoring::softmax &&
                int64_t{p.S} * p.Hq * 8 <= p.Di * static_cast<int64_t>(element_size(p.storage)) + 4;
  return plan;
}

struct RowBytes {
  size_t scores, statistics, chosen;
};
inline RowBytes row_bytes(const Params& p, const Plan& plan) {
  RowBytes bytes{};
  const size_t pools = static_cast<size_t>(plan.pools), queries = static_cast<size_t>(p.Hq);
  bytes.scores = 4 * (plan.stored ? queries * pools : pools >> plan.fold);
  if (p.scoring == Scoring::softmax)
    bytes.statistics = sizeof(float2) * queries * size_t(divide_up(plan.pools, kLeastSegment));
  if (plan.parts > 1) bytes.chosen = 4 * size_t(plan.parts) * size_t(plan.keep);
  return bytes;
}
// Of `queries` queries of all selection heads.
inline size_t bytes_for(const Params& p, const Plan& plan, size_t queries) {
  const RowBytes row = row_bytes(p, plan);
  const size_t rows = queries * static_cast<size_t>(p.Hs);
  return aligned(rows * row.scores) + aligned(rows * row.statistics) +
         2 * aligned(rows * row.chosen);
}
// Queries that `size` bytes are enough for, at most all.
inline int64_t queries_in(const Params& p, const Plan& plan, size_t size) {
  const RowBytes row = row_bytes(p, plan);
  const size_t each = size_t(p.Hs) * (row.scores + row.statistics + 2 * row.chosen);
  const int64_t all = int64_t{p.B} * p.S;
  if (each == 0) return all;
  int64_t queries = static_cast<int64_t>(size / each);
  if (queries > all) queries = all;
  while (queries > 0 && bytes_for(p, plan, static_cast<size_t>(queries)) > size) --queries;
  return queries;
}

// Splits a sequence's pools so that there are some blocks for every multiprocessor.
inline void cut_pools(const Params& p, Plan& plan) {
  const int64_t tiles = int64_t{plan.batches} * p.Hs * divide_up(plan.queries, plan.rows_together);
  const int wanted = divide_up(8 * int64_t{p.multiprocessors}, tiles);
  int segment = divide_up(divide_up(plan.pools, wanted), kScoreThreads) * kScoreThreads;
  if (segment < kLeastSegment) segment = kLeastSegment;
  if (segment > kMostSegment) segment = kMostSegment;
  plan.segment = segment;
  plan.splits = divide_up(plan.pools, segment);
}

inline void place_workspace(const Params& p, Plan& plan) {
  const RowBytes row = row_bytes(p, plan);
  const size_t rows = size_t(plan.batches) * size_t(plan.queries) * size_t(p.Hs);
  char* at = static_cast<char*>(p.workspace);
  plan.scores = reinterpret_cast<float*>(at);
  at += aligned(rows * row.scores);
  plan.statistics = reinterpret_cast<float2*>(at);
  at += aligned(rows * row.statistics);
  plan.keys = reinterpret_cast<unsigned*>(at);
  at += aligned(rows * row.chosen);
  plan.numbers = reinterpret_cast<int*>(at);
}

// ---- which pools a query may choose ----
struct Candidates {
  int64_t position;  // of the query in row 0 of this step
  int fresh;         // queries of this step
  int low;           // the first candidate block
  int blocks;        // of the sequence

  GPU_DEVICE Candidates(const Params& p, int past, int fresh_rows)
      : position(past > 0 ? past : 0), fresh(clamp(fresh_rows, 0, p.S)),
        blocks(static_cast<int>(int64_t{p.MP} * p.U / p.block)) {
    const int64_t tokens = int64_t{p.block} * p.ratio;
    const int64_t first = (p.sinks + tokens - 1) / tokens;
    low = static_cast<int>(first < blocks ? first : blocks);
  }
  // The block after the last candidate of the query in row s: where its local span starts.
  GPU_DEVICE int high(const Params& p, int s) const {
    const int64_t reach = position + s + 1 - p.window;
    if (reach <= 0) return 0;
    const int64_t local = reach / (int64_t{p.block} * p.ratio);
    return static_cast<int>(local < blocks ? local : blocks);
  }
};

}  // namespace detail
}  // namespace index_pool_select
}  // namespace edgepool
