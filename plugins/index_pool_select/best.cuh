// Chooses each row's k best blocks, by radix selection: exact, the same at every run, of equal
// scores the lower block, in ascending order. A row of more than `kPart` blocks is cut into parts
// that choose k each, and what they chose is chosen from again.
#pragma once
#include "score.cuh"

namespace edgepool {
namespace index_pool_select {
namespace detail {

// Keys in the order of scores: -inf is 0 and never chosen, NaN is above all, and -0 is 0.
GPU_DEVICE unsigned order_key(float score) {
  if (score != score) return 0xffffffffu;
  if (score == kMinusInfinity) return 0;
  const unsigned bits = __float_as_uint(score == 0 ? 0.f : score);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

constexpr int kBestWarps = kBestThreads / 32, kDigits = 1 << 11;

struct Scratch {
  int count[kDigits];                           // keys by their digit
  int above[kBestWarps], equal[kBestWarps];     // by warp
  int digit, digit_above, digit_equal;          // what find_digit found
};

// Which keys are chosen: in the bits of `mask` those above `least`, and the first `ties` equal
// ones.
struct Threshold {
  unsigned least, mask;
  int ties;
  GPU_DEVICE bool above(unsigned key) const { return (key & mask) > least; }
  GPU_DEVICE bool equal(unsigned key) const { return key != 0 && (key & mask) == least; }
};

// The digit at which the keys, counted from the largest digit, reach `wanted`; -1 if they do not.
GPU_DEVICE void find_digit(Scratch& scratch, int digits, int wanted) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int each = digits / kBestThreads, top = digits - 1 - thread * each;
  int own = 0;
  for (int i = 0; i < each; ++i) own += scratch.count[top - i];
  int until = own;  // with this thread's digits and all above
  for (int o = 1; o < 32; o *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, until, o);
    if (lane >= o) until += other;
  }
  if (lane == 31) scratch.above[warp] = until;
  __syncthreads();
  for (int w = 0; w < warp; ++w) until += scratch.above[w];
  if (thread == kBestThreads - 1 && until < wanted) scratch.digit = -1;
  int above = until - own;
  if (above < wanted && wanted <= until)
    for (int i = 0;; ++i) {
      const int count = scratch.count[top - i];
      if (above + count >= wanted) {
        scratch.digit = top - i, scratch.digit_above = above, scratch.digit_equal = count;
        break;
      }
      above += count;
    }
  __syncthreads();
}

// The threshold of the k largest of n keys; by the whole block.
template <class Keys>
GPU_DEVICE Threshold find_threshold(const Keys& keys, int n, int k, Scratch& scratch) {
  const Threshold every{0, 0xffffffffu, 0};
  if (n <= k) return every;
  Threshold found{0, 0, k};
  for (int shift = 21;; shift = shift == 21 ? 10 : 0) {  // digits of 11, 11 and 10 bits
    const int digits = shift == 0 ? kDigits / 2 : kDigits;
    for (int i = static_cast<int>(threadIdx.x); i < digits; i += kBestThreads) scratch.count[i] = 0;
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < n; i += kBestThreads) {
      const unsigned key = keys(i);
      if (found.equal(key)) atomicAdd(&scratch.count[key >> shift & (digits - 1)], 1);
    }
    __syncthreads();
    find_digit(scratch, digits, found.ties);
    if (scratch.digit < 0) return every;
    found.least |= static_cast<unsigned>(scratch.digit) << shift;
    found.mask |= static_cast<unsigned>(digits - 1) << shift;
    found.ties -= scratch.digit_above;
    if (shift == 0 || scratch.digit_equal == found.ties) return found;
  }
}

// Calls emit(position, i, key) for the chosen of n keys, in order; returns how many they are.
template <class Keys, class Emit>
GPU_DEVICE int for_chosen(const Keys& keys, int n, const Threshold& threshold, Scratch& scratch,
                          Emit emit) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const unsigned below = (1u << lane) - 1;
  const int each = (n + kBestThreads - 1) / kBestThreads * 32;
  const int begin = min(warp * each, n), end = min(begin + each, n);
  int above = 0, equal = 0;
  for (int i = begin; i < end; i += 32) {
    const unsigned key = i + lane < end ? keys(i + lane) : 0;
    above += __popc(__ballot_sync(0xffffffffu, threshold.above(key)));
    equal += __popc(__ballot_sync(0xffffffffu, threshold.equal(key)));
  }
  if (lane == 0) scratch.above[warp] = above, scratch.equal[warp] = equal;
  __syncthreads();
  int total = 0, position = 0, ties = 0, tie = 0;
  for (int w = 0; w < kBestWarps; ++w) {
    if (w == warp) position = total + min(ties, threshold.ties), tie = ties;
    total += scratch.above[w], ties += scratch.equal[w];
  }
  for (int i = begin; i < end; i += 32) {
    const unsigned key = i + lane < end ? keys(i + lane) : 0;
    const bool equals = threshold.equal(key);
    const unsigned all_equal = __ballot_sync(0xffffffffu, equals);
    const bool chosen = threshold.above(key) ||
                        (equals && tie + __popc(all_equal & below) < threshold.ties);
    const unsigned all_chosen = __ballot_sync(0xffffffffu, chosen);
    if (chosen) emit(position + __popc(all_chosen & below), i + lane, key);
    position += __popc(all_chosen), tie += __popc(all_equal);
  }
  return total + min(ties, threshold.ties);
}

