// Attention of 16 rows by one warp with mma.m16n8k16, for half activations from sm_80 on; FP32
// accumulation.
//
// Keys and values go from global memory to the operand registers, 16 bytes a lane, without shared
// memory. That works because the order of the terms of a product is free: lane 4g + c holds of key g
// (of 8) the columns that it loaded, and the queries are laid out alike; and of values it holds the
// columns that it loaded of tokens 2c, 2c + 1, 2c + 8, 2c + 9 (of 16), the tokens whose weights it has.
// An INT8 key's scale multiplies the score. An INT8 value's multiplies the weight, which becomes a
// half: so the weights are in units of the largest scale so far, and no small scale is lost.
#pragma once
#include <cfloat>

#include "attended_set.cuh"
#include "vectors.cuh"

namespace edgepool {
namespace shared_kv_attention {

template <class A, class P, int DP>  // DP: D, or the next of 64, 128, 256
class Tensor {
 public:
  using Activation = __half;
  using Storage = P;
  static constexpr int kColumns = DP;
  static constexpr int kRows = 16;
  static constexpr int kBlocks = DP > 64 ? 2 : 3;  // on a multiprocessor, as registers allow

 private:
  static constexpr int kBytes = sizeof(P);
  // Keys: 4 lanes load 64 bytes of a key at once.
  static constexpr int kKeyElements = 16 / kBytes;
  static constexpr int kKeyChunks = DP * kBytes / 64;
  static constexpr int kKeySteps = kKeyElements / 4;  // products along k (16) that a chunk makes
  static constexpr int kKeyTiles = kStep / 8;
  // Whether loads start before what they must wait for is done, as registers allow; how many chunks
  // of keys then do, and how many are held at once.
  static constexpr bool kEarly = DP <= 128;
  static constexpr int kKeysAhead = !kEarly ? 0 : kKeyChunks < 2 ? 1 : 2;
  static constexpr int kKeysHeld = kKeysAhead ? kKeysAhead : 1;
  // Values: 8 lanes load 64 or 128 bytes of a token at once.
  static constexpr int kValueBytes = DP * kBytes < 128 || (kBytes == 1 && !kEarly) ? 8 : 16;
  static constexpr int kValueElements = kValueBytes / kBytes;
  static constexpr int kValueChunks = DP * kBytes / (8 * kValueBytes);
  static constexpr int kValuesAhead = !kEarly || kValueChunks < 2 ? 1 : 2;

 public:
  static constexpr int kQueryBytes = kRows * DP * static_cast<int>(sizeof(__half));
  static constexpr int kStageBytes = 0;

  // Queries in the order of the first operand's registers: for each product the four of each lane.
  static GPU_DEVICE void load_queries(const Job& job, const Tile& tile, unsigned char* shared) {
    constexpr int kProducts = kKeyChunks * kKeySteps;
    auto* operands = reinterpret_cast<Vector<16>*>(shared);
    const int count = job.plan.row_warps * kProducts * kLanes;
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
      const int lane = i % kLanes, product = i / kLanes % kProducts;
      const int chunk = product / kKeySteps, part = product % kKeySteps;
      const int column = (chunk * 4 + lane % 4) * kKeyElements + part * 4;
      const int row = i / (kLanes * kProducts) * kRows + lane / 4;
      const Vector<8> low = query_part(job, tile, row, column);
      const Vector<8> high = query_part(job, tile, row + 8, column);
      operands[i] = {{low.word[0], high.word[0], low.word[1], high.word[1]}};
    }
  }

  GPU_DEVICE Tensor(const Job& job, int first_row, int, const unsigned char* queries,
                    unsigned char*)
      : lane_(static_cast<int>(threadIdx.x) % kLanes),
        D_(job.in.D),
        scale_(job.in.scale * 1.4426950408889634f),
        queries_(reinterpret_cast<const Vector<16>*>(queries)) {
    GPU_UNROLL
    for (int half = 0; half < 2; ++half) {
      query_[half] = (first_row + lane_ / 4 + 8 * half) / job.plan.group;
      most_[half] = -INFINITY;
      sum_[half] = 0;
    }
    GPU_UNROLL
    for (int c = 0; c < kValueChunks; ++c)
      GPU_UNROLL
      for (int j = 0; j < kValueElements; ++j)
        GPU_UNROLL
        for (float& x : mixed_[c][j]) x = 0;
  }

  // Starts to load the keys of a step.
  GPU_DEVICE void issue(const Job& job, const Token* tokens) {
    GPU_UNROLL
    for (int c = 0; c < kKeysAhead; ++c)
      GPU_UNROLL
      for (int t = 0; t < kKeyTiles; ++t) keys_[c][t] = load_key(job, tokens, c, t);
  }

