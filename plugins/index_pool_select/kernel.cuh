// IndexPoolSelect: score the pooled index for each query and keep its k best blocks.
// The definition is edgepool/ops/index_pool_select.py.
//
// A row is one query of one selection head. Launches, for all rows that the workspace has room for:
//   score_pools    128 threads; rows_together rows (at most 64 index queries) and a segment of 256
//                  to 2,048 pools a block, so that there are about 8 blocks a multiprocessor.
//                  `relu`: scores. `softmax`: statistics of each index query, and its affinities
//                  (`stored`, few queries) or a second scan that makes scores (many).
//   best_of_part   512 threads; 8,192 blocks of one row a thread block
//   best_of_parts  512 threads; a row of more than 8,192 blocks
// So a decode step is 2 launches, 3 beyond 8,192 blocks. Halves, and INT8 codes as halves, which is
// exact, are multiplied by mma.m16n8k16 from sm_80 on and by wmma m32n8k16 on sm_72 (through shared
// memory); float activations by float arithmetic.
//
// Bytes of a row with P candidate pools, s and p bytes an element of T and P, c = 4 for INT8 scales
// and 0 else; R = rows_together is 1 for a decode step, f = min(2^fold, block):
//   read once         P (Di p + c) / R of index, twice for `softmax` that is not `stored`;
//                     4 P / U / R of page table; Hq Di s of index queries for each segment
//   written and read  4 P / f of scores; `stored`: 4 Hq P of affinities
//   written, read     beyond 8,192 blocks: 8 k, 24 k for each part
//   written           4 k of selected
// Operations: Hq Di P multiplications and additions; about Di P to unpack INT8.
// Workspace: 4 P / f (`stored`: 4 Hq P) bytes a row, with statistics and parts; for 64 MiB of rows.
#pragma once
#include "best.cuh"

