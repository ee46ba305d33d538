// Attention of 16 rows (8 if D > 128) by one warp with scalar arithmetic in FP32: for FP32, and for
// architectures whose tensor cores want their operands in shared memory.
//
// Keys and values go through shared memory in chunks of up to 128 bytes of each of 32 tokens, loaded
// 16 bytes a lane. For keys a lane has a token: it forms the scores of all rows. For values a lane
// has some columns: it sums over the tokens. So each byte is loaded once for all rows.
#pragma once
#include "attended_set.cuh"
#include "vectors.cuh"

// Left alone, nvcc unrolls these loops until registers run out. clang unrolls them wholly or not.
#if !defined(GPU_COMPILED_FOR_DEVICE)
#define SHARED_KV_UNROLL(times)
#elif defined(__clang__)
#define SHARED_KV_UNROLL(times) _Pragma("unroll 1")
#else
#define SHARED_KV_UNROLL(times) _Pragma(#times)
#endif

namespace edgepool {
namespace shared_kv_attention {

constexpr float kLog2e = 1.4426950408889634f;

template <class T, class P, int DP>  // DP: D, or the next of 64, 128, 256
class Simt {
 public:
  using Activation = T;
  using Storage = P;
  static constexpr int kColumns = DP;
  static constexpr int kRows = DP > 128 ? kMostRows / 2 : kMostRows;  // as registers allow
  static constexpr int kBlocks = 2;  // on a multiprocessor, as registers allow

 private:
  static constexpr int kBytes = sizeof(P);
  static constexpr int kChunk = DP * kBytes < 128 ? DP * kBytes : 128;
  static constexpr int kChunks = DP * kBytes / kChunk;
  static constexpr int kVectors = kChunk / 16;  // of a token's chunk; also loads of a lane
  static constexpr int kTogether = kLanes / kVectors;  // tokens that the lanes load at once
  static constexpr int kPerVector = 16 / kBytes;
  static constexpr int kLaneBytes = kChunk / kLanes;
  static constexpr int kPerLane = kLaneBytes / kBytes;
  static constexpr int kStride = kChunk + 16;  // lanes that read 16 bytes of a column do not clash
  static constexpr int kWeightStride = kRows + 4;
  static constexpr int kFour = 4;  // rows that are left out together when there are no more

 public:
  static constexpr int kQueryBytes = kRows * DP * static_cast<int>(sizeof(float));
  static constexpr int kStageBytes =
      kStep * (kStride + kWeightStride * static_cast<int>(sizeof(float)));

  // Queries times scale * log2(e), so that weights are powers of two; zeros where there is none.
  static GPU_DEVICE void load_queries(const Job& job, const Tile& tile, unsigned char* shared) {
    constexpr int kWords = 4 / static_cast<int>(sizeof(T)), kElements = 4 * kWords;
    const int D = job.in.D;
    const float factor = job.in.scale * kLog2e;
    float* queries = reinterpret_cast<float*>(shared);
    const int vectors = job.plan.row_warps * kRows * DP / kElements;
    for (int i = static_cast<int>(threadIdx.x); i < vectors; i += kThreads) {
      const int row = i * kElements / DP, column = i * kElements % DP;
      Vector<16> v = zero_vector<16>();
      if (row / job.plan.group < tile.count && column < D) {
        const auto* q = static_cast<const T*>(job.in.q) + place_of_row(job, tile, row) * D;
        v = load_vector<16>(q + column);
      }
      GPU_UNROLL
      for (int w = 0; w < 4; ++w) {
        float x[kWords];
        unpack(v.word[w], x);
        GPU_UNROLL
        for (int e = 0; e < kWords; ++e) queries[i * kElements + w * kWords + e] = x[e] * factor;
      }
    }
  }

  GPU_DEVICE Simt(const Job& job, int first_row, int rows, const unsigned char* queries,
                  unsigned char* stage)
      : lane_(static_cast<int>(threadIdx.x) % kLanes),
        rows_(rows),
        first_row_(first_row),
        D_(job.in.D),
        chunks_((D_ * kBytes + kChunk - 1) / kChunk),
        queries_(reinterpret_cast<const float*>(queries)),
        stage_(stage),
        weights_(reinterpret_cast<float*>(stage + kStep * kStride)) {
    GPU_UNROLL
    for (int r = 0; r < kRows; ++r)
      GPU_UNROLL
      for (int c = 0; c < kChunks; ++c)
        GPU_UNROLL
        for (int e = 0; e < kPerLane; ++e) mixed_[r][c][e] = 0;
  }