  GPU_DEVICE void step(const Job& job, const Token* tokens) {
    float score[kKeyTiles][4];
    GPU_UNROLL
    for (int t = 0; t < kKeyTiles; ++t)
      GPU_UNROLL
      for (float& x : score[t]) x = 0;
    GPU_UNROLL
    for (int c = 0; c < kKeyChunks; ++c) {
      if (c * 4 * kKeyElements >= D_) break;
      if (c >= kKeysAhead)
        GPU_UNROLL
        for (int t = 0; t < kKeyTiles; ++t) keys_[c % kKeysHeld][t] = load_key(job, tokens, c, t);
      score_chunk(score, keys_[c % kKeysHeld], c);
    }
    Vector<kValueBytes> values[kValuesAhead][4];
    if (kEarly) load_values(job, tokens, 0, 0, values);
    weigh(score, tokens);
    GPU_UNROLL
    for (int half = 0; half < 2; ++half)
      GPU_UNROLL
      for (int c = 0; c < kValueChunks; c += kValuesAhead) {
        if (!kEarly || half || c) load_values(job, tokens, half * 16, c, values);
        mix(score, half * 2, c, values);
      }
  }

  // Highest score and sum of weights of each row, into sums[kRows].
  GPU_DEVICE void summarize(float2* sums) {
    GPU_UNROLL
    for (int half = 0; half < 2; ++half) {
      float sum = sum_[half];
      sum += __shfl_xor_sync(kAll, sum, 1);
      sum += __shfl_xor_sync(kAll, sum, 2);
      if (lane_ % 4 == 0) sums[lane_ / 4 + 8 * half] = make_float2(most_[half], sum);
    }
  }

  // Adds (or puts) each row's weighted values times its factor to `rows` [kRows][stride].
  GPU_DEVICE void deliver(float* rows, int stride, const float* factor, bool put) const {
    GPU_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int row = lane_ / 4 + i / 2 * 8;
      const float by = kBytes == 1 ? factor[row] * unit_ : factor[row];
      GPU_UNROLL
      for (int c = 0; c < kValueChunks; ++c)
        GPU_UNROLL
        for (int j = 0; j < kValueElements; ++j) {
          const int column = (c * 8 + lane_ % 4 * 2 + i % 2) * kValueElements + j;
          float& sum = rows[row * stride + column];
          const float x = mixed_[c][j][i] * by;
          sum = put ? x : sum + x;
        }
    }
  }

 private:
  static GPU_DEVICE Vector<8> query_part(const Job& job, const Tile& tile, int row, int column) {
    if (row / job.plan.group >= tile.count || column >= job.in.D) return zero_vector<8>();
    const auto* q = static_cast<const __half*>(job.in.q);
    return load_vector<8>(q + place_of_row(job, tile, row) * job.in.D + column);
  }

  GPU_DEVICE Vector<16> load_key(const Job& job, const Token* tokens, int chunk, int tile) const {
    const Token& token = tokens[tile * 8 + lane_ / 4];
    const int column = (chunk * 4 + lane_ % 4) * kKeyElements;
    if (!token.queries || column >= D_) return zero_vector<16>();
    return load_vector<16>(part_of<P>(job.in.k_pool, token, D_, column));
  }

  // Chunks `chunk` and following of 16 tokens' values.
  GPU_DEVICE void load_values(const Job& job, const Token* tokens, int first, int chunk,
                              Vector<kValueBytes> (&values)[kValuesAhead][4]) const {
    GPU_UNROLL
    for (int i = 0; i < 4; ++i) {
      const Token& token = tokens[first + lane_ % 4 * 2 + i / 2 * 8 + i % 2];
      GPU_UNROLL
      for (int c = 0; c < kValuesAhead; ++c) {
        const int column = ((chunk + c) * 8 + lane_ / 4) * kValueElements;
        values[c][i] = token.queries && column < D_
                           ? load_vector<kValueBytes>(part_of<P>(job.in.v_pool, token, D_, column))
                           : zero_vector<kValueBytes>();
      }
    }
  }

  GPU_DEVICE void score_chunk(float (&score)[kKeyTiles][4], const Vector<16> (&keys)[kKeyTiles],
                              int chunk) const {
    GPU_UNROLL
    for (int k = 0; k < kKeySteps; ++k) {
      const Vector<16> query = queries_[(chunk * kKeySteps + k) * kLanes + lane_];
      const uint32_t a[4] = {query.word[0], query.word[1], query.word[2], query.word[3]};
      GPU_UNROLL
      for (int t = 0; t < kKeyTiles; ++t) {
        uint32_t b[2];
        if (kBytes == 1) {
          b[0] = int8_pair(keys[t].word[k], false);
          b[1] = int8_pair(keys[t].word[k], true);
        } else {
          b[0] = keys[t].word[2 * k % 4];
          b[1] = keys[t].word[2 * k % 4 + 1];
        }
        gpu::mma_f16<A>(score[t], a, b, score[t]);
      }
    }
  }