namespace edgepool {
namespace index_pool_select {

// What keeps the kernel from running, in words; null if nothing does.
inline const char* problem(const Params& p) {
  using namespace detail;
  if (p.B < 0 || p.S < 0 || p.Hs < 1 || p.NP < 1 || p.U < 1 || p.MP < 0)
    return "a size is negative or zero";
  if (p.Hq < 1 || p.Hq > kColumns) return "Hq is not within 1 and 64";
  if (p.Di < 16 || p.Di % 16) return "Di is no multiple of 16";
  if (p.U > kMostPerPage) return "a page has over 32,768 pools";
  if (int64_t{p.MP} * p.U > 1 << 30) return "a sequence has over 2^30 pools";
  if (p.k < 0) return "k is negative";
  if (p.ratio < 1) return "ratio is below 1";
  if (p.block < 1 || p.U % p.block) return "block does not divide the pools of a page";
  if (p.window < 0 || p.sinks < 0) return "window or sinks is negative";
  if (p.activation == Type::s8) return "q is neither float32 nor float16";
  if (p.storage != Type::s8 && p.storage != p.activation)
    return "index_pool is neither int8 nor of the type of q";
  if (p.S > 0 && basic_plan(p).rows_together < 1) return "Hq * Di is too large";
  return nullptr;
}

// Workspace for these sizes; a launch with smaller ones needs no more, also where smaller rows fill
// kWorkspace better than these do. 0 pools need none.
inline size_t workspace_bytes(const Params& p) {
  using namespace detail;
  const Plan plan = basic_plan(p);
  const int64_t all = int64_t{p.B} * p.S;
  if (all == 0 || queries_in(p, plan, kWorkspace) == all)
    return bytes_for(p, plan, static_cast<size_t>(all));
  const size_t one = bytes_for(p, plan, 1);
  return one > kWorkspace ? one : kWorkspace;
}

namespace detail {

template <Pass kPass, class T, class P, class Product>
cudaError_t score(const Params& p, const Plan& plan) {
  const int64_t blocks =
      int64_t{plan.batches} * p.Hs * divide_up(plan.queries, plan.rows_together) * plan.splits;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  return gpu::launch(score_pools<kPass, T, P, Product>, dim3(static_cast<unsigned>(blocks)),
                     dim3(kScoreThreads), Board<Product>::bytes(p, plan), p.stream, p, plan);
}

template <Pass kPass, class P, int Tiles>
cudaError_t score_halves(const Params& p, const Plan& plan) {
  return gpu::with_arch(p.sm, [&](auto arch) {
    using A = decltype(arch);
    if constexpr (A::has_mma)
      return score<kPass, half, P, MmaProduct<A, P, Tiles>>(p, plan);
    else
      return score<kPass, half, P, WmmaProduct<P, Tiles>>(p, plan);
  });
}
template <Pass kPass, class P>
cudaError_t score_halves(const Params& p, const Plan& plan) {
  return plan.columns == 8 ? score_halves<kPass, P, 1>(p, plan)
                           : score_halves<kPass, P, kColumns / 8>(p, plan);
}

template <Pass kPass>
cudaError_t score(const Params& p, const Plan& plan) {
  const bool codes = p.storage == Type::s8;
  if (p.activation == Type::f16)
    return codes ? score_halves<kPass, int8_t>(p, plan) : score_halves<kPass, half>(p, plan);
  return codes ? score<kPass, float, int8_t, ScalarProduct<int8_t>>(p, plan)
               : score<kPass, float, float, ScalarProduct<float>>(p, plan);
}

// Scores and selection of the queries of a plan.
inline cudaError_t run(const Params& p, const Plan& plan) {
  cudaError_t status = cudaSuccess;
  if (plan.pools > 0) {
    status = p.scoring == Scoring::relu ? score<Pass::relu>(p, plan)
                                        : score<Pass::statistics>(p, plan);
    if (status == cudaSuccess && p.scoring == Scoring::softmax && !plan.stored)
      status = score<Pass::combine>(p, plan);
    if (status != cudaSuccess) return status;
  }
  const int64_t rows = int64_t{plan.batches} * plan.queries * p.Hs;
  if (rows * plan.parts > 0x7fffffff) return cudaErrorInvalidConfiguration;
  const int blocks = plan.pools / p.block;
  const size_t shared = sizeof(unsigned) * static_cast<size_t>(blocks < kPart ? blocks : kPart);
  status = gpu::launch(plan.stored ? best_of_part<true> : best_of_part<false>,
                       dim3(static_cast<unsigned>(rows * plan.parts)), dim3(kBestThreads), shared,
                       p.stream, p, plan);
  if (status == cudaSuccess && plan.parts > 1)
    status = gpu::launch(best_of_parts, dim3(static_cast<unsigned>(rows)), dim3(kBestThreads), 0,
                         p.stream, p, plan);
  return status;
}

}  // namespace detail

inline cudaError_t launch(const Params& p) {
  using namespace detail;
  if (problem(p)) return cudaErrorInvalidValue;
  if (p.B == 0 || p.S == 0 || p.k == 0) return cudaSuccess;
  Plan plan = basic_plan(p);
  const int64_t together = queries_in(p, plan, p.workspace_size);
  if (together < 1) return cudaErrorInvalidValue;
  // Whole sequences while they fit, else a sequence in tiles of queries.
  int batches = static_cast<int>(together / p.S), queries = p.S;
  if (batches == 0) {
    batches = 1;
    queries = static_cast<int>(together);
    if (queries > plan.rows_together) queries -= queries % plan.rows_together;
  }
  for (int b = 0; b < p.B; b += batches)
    for (int s = 0; s < p.S; s += queries) {
      plan.first_batch = b;
      plan.batches = p.B - b < batches ? p.B - b : batches;
      plan.first_query = s;
      plan.queries = p.S - s < queries ? p.S - s : queries;
      cut_pools(p, plan);
      place_workspace(p, plan);
      const cudaError_t status = run(p, plan);
      if (status != cudaSuccess) return status;
    }
  return cudaSuccess;
}

}  // namespace index_pool_select
}  // namespace edgepool