  // Starts to load the keys of a step.
  GPU_DEVICE void issue(const Job& job, const Token* tokens) { fetch(job.in.k_pool, tokens, 0); }

  GPU_DEVICE void step(const Job& job, const Token* tokens) {
    float score[kRows];
    GPU_UNROLL
    for (int r = 0; r < kRows; ++r) score[r] = 0;
    for (int c = 0; c < chunks_; ++c) {
      stash();
      if (c + 1 < chunks_)
        fetch(job.in.k_pool, tokens, c + 1);
      else
        fetch(job.in.v_pool, tokens, 0);
      score_chunk(score, c);
    }
    weigh(job, score, tokens[lane_]);
    sum_weights(score, tokens[lane_].v_scale);
    const unsigned seen = __ballot_sync(kAll, tokens[lane_].queries != 0);
    const int count = kStep - __clz(static_cast<int>(seen));
    GPU_UNROLL
    for (int c = 0; c < kChunks; ++c)
      if (c < chunks_) {
        stash();
        if (c + 1 < chunks_) fetch(job.in.v_pool, tokens, c + 1);
        mix_chunk(c, count);
      }
  }

  // Highest score and sum of weights of each row, into sums[kRows].
  GPU_DEVICE void summarize(float2* sums) {
    float sum = sum_;
    GPU_UNROLL
    for (int other = kLanes / 2; other >= kRows; other /= 2)
      sum += __shfl_xor_sync(kAll, sum, other);
    if (lane_ < kRows) sums[lane_] = make_float2(most_, sum);
  }

  // Adds (or puts) each row's weighted values times its factor to `rows` [kRows][stride].
  GPU_DEVICE void deliver(float* rows, int stride, const float* factor, bool put) const {
    GPU_UNROLL
    for (int r = 0; r < kRows; ++r)
      GPU_UNROLL
      for (int c = 0; c < kChunks; ++c)
        GPU_UNROLL
        for (int e = 0; e < kPerLane; ++e) {
          float& sum = rows[r * stride + c * (kChunk / kBytes) + lane_ * kPerLane + e];
          const float x = mixed_[r][c][e] * factor[r];
          sum = put ? x : sum + x;
        }
  }

 private:
  // Loads this lane's part of a chunk of the step's tokens.
  GPU_DEVICE void fetch(const void* pool, const Token* tokens, int chunk) {
    const int column = (chunk * kChunk + lane_ % kVectors * 16) / kBytes;
    GPU_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      const Token& token = tokens[i * kTogether + lane_ / kVectors];
      fetched_[i] = token.queries && column < D_
                        ? load_vector<16>(part_of<P>(pool, token, D_, column))
                        : zero_vector<16>();
    }
  }

  // Puts what was fetched where all lanes read it.
  GPU_DEVICE void stash() {
    __syncwarp();
    unsigned char* mine = stage_ + lane_ / kVectors * kStride + lane_ % kVectors * 16;
    GPU_UNROLL
    for (int i = 0; i < kVectors; ++i)
      *reinterpret_cast<Vector<16>*>(mine + i * kTogether * kStride) = fetched_[i];
    __syncwarp();
  }

  GPU_DEVICE void score_chunk(float (&score)[kRows], int chunk) const {
    constexpr int kWord = 4 / kBytes;
    const int vectors = min(kVectors, (D_ * kBytes - chunk * kChunk) / 16);
    SHARED_KV_UNROLL(unroll 1)
    for (int i = 0; i < vectors; ++i) {
      const auto key = *reinterpret_cast<const Vector<16>*>(stage_ + lane_ * kStride + i * 16);
      const float* query = queries_ + (chunk * kChunk + i * 16) / kBytes;
      float x[4][kWord];
      GPU_UNROLL
      for (int w = 0; w < 4; ++w) unpack(key.word[w], x[w]);
      GPU_UNROLL
      for (int four = 0; four < kRows; four += kFour) {
        if (four >= rows_) break;
        GPU_UNROLL
        for (int r = four; r < four + kFour; ++r)
          GPU_UNROLL
          for (int e = 0; e < kPerVector; e += 4) {
            const float4 q = *reinterpret_cast<const float4*>(query + r * DP + e);
            score[r] += q.x * x[e / kWord][e % kWord] + q.y * x[(e + 1) / kWord][(e + 1) % kWord] +
                        q.z * x[(e + 2) / kWord][(e + 2) % kWord] +
                        q.w * x[(e + 3) / kWord][(e + 3) % kWord];
          }
      }
    }
  }