  // Scores to weights, relative to the highest score (and in units of the largest scale) so far.
  GPU_DEVICE void weigh(float (&score)[kKeyTiles][4], const Token* tokens) {
    float most[2] = {-INFINITY, -INFINITY}, largest = 0;
    GPU_UNROLL
    for (int t = 0; t < kKeyTiles; ++t)
      GPU_UNROLL
      for (int i = 0; i < 4; ++i) {
        const Token& token = tokens[t * 8 + lane_ % 4 * 2 + i % 2];
        float& s = score[t][i];
        s = token.queries >> query_[i / 2] & 1 ? s * scale_ * token.k_scale : -INFINITY;
        most[i / 2] = fmaxf(most[i / 2], s);
        largest = fmaxf(largest, fabsf(token.v_scale));
      }
    if (__any_sync(kAll, most[0] > most_[0] || most[1] > most_[1] ||
                             (kBytes == 1 && largest > unit_)))
      rebase(most, largest);

    const float per_unit = __fdividef(1.f, unit_);
    GPU_UNROLL
    for (int t = 0; t < kKeyTiles; ++t)
      GPU_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float base = most_[i / 2] == -INFINITY ? 0.f : most_[i / 2];
        const float weight = exp2f(score[t][i] - base);
        sum_[i / 2] += weight;
        const Token& token = tokens[t * 8 + lane_ % 4 * 2 + i % 2];
        score[t][i] = kBytes == 1 ? weight * (token.v_scale * per_unit) : weight;
      }
  }

  // Takes over a higher score or a larger scale, and brings what was summed to the new base.
  GPU_DEVICE void rebase(float (&most)[2], float largest) {
    float shrink[2];
    GPU_UNROLL
    for (int half = 0; half < 2; ++half) {
      most[half] = fmaxf(most[half], __shfl_xor_sync(kAll, most[half], 1));
      most[half] = fmaxf(most[half], __shfl_xor_sync(kAll, most[half], 2));
      most[half] = fmaxf(most[half], most_[half]);
      shrink[half] = most[half] == most_[half] ? 1.f : exp2f(most_[half] - most[half]);
      most_[half] = most[half];
      sum_[half] *= shrink[half];
    }
    if (kBytes == 1) {
      largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 2));
      if (largest > unit_) {
        const float by = __fdividef(unit_, largest);
        shrink[0] *= by;
        shrink[1] *= by;
        unit_ = largest;
      }
    }
    GPU_UNROLL
    for (int c = 0; c < kValueChunks; ++c)
      GPU_UNROLL
      for (int j = 0; j < kValueElements; ++j)
        GPU_UNROLL
        for (int i = 0; i < 4; ++i) mixed_[c][j][i] *= shrink[i / 2];
  }

  // Adds those chunks of 16 tokens' values by their weights, which are in two tiles of the scores.
  GPU_DEVICE void mix(const float (&weight)[kKeyTiles][4], int tile, int chunk,
                      const Vector<kValueBytes> (&values)[kValuesAhead][4]) {
    uint32_t a[4];
    GPU_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float(&pair)[4] = weight[tile + i / 2];
      a[i] = bits_of(__floats2half2_rn(pair[i % 2 * 2], pair[i % 2 * 2 + 1]));
    }
    GPU_UNROLL
    for (int c = 0; c < kValuesAhead; ++c) {
      if ((chunk + c) * 8 * kValueElements >= D_) break;
      GPU_UNROLL
      for (int w = 0; w < kValueBytes / 4; ++w) {
        const uint32_t x[4] = {values[c][0].word[w], values[c][1].word[w], values[c][2].word[w],
                               values[c][3].word[w]};
        GPU_UNROLL
        for (int e = 0; e < 4 / kBytes; ++e) {
          const uint32_t b[2] = {across(x[0], x[1], e), across(x[2], x[3], e)};
          float(&sum)[4] = mixed_[chunk + c][w * (4 / kBytes) + e];
          gpu::mma_f16<A>(sum, a, b, sum);
        }
      }
    }
  }

  // Element e of two tokens' words, side by side.
  static GPU_DEVICE uint32_t across(uint32_t one, uint32_t other, int e) {
    if (kBytes == 2) return __byte_perm(one, other, e ? 0x7632u : 0x5410u);
    return int8_pair(__byte_perm(one, other, e / 2 ? 0x7362u : 0x5140u), e % 2 != 0);
  }

  int lane_, D_;
  float scale_;
  const Vector<16>* queries_;
  int query_[2];                // of this lane's rows, lane / 4 and lane / 4 + 8
  float most_[2], sum_[2];      // of those rows; the sum over this lane's tokens
  float unit_ = FLT_MIN;
  Vector<16> keys_[kKeysHeld][kKeyTiles];
  float mixed_[kValueChunks][kValueElements][4];
};

}  // namespace shared_kv_attention
}  // namespace edgepool
