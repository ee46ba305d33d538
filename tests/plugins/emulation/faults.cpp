// Kernels with one fault each. `faults SM NAME...` runs those on that device and prints what was
// found; the line that must be named carries the comment "FAULT: NAME". Alone, it lists the names.
#include <cstdlib>
#include <functional>
#include <map>
#include <string>

#include "check.hpp"
#include "common/portable.cuh"

namespace {

using gpu::load;
using gpu::store;
using A80 = gpu::Arch<80>;
constexpr unsigned kAll = ~0u;

int lane() { return threadIdx.x % 32; }

// ---- barriers ----
__global__ void partial_barrier(int*) {
  if (threadIdx.x < 40) __syncthreads();  // FAULT: partial_barrier
}
__global__ void two_barriers(int*) {
  if (threadIdx.x < 32)
    __syncthreads();  // FAULT: two_barriers
  else
    __syncthreads();
}
__global__ void lost_warp(int*) {
  if (threadIdx.x < 32) gpu::barrier_sync(1, 64);  // FAULT: lost_warp
}
__global__ void barrier_counts(int*) {
  if (threadIdx.x < 32)
    gpu::barrier_arrive(1, 64);
  else
    gpu::barrier_sync(1, 96);  // FAULT: barrier_counts
}
__global__ void unmet_arrival(int*) {
  if (threadIdx.x < 32) gpu::barrier_arrive(1, 64);  // FAULT: unmet_arrival
}
__global__ void barrier_zero(int*) {
  gpu::barrier_sync(0, 64);  // FAULT: barrier_zero
}
__global__ void crossed_waits(int* out) {
  if (lane() < 16)
    store(out + lane(), __shfl_sync(kAll, lane(), 0));  // FAULT: crossed_waits
  else
    __syncthreads();
}

// ---- masks ----
__global__ void not_in_mask(int* out) {
  store(out + lane(), __shfl_sync(0xffff0000u, lane(), 16));  // FAULT: not_in_mask
}
__global__ void masks_disagree(int* out) {
  const unsigned mask = lane() < 16 ? kAll : 0xffff0001u;
  store(out + lane(), static_cast<int>(__ballot_sync(mask, 1)));  // FAULT: masks_disagree
}
__global__ void source_not_in_mask(int* out) {
  if (lane() < 16)
    store(out + lane(), __shfl_down_sync(0xffffu, lane(), 1));  // FAULT: source_not_in_mask
}
__global__ void source_has_exited(int* out) {
  if (lane() >= 24) return;
  store(out + lane(), __shfl_xor_sync(kAll, lane(), 16));  // FAULT: source_has_exited
}
__global__ void two_collectives(int* out) {
  int v;
  if (lane() < 16)
    v = __shfl_sync(kAll, lane(), 0);  // FAULT: two_collectives
  else
    v = __any_sync(kAll, 1);
  store(out + lane(), v);
}
__global__ void matrix_without_lanes(int*) {
  if (lane() == 31) return;
  float d[4] = {};
  const uint32_t a[4] = {}, b[2] = {};
  gpu::mma_f16<A80>(d, a, b, d);  // FAULT: matrix_without_lanes
}
__global__ void wmma_without_lanes(int* out) {
  using namespace nvcuda::wmma;
  if (lane() == 31) return;
  fragment<accumulator, 16, 16, 16, int> f;
  fill_fragment(f, 0);
  store_matrix_sync(out, f, 16, mem_row_major);  // FAULT: wmma_without_lanes
}

// ---- alignment ----
__global__ void misaligned_load(int* out) {
  store(out, load(reinterpret_cast<const int4*>(out + 1)).x);  // FAULT: misaligned_load
}
__global__ void misaligned_store(int* out) {
  store(reinterpret_cast<int2*>(out + 1), int2{1, 2});  // FAULT: misaligned_store
}
__global__ void misaligned_vector(int* out) {
  __shared__ __align__(16) float s[64];
  s[threadIdx.x] = 1;
  __syncthreads();
  const float4 v = *reinterpret_cast<const float4*>(s + 1);  // FAULT: misaligned_vector
  store(out + threadIdx.x, static_cast<int>(v.x + v.y + v.z + v.w));
}
__global__ void misaligned_row(int* out) {
  __shared__ __align__(16) half s[8 * 9];
  for (int i = lane(); i < 72; i += 32) s[i] = half(1.f);
  __syncwarp();
  uint32_t r;
  gpu::ldmatrix_x1<A80>(r, s + lane() % 8 * 9);  // FAULT: misaligned_row
  store(out + lane(), static_cast<int>(r));
}
__global__ void misaligned_copy(int* out) {
  __shared__ __align__(16) int s[8];
  gpu::cp_async<A80>(s, out + 1);  // FAULT: misaligned_copy
}
__global__ void misaligned_tile(int* out) {
  using namespace nvcuda::wmma;
  fragment<matrix_a, 16, 16, 16, half, row_major> f;
  load_matrix_sync(f, reinterpret_cast<const half*>(out) + 8, 16);  // FAULT: misaligned_tile
}
__global__ void misaligned_stride(int* out) {
  using namespace nvcuda::wmma;
  fragment<matrix_a, 16, 16, 16, half, row_major> f;
  load_matrix_sync(f, reinterpret_cast<const half*>(out), 17);  // FAULT: misaligned_stride
}

// ---- instructions that an older device lacks ----
__global__ void new_copy(int* out) {
  __shared__ __align__(16) int s[4];
  gpu::cp_async<A80>(s, out);  // FAULT: new_copy
}
__global__ void new_ldmatrix(int* out) {
  __shared__ __align__(16) half s[64];
  s[lane()] = s[lane() + 32] = half(0.f);
  __syncwarp();
  uint32_t r;
  gpu::ldmatrix_x1<A80>(r, s + lane() % 8 * 8);  // FAULT: new_ldmatrix
  store(out + lane(), static_cast<int>(r));
}
__global__ void new_mma(int*) {
  float d[4] = {};
  const uint32_t a[4] = {}, b[2] = {};
  gpu::mma_f16<A80>(d, a, b, d);  // FAULT: new_mma
}
__global__ void new_mma_int8(int*) {
  int d[4] = {};
  const uint32_t a[4] = {}, b[2] = {};
  gpu::mma_s8<A80>(d, a, b, d);  // FAULT: new_mma_int8
}
__global__ void new_reduce(int* out) {
  store(out + lane(), __reduce_add_sync(kAll, lane()));  // FAULT: new_reduce
}
__global__ void gives_up(int*) {
  if (threadIdx.x == 3) __trap();  // FAULT: gives_up
}

// ---- races ----
__global__ void missing_barrier(int* out) {
  __shared__ int s[64];
  s[threadIdx.x] = threadIdx.x;
  store(out + threadIdx.x, s[63 - threadIdx.x]);  // FAULT: missing_barrier
}
__global__ void missing_second_barrier(int* out) {
  __shared__ int s[64];
  int sum = 0;
  for (int i = 0; i < 3; ++i) {
    s[threadIdx.x] = i;  // FAULT: missing_second_barrier
    __syncthreads();
    sum += s[63 - threadIdx.x];
  }
  store(out + threadIdx.x, sum);
}
__global__ void missing_syncwarp(int* out) {
  __shared__ int s[64];
  s[threadIdx.x] = threadIdx.x;
  store(out + threadIdx.x, s[threadIdx.x ^ 1]);  // FAULT: missing_syncwarp
}
__global__ void shuffle_is_no_barrier(int* out) {
  __shared__ int s[32];
  s[lane()] = __shfl_xor_sync(kAll, lane(), 1);
  __shfl_sync(kAll, lane(), 0);
  store(out + lane(), s[31 - lane()]);  // FAULT: shuffle_is_no_barrier
}
__global__ void syncwarp_is_no_block_barrier(int* out) {
  __shared__ int s[64];
  s[threadIdx.x] = threadIdx.x;
  __syncwarp();
  store(out + threadIdx.x, s[threadIdx.x ^ 32]);  // FAULT: syncwarp_is_no_block_barrier
}
__global__ void overfull_buffer(int* out) {
  __shared__ int buffer[64];
  if (threadIdx.x < 32) {
    for (int r = 0; r < 3; ++r) {
      buffer[lane()] = r;  // FAULT: overfull_buffer
      gpu::barrier_arrive(1, 64);
      gpu::barrier_sync(2, 64);
    }
  } else {
    for (int r = 0; r < 3; ++r) {
      gpu::barrier_sync(1, 64);
      gpu::barrier_arrive(2, 64);  // too early: the buffer is read after it is given back
      store(out + r * 32 + lane(), buffer[lane()]);
    }
  }
}
__global__ void blocks_collide(int* out) {
  store(out + threadIdx.x, static_cast<int>(blockIdx.x));  // FAULT: blocks_collide
}
__global__ void read_by_another_block(int* out) {
  const int v = load(out + threadIdx.x);
  if (blockIdx.x == 1) store(out + threadIdx.x, v + 1);  // FAULT: read_by_another_block
}
template <bool Fence, bool Barrier>
GPU_DEVICE int last_block(int* part, int* done, int mine) {
  __shared__ bool last;
  store(part + blockIdx.x * 64 + threadIdx.x, mine);
  if (Barrier) __syncthreads();
  if (threadIdx.x == 0) {
    if (Fence) __threadfence();
    last = atomicAdd(done, 1) == static_cast<int>(gridDim.x) - 1;
  }
  __syncthreads();
  return last;
}
__global__ void missing_fence(int* out) {
  if (!last_block<false, true>(out, out + 256, 1)) return;
  int v = 0;
  for (int b = 0; b < 4; ++b) v += load(out + b * 64 + threadIdx.x);  // FAULT: missing_fence
  store(out + 300 + threadIdx.x, v);
}
__global__ void counted_too_early(int* out) {
  if (!last_block<true, false>(out, out + 256, 1)) return;
  int v = 0;
  for (int b = 0; b < 4; ++b)
    v += load(out + b * 64 + 63 - threadIdx.x);  // FAULT: counted_too_early
  store(out + 300 + threadIdx.x, v);
}
__global__ void counted_in_time(int* out) {  // no fault
  if (!last_block<true, true>(out, out + 256, 1)) return;
  int v = 0;
  for (int b = 0; b < 4; ++b) v += load(out + b * 64 + 63 - threadIdx.x);
  store(out + 300 + threadIdx.x, v);
}
__global__ void plain_and_atomic(int* out) {
  __shared__ int count;
  if (threadIdx.x == 0) count = 0;
  atomicAdd(&count, 1);  // FAULT: plain_and_atomic
  __syncthreads();
  if (threadIdx.x == 0) store(out, count);
}

// ---- asynchronous copies ----
__global__ void missing_wait(int* out) {
  __shared__ __align__(16) int s[64][4];
  gpu::cp_async<A80>(s[threadIdx.x], out + threadIdx.x * 4);
  gpu::cp_async_commit<A80>();
  __syncthreads();
  const int v = s[threadIdx.x][0];  // FAULT: missing_wait
  __syncthreads();
  store(out + threadIdx.x, v + 1);
}
__global__ void wait_without_barrier(int* out) {
  __shared__ __align__(16) int s[64][4];
  gpu::cp_async<A80>(s[threadIdx.x], out + threadIdx.x * 4);
  gpu::cp_async_commit<A80>();
  gpu::cp_async_wait<A80>();
  const int v = s[63 - threadIdx.x][0];  // FAULT: wait_without_barrier
  __syncthreads();
  store(out + threadIdx.x, v);
}
__global__ void copy_over_readers(int* out) {
  __shared__ __align__(16) int s[64][4];
  for (int i = 0; i < 4; ++i) s[threadIdx.x][i] = i;
  __syncthreads();
  const int v = s[63 - threadIdx.x][0];
  gpu::cp_async<A80>(s[threadIdx.x], out + 256 + threadIdx.x * 4);  // FAULT: copy_over_readers
  gpu::cp_async_commit<A80>();
  gpu::cp_async_wait<A80>();
  store(out + threadIdx.x, v);
}
__global__ void copy_to_global(int* out) {
  gpu::cp_async<A80>(out + threadIdx.x * 4, out + 256 + threadIdx.x * 4);  // FAULT: copy_to_global
}
__global__ void copy_beyond_the_end(int* out) {
  __shared__ __align__(16) int s[64][4];
  gpu::cp_async<A80>(s[threadIdx.x], out + 1024);  // FAULT: copy_beyond_the_end
}

// ---- memory that was not written, or is not there ----
template <int N>
__global__ void unwritten_shared(int* out) {
  __shared__ int s[N];
  if (threadIdx.x < 32) s[threadIdx.x] = 1;
  __syncthreads();
  store(out + threadIdx.x, s[threadIdx.x]);  // FAULT: unwritten_shared
}
__global__ void unwritten_dynamic(int* out) {
  GPU_DYNAMIC_SHARED(int, s);
  store(out + threadIdx.x, s[threadIdx.x]);  // FAULT: unwritten_dynamic
}
__global__ void left_by_another_block(int* out) {
  __shared__ int s[64];
  if (blockIdx.x == 0) s[threadIdx.x] = 1;
  __syncthreads();
  store(out + blockIdx.x * 64 + threadIdx.x, s[threadIdx.x]);  // FAULT: left_by_another_block
}
__global__ void unwritten_workspace(int* out, const int* workspace) {
  store(out + threadIdx.x, load(workspace + threadIdx.x));  // FAULT: unwritten_workspace
}
__global__ void beyond_the_end(int* out) {
  store(out + 1024, 1);  // FAULT: beyond_the_end
}
__global__ void beyond_dynamic(int* out) {
  GPU_DYNAMIC_SHARED(int, s);
  s[threadIdx.x + 1] = 1;  // FAULT: beyond_dynamic
  __syncthreads();
  store(out + threadIdx.x, s[1]);
}
__global__ void beyond_static(int* out) {
  __shared__ int s[64];
  s[threadIdx.x + 1] = 1;  // FAULT: beyond_static
  __syncthreads();
  store(out + threadIdx.x, s[1]);
}
__global__ void given_back(int* out, const int* gone) {
  store(out + threadIdx.x, load(gone + threadIdx.x));  // FAULT: given_back
}
__global__ void uncounted(int* out) {
  out[threadIdx.x] = 1;  // FAULT: uncounted
}

}  // namespace

