// Attention over paged keys and values: `attend`, one or two kernels. kernel.cuh says what it costs.
#pragma once
#include "simt.cuh"
#include "tensor.cuh"

namespace edgepool {
namespace shared_kv_attention {

// Shared memory of a block: the warps' tokens, each row's result, then the engine's queries and
// staging, whose place the sum over the warps takes in the end.
template <class Engine>
struct Layout {
  static constexpr int kStride = Engine::kColumns + 4;  // of the sums' rows
  static constexpr int kTokens = 0;
  static constexpr int kSums = kTokens + kWarps * kStep * static_cast<int>(sizeof(Token));
  static constexpr int kFactors = kSums + kWarps * Engine::kRows * static_cast<int>(sizeof(float2));
  static constexpr int kQueries = kFactors + kWarps * Engine::kRows * static_cast<int>(sizeof(float));

  static constexpr GPU_DEVICE int stage(int row_warps) {
    return kQueries + row_warps * Engine::kQueryBytes;
  }
  static int bytes(int row_warps) {
    const int working = row_warps * Engine::kQueryBytes + kWarps * Engine::kStageBytes;
    const int merging = row_warps * Engine::kRows * kStride * static_cast<int>(sizeof(float));
    return kQueries + std::max(working, merging);
  }
};

// Partial results in the workspace, if there is more than one split: for each of the rows
// [B, S, H, splits] D values, and after all of them the highest score and the sum of weights.
struct Partials {
  float* values;
  float2* sums;
};
GPU_DEVICE Partials partials(const Job& job) {
  const ReadParams& in = job.in;
  auto* values = static_cast<float*>(job.in.workspace);
  const int64_t rows = int64_t{in.B} * in.S * in.H * job.plan.splits;
  return {values, reinterpret_cast<float2*>(values + rows * in.D)};
}

// Four or eight values of a row of the output.
template <class T>
GPU_DEVICE void store_values(T* to, const float* values, float factor) {
  constexpr int kElements = 16 / static_cast<int>(sizeof(T));
  struct alignas(16) {
    T element[kElements];
  } packed;
  GPU_UNROLL
  for (int e = 0; e < kElements; ++e) packed.element[e] = from_float<T>(values[e] * factor);
  gpu::store(reinterpret_cast<uint4*>(to), *reinterpret_cast<const uint4*>(&packed));
}

// Writes the block's rows: the output, or this split's part. `rows` is in shared memory, or null if
// all queries are padding; sums[row] is the highest score and the sum of weights.
template <class Engine>
GPU_DEVICE void write_rows(const Job& job, const Tile& tile, const float* rows,
                           const float2* sums) {
  using T = typename Engine::Activation;
  constexpr int kElements = 16 / static_cast<int>(sizeof(T)), kStride = Layout<Engine>::kStride;
  const ReadParams& in = job.in;
  const int group = job.plan.group, vectors = in.D / kElements;
  const int queries = min(job.plan.queries, in.S - tile.query);
  for (int i = static_cast<int>(threadIdx.x); i < queries * group * vectors; i += kThreads) {
    const int row = i / vectors, column = i % vectors * kElements;
    const int query = row / group;
    const int64_t at = place_of_row(job, tile, row);
    const bool seen = query < tile.count && sums[row].y != 0;
    if (job.plan.splits == 1) {
      T* to = static_cast<T*>(job.in.out) + at * in.D + column;
      if (seen)
        store_values(to, rows + row * kStride + column, 1.f / sums[row].y);
      else
        gpu::store(reinterpret_cast<uint4*>(to), make_uint4(0, 0, 0, 0));
    } else if (query < tile.count) {
      const Partials part = partials(job);
      const int64_t place = at * job.plan.splits + static_cast<int>(blockIdx.x) % job.plan.splits;
      if (column == 0) gpu::store(part.sums + place, sums[row]);
      if (seen)
        GPU_UNROLL
        for (int e = 0; e < kElements; e += 4)
          store_values(part.values + place * in.D + column + e, rows + row * kStride + column + e,
                       1.f);
    }
  }
}

template <class Engine, class Attended>
__global__ void __launch_bounds__(kThreads, Engine::kBlocks) attend_tile(const Job job) {
  using Place = Layout<Engine>;
  constexpr int kRows = Engine::kRows;
  GPU_DYNAMIC_SHARED(unsigned char, shared);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const int row_warp = warp % job.plan.row_warps, way = warp / job.plan.row_warps;
  const int ways = kWarps / job.plan.row_warps;
  auto* sums = reinterpret_cast<float2*>(shared + Place::kSums);
  auto* merged = reinterpret_cast<float*>(shared + Place::kQueries);

  const Tile tile =
      tile_at(job, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y),
              static_cast<int>(blockIdx.x) / job.plan.splits * job.plan.queries);
  if (tile.count == 0) return write_rows<Engine>(job, tile, nullptr, nullptr);
  unsigned char* queries = shared + Place::kQueries;
  Engine::load_queries(job, tile, queries);
  __syncthreads();