// A row of a launch, and its candidate blocks.
struct Row {
  int64_t number, selected;  // in the launch; of its first number in `selected`
  int low, count;

  GPU_DEVICE Row(const Params& p, const Plan& plan, int row) : number(row) {
    const int head = row / plan.queries, h = head % p.Hs;
    const int s = plan.first_query + row % plan.queries, b = plan.first_batch + head / p.Hs;
    const Candidates candidates(p, load_uniform(p.past_len + b), load_uniform(p.new_len + b));
    low = candidates.low;
    count = s < candidates.fresh ? max(candidates.high(p, s) - low, 0) : 0;
    selected = ((int64_t{b} * p.S + s) * p.Hs + h) * p.k;
  }
};

// The score of a block: the largest of its pools'.
GPU_DEVICE float stored_score(const Params& p, const Plan& plan, const Row& row, int block) {
  const int each = p.block >> plan.fold;
  const float* from = plan.scores + row.number * (plan.pools >> plan.fold) + int64_t{block} * each;
  float score = gpu::load(from);
  for (int i = 1; i < each; ++i) score = maximum(score, gpu::load(from + i));
  return score;
}
GPU_DEVICE float softmax_score(const Params& p, const Plan& plan, const Row& row, int block,
                               const float2* statistics) {
  const float* from = plan.scores + row.number * p.Hq * plan.pools + int64_t{block} * p.block;
  float score = kMinusInfinity;
  for (int i = 0; i < p.block; ++i) {
    float sum = 0;
    for (int query = 0; query < p.Hq; ++query) {
      const float affinity = gpu::load(from + int64_t{query} * plan.pools + i);
      if (__float_as_uint(affinity) == kExcluded) return kMinusInfinity;
      sum += statistics[query].y * expf(affinity - statistics[query].x);
    }
    score = maximum(score, sum);
  }
  return score;
}

struct SharedKeys {
  const unsigned* keys;
  GPU_DEVICE unsigned operator()(int i) const { return keys[i]; }
};
struct StoredKeys {
  const unsigned* keys;
  GPU_DEVICE unsigned operator()(int i) const { return gpu::load(keys + i); }
};

// One part of a row. With one part a row, this is the result. The 2: ptxas shall not spill
// registers for a third block of a multiprocessor.
template <bool kAffinities>
__global__ void __launch_bounds__(kBestThreads, 2) best_of_part(const Params p, const Plan plan) {
  GPU_DYNAMIC_SHARED(unsigned, keys);
  __shared__ Scratch scratch;
  __shared__ float2 statistics[kAffinities ? kColumns : 1];
  const int part = static_cast<int>(blockIdx.x) % plan.parts;
  const Row row(p, plan, static_cast<int>(blockIdx.x) / plan.parts);
  const int n = min(kPart, row.count - part * kPart), first = row.low + part * kPart;
  if (n <= 0 && plan.parts > 1) return;

  if constexpr (kAffinities) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int high = row.count > 0 ? (row.low + row.count) * p.block : 0;
    for (int query = warp; query < p.Hq; query += kBestWarps) {
      const float2 v = load_statistics(plan, row.number, p.Hq, query, high);
      if (threadIdx.x % 32 == 0) statistics[query] = v;
    }
    __syncthreads();
  }
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kBestThreads)
    keys[i] = order_key(kAffinities ? softmax_score(p, plan, row, first + i, statistics)
                                    : stored_score(p, plan, row, first + i));
  __syncthreads();

  const SharedKeys all{keys};
  const Threshold threshold = find_threshold(all, n, p.k, scratch);
  if (plan.parts == 1) {
    int32_t* to = p.selected + row.selected;
    const int chosen = for_chosen(all, n, threshold, scratch, [&](int at, int i, unsigned) {
      gpu::store(to + at, first + i);
    });
    for (int i = chosen + static_cast<int>(threadIdx.x); i < p.k; i += kBestThreads)
      gpu::store(to + i, -1);
  } else {
    const int64_t to = (row.number * plan.parts + part) * plan.keep;
    const int chosen = for_chosen(all, n, threshold, scratch, [&](int at, int i, unsigned key) {
      gpu::store(plan.keys + to + at, key);
      gpu::store(plan.numbers + to + at, first + i);
    });
    for (int i = chosen + static_cast<int>(threadIdx.x); i < plan.keep; i += kBestThreads)
      gpu::store(plan.keys + to + i, 0u);
  }
}

// The best of what a row's parts chose, which lies in ascending order.
__global__ void __launch_bounds__(kBestThreads) best_of_parts(const Params p, const Plan plan) {
  __shared__ Scratch scratch;
  const Row row(p, plan, static_cast<int>(blockIdx.x));
  const int n = (row.count + kPart - 1) / kPart * plan.keep;
  const int64_t from = row.number * plan.parts * plan.keep;
  const StoredKeys all{plan.keys + from};
  const Threshold threshold = find_threshold(all, n, p.k, scratch);
  int32_t* to = p.selected + row.selected;
  const int chosen = for_chosen(all, n, threshold, scratch, [&](int at, int i, unsigned) {
    gpu::store(to + at, gpu::load(plan.numbers + from + i));
  });
  for (int i = chosen + static_cast<int>(threadIdx.x); i < p.k; i += kBestThreads)
    gpu::store(to + i, -1);
}

}  // namespace detail
}  // namespace index_pool_select
}  // namespace edgepool