int main(int argc, char** argv) {
  DeviceArray<int> out(1024, 0);
  int *workspace, *gone;
  cudaMalloc(reinterpret_cast<void**>(&workspace), 1024);
  cudaMalloc(reinterpret_cast<void**>(&gone), 1024);
  cudaFree(gone);

  // Kernels of one warp, of two warps, and those with a launch of their own.
  std::map<std::string, std::function<cudaError_t()>> launches;
  const auto plain = [&](const char* name, void (*kernel)(int*), int threads) {
    launches[name] = [&out, kernel, threads] {
      return gpu::launch(kernel, 1, threads, 0, nullptr, out);
    };
  };
#define ONE_WARP(kernel) plain(#kernel, kernel, 32)
#define TWO_WARPS(kernel) plain(#kernel, kernel, 64)
  TWO_WARPS(partial_barrier);
  TWO_WARPS(two_barriers);
  TWO_WARPS(lost_warp);
  plain("barrier_counts", barrier_counts, 96);
  TWO_WARPS(unmet_arrival);
  TWO_WARPS(barrier_zero);
  ONE_WARP(crossed_waits);
  ONE_WARP(not_in_mask);
  ONE_WARP(masks_disagree);
  ONE_WARP(source_not_in_mask);
  ONE_WARP(source_has_exited);
  ONE_WARP(two_collectives);
  ONE_WARP(matrix_without_lanes);
  ONE_WARP(wmma_without_lanes);
  ONE_WARP(misaligned_load);
  ONE_WARP(misaligned_store);
  TWO_WARPS(misaligned_vector);
  ONE_WARP(misaligned_row);
  ONE_WARP(misaligned_copy);
  ONE_WARP(misaligned_tile);
  ONE_WARP(misaligned_stride);
  plain("new_copy", new_copy, 1);
  ONE_WARP(new_ldmatrix);
  ONE_WARP(new_mma);
  ONE_WARP(new_mma_int8);
  ONE_WARP(new_reduce);
  ONE_WARP(gives_up);
  TWO_WARPS(missing_barrier);
  TWO_WARPS(missing_second_barrier);
  TWO_WARPS(missing_syncwarp);
  ONE_WARP(shuffle_is_no_barrier);
  TWO_WARPS(syncwarp_is_no_block_barrier);
  TWO_WARPS(overfull_buffer);
  TWO_WARPS(plain_and_atomic);
  TWO_WARPS(missing_wait);
  TWO_WARPS(wait_without_barrier);
  TWO_WARPS(copy_over_readers);
  TWO_WARPS(copy_to_global);
  ONE_WARP(copy_beyond_the_end);
  plain("unwritten_shared", unwritten_shared<64>, 64);
  ONE_WARP(beyond_the_end);
  TWO_WARPS(beyond_static);
  ONE_WARP(uncounted);
  const auto several = [&](const char* name, void (*kernel)(int*), int blocks, size_t shared) {
    launches[name] = [&out, kernel, blocks, shared] {
      return gpu::launch(kernel, blocks, 64, shared, nullptr, out);
    };
  };
  several("blocks_collide", blocks_collide, 2, 0);
  several("read_by_another_block", read_by_another_block, 2, 0);
  several("missing_fence", missing_fence, 4, 0);
  several("counted_too_early", counted_too_early, 4, 0);
  several("counted_in_time", counted_in_time, 4, 0);
  several("left_by_another_block", left_by_another_block, 2, 0);
  several("unwritten_dynamic", unwritten_dynamic, 1, 256);
  several("beyond_dynamic", beyond_dynamic, 1, 256);
  launches["unwritten_workspace"] = [&] {
    return gpu::launch(unwritten_workspace, 1, 32, 0, nullptr, out, workspace);
  };
  launches["given_back"] = [&] { return gpu::launch(given_back, 1, 32, 0, nullptr, out, gone); };

  if (argc == 1)
    for (const auto& launch : launches) std::printf("%s\n", launch.first.c_str());
  if (argc > 1 && emulation_set_architecture(std::atoi(argv[1]))) return 2;
  for (int i = 2; i < argc; ++i) {
    emulation_reset();
    cudaMemset(out, 0, 4096);
    const cudaError_t result = launches.at(argv[i])();
    std::printf("== %s: %s\n", argv[i], cudaGetErrorName(result));
    for (int f = 0; f < emulation_fault_count(); ++f) std::printf("%s\n", emulation_fault(f));
    std::fflush(stdout);
  }
  cudaFree(workspace);
  return 0;
}