  const int first_row = row_warp * kRows;
  const int rows = clamp(tile.count * job.plan.group - first_row, 0, kRows);
  Engine engine(job, first_row, rows, queries + row_warp * Engine::kQueryBytes,
                shared + Place::stage(job.plan.row_warps) + warp * Engine::kStageBytes);
  if (rows > 0) {
    auto* tokens = reinterpret_cast<Token*>(shared + Place::kTokens) + warp * kStep;
    Attended attended(job, tile, way, ways);
    Token token;
    bool more = attended.next(job, tile, token);
    while (more) {
      const bool seen = __any_sync(kAll, token.queries != 0);
      tokens[lane] = token;
      __syncwarp();
      // Where the next step's tokens are is looked up while this step's keys are on their way.
      if (seen) engine.issue(job, tokens);
      more = attended.next(job, tile, token);
      if (seen) engine.step(job, tokens);
      __syncwarp();
    }
  }
  engine.summarize(sums + warp * kRows);
  __syncthreads();

  // The warps of the same rows bring their results to one base and add them up in turn.
  auto* factors = reinterpret_cast<float*>(shared + Place::kFactors);
  float highest = -INFINITY, sum = 0;
  if (lane < kRows) {
    for (int w = 0; w < ways; ++w)
      highest = fmaxf(highest, sums[(w * job.plan.row_warps + row_warp) * kRows + lane].x);
    const float base = highest == -INFINITY ? 0.f : highest;
    factors[warp * kRows + lane] = exp2f(sums[warp * kRows + lane].x - base);
    for (int w = 0; w < ways; ++w) {
      const float2 of = sums[(w * job.plan.row_warps + row_warp) * kRows + lane];
      sum += of.y * exp2f(of.x - base);
    }
  }
  for (int w = 0; w < ways; ++w) {
    __syncthreads();
    if (w == way)
      engine.deliver(merged + row_warp * kRows * Place::kStride, Place::kStride,
                     factors + warp * kRows, w == 0);
    if (w == 0 && way == 0 && lane < kRows)
      sums[row_warp * kRows + lane] = make_float2(highest, sum);
  }
  __syncthreads();
  write_rows<Engine>(job, tile, merged, sums);
}

// Merges the splits of one row (blockIdx.x of [B, S, H]); its warps take turns at them.
template <class T>
__global__ void __launch_bounds__(kThreads) combine_splits(const Job job) {
  GPU_DYNAMIC_SHARED(unsigned char, shared);
  const ReadParams& in = job.in;
  auto* sums = reinterpret_cast<float2*>(shared);      // [splits]
  auto* mixed = reinterpret_cast<float*>(sums + job.plan.splits + job.plan.splits % 2);  // [kWarps][D]
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t row = blockIdx.x;
  const Tile tile = tile_at(job, static_cast<int>(row / (int64_t{in.S} * in.H)), 0,
                            static_cast<int>(row / in.H % in.S));
  const Partials part = partials(job);
  const int splits = tile.count ? job.plan.splits : 0;
  for (int i = thread; i < splits; i += kThreads)
    sums[i] = gpu::load(part.sums + row * splits + i);
  __syncthreads();

  float highest = -INFINITY, total = 0;
  for (int i = 0; i < splits; ++i) highest = fmaxf(highest, sums[i].x);
  const float base = highest == -INFINITY ? 0.f : highest;
  for (int i = 0; i < splits; ++i) total += sums[i].y * exp2f(sums[i].x - base);
  for (int column = thread % kLanes * 4; column < in.D; column += kLanes * 4) {
    float4 sum = make_float4(0, 0, 0, 0);
    for (int i = thread / kLanes; i < splits; i += kWarps) {
      if (sums[i].y == 0) continue;
      const float by = exp2f(sums[i].x - base);
      const auto v = gpu::load(
          reinterpret_cast<const float4*>(part.values + (row * splits + i) * in.D + column));
      sum.x += v.x * by, sum.y += v.y * by, sum.z += v.z * by, sum.w += v.w * by;
    }
    *reinterpret_cast<float4*>(mixed + thread / kLanes * in.D + column) = sum;
  }
  __syncthreads();

  constexpr int kElements = 16 / static_cast<int>(sizeof(T));
  const int column = thread * kElements;
  if (column >= in.D) return;
  float values[kElements];
  GPU_UNROLL
  for (int e = 0; e < kElements; ++e) {
    values[e] = 0;
    for (int w = 0; w < kWarps; ++w) values[e] += mixed[w * in.D + column + e];
  }
  store_values(static_cast<T*>(job.in.out) + row * in.D + column, values,
               total != 0 ? 1.f / total : 0.f);
}

template <class Engine, class Attended>
cudaError_t launch_tiles(Job job) {
  constexpr int kWithoutAsking = 48 << 10;
  const int rows = job.plan.queries * job.plan.group;
  job.plan.row_warps = rows <= Engine::kRows ? 1 : rows <= 2 * Engine::kRows ? 2 : 4;
  const int bytes = Layout<Engine>::bytes(job.plan.row_warps);
  const auto kernel = attend_tile<Engine, Attended>;
  if (bytes > kWithoutAsking) {
    const cudaError_t error = cudaFuncSetAttribute(
        reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
  }
  const dim3 grid(static_cast<unsigned>(job.plan.tiles * job.plan.splits),
                  static_cast<unsigned>(job.in.Hkv), static_cast<unsigned>(job.in.B));
  return gpu::launch(kernel, grid, kThreads, static_cast<size_t>(bytes), job.in.stream, job);
}

template <class A, class T, class P, int DP>
struct EngineOf {
  using Type = Simt<T, P, DP>;
};
template <class P, int DP>
struct EngineOf<gpu::Arch<80>, __half, P, DP> {
  using Type = Tensor<gpu::Arch<80>, P, DP>;
};

template <class A, class T, class P, int DP>
cudaError_t launch_attention(const Job& job) {
  using Engine = typename EngineOf<A, T, P, DP>::Type;
  const cudaError_t error = job.plan.streamed ? launch_tiles<Engine, Streamed<P>>(job)
                                            : launch_tiles<Engine, Counted<P>>(job);
  if (error != cudaSuccess || job.plan.splits == 1) return error;
  const ReadParams& in = job.in;
  const int floats = 2 * (job.plan.splits + job.plan.splits % 2) + kWarps * in.D;
  return gpu::launch(combine_splits<T>, dim3(static_cast<unsigned>(in.B * in.S * in.H)), kThreads,
                     static_cast<size_t>(floats) * sizeof(float), job.in.stream, job);
}

inline Job job_of(const ReadParams& in) {
  Job job{in, plan(in)};
  // No more than the context, so that positions plus these are positions.
  job.in.window = std::min(in.window, in.MP * in.T);
  job.in.sinks = std::min(in.sinks, in.MP * in.T);
  return job;
}

template <class A, class T, class P>
cudaError_t launch_typed(const ReadParams& in) {
  const Job job = job_of(in);
  if (in.D <= 64) return launch_attention<A, T, P, 64>(job);
  if (in.D <= 128) return launch_attention<A, T, P, 128>(job);
  return launch_attention<A, T, P, 256>(job);
}

template <class A>
cudaError_t attend(const ReadParams& in) {
  if (problem(in)) return cudaErrorInvalidValue;
  if (in.B == 0 || in.S == 0) return cudaSuccess;
  const bool codes = in.storage == Type::s8;
  if (in.activation == Type::f32)
    return codes ? launch_typed<A, float, int8_t>(in) : launch_typed<A, float, float>(in);
  return codes ? launch_typed<A, half, int8_t>(in) : launch_typed<A, half, half>(in);
}

}  // namespace shared_kv_attention
}  // namespace edgepool