  // Scores of this lane's token to weights, relative to each row's highest score so far.
  GPU_DEVICE void weigh(const Job& job, float (&score)[kRows], const Token& token) {
    int query = first_row_ / job.plan.group, head = first_row_ % job.plan.group;
    GPU_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if (r / kFour * kFour >= rows_) break;
      const float s = token.queries >> query & 1 ? score[r] * token.k_scale : -INFINITY;
      if (++head == job.plan.group) head = 0, ++query;
      float most = __shfl_sync(kAll, most_, r);
      if (__any_sync(kAll, s > most)) {
        const float before = most;
        most = fmaxf(most, s);
        GPU_UNROLL
        for (int other = kLanes / 2; other; other /= 2)
          most = fmaxf(most, __shfl_xor_sync(kAll, most, other));
        const float shrink = exp2f(before - most);
        if (lane_ % kRows == r) most_ = most, sum_ *= shrink;
        GPU_UNROLL
        for (int c = 0; c < kChunks; ++c)
          GPU_UNROLL
          for (int e = 0; e < kPerLane; ++e) mixed_[r][c][e] *= shrink;
      }
      score[r] = exp2f(s - (most == -INFINITY ? 0.f : most));
    }
  }

  // Adds the weights up, and leaves them, times the values' scales, where all lanes read them.
  GPU_DEVICE void sum_weights(const float (&weight)[kRows], float v_scale) {
    float* mine = weights_ + lane_ * kWeightStride;
    GPU_UNROLL
    for (int r = 0; r < kRows; ++r) mine[r] = weight[r];
    __syncwarp();
    for (int t = lane_ / kRows; t < kStep; t += kLanes / kRows)
      sum_ += weights_[t * kWeightStride + lane_ % kRows];
    if (kBytes != 1) return;
    __syncwarp();
    GPU_UNROLL
    for (int r = 0; r < kRows; ++r) mine[r] = weight[r] * v_scale;
  }

  GPU_DEVICE void mix_chunk(int chunk, int count) {
    SHARED_KV_UNROLL(unroll 2)
    for (int t = 0; t < count; ++t) {
      float x[4 / kBytes];
      const unsigned char* at = stage_ + t * kStride + lane_ * kLaneBytes;
      unpack(kLaneBytes == 4 ? *reinterpret_cast<const uint32_t*>(at)
                             : *reinterpret_cast<const uint16_t*>(at),
             x);
      GPU_UNROLL
      for (int four = 0; four < kRows; four += kFour) {
        if (four >= rows_) break;
        const float4 weight = *reinterpret_cast<const float4*>(weights_ + t * kWeightStride + four);
        GPU_UNROLL
        for (int e = 0; e < kPerLane; ++e) {
          mixed_[four][chunk][e] += weight.x * x[e];
          mixed_[four + 1][chunk][e] += weight.y * x[e];
          mixed_[four + 2][chunk][e] += weight.z * x[e];
          mixed_[four + 3][chunk][e] += weight.w * x[e];
        }
      }
    }
  }

  int lane_, rows_, first_row_, D_, chunks_;
  const float* queries_;   // [kRows][DP]
  unsigned char* stage_;   // [kStep][kStride]
  float* weights_;         // [kStep][kWeightStride]
  Vector<16> fetched_[kVectors];
  float most_ = -INFINITY;  // of row lane % kRows
  float sum_ = 0;           // of that row's weights, of some of the tokens
  float mixed_[kRows][kChunks][kPerLane];
};

}  // namespace shared_kv_attention
}  // namespace edgepool
