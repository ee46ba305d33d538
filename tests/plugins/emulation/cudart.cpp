// The libcudart stand-in and control.h: errors, memory, streams, graphs, devices, counters.
#include <thread>

#include "check.hpp"
#include "kernels.cuh"

namespace {

__global__ void add_one(int* p) { store(p + threadIdx.x, load(p + threadIdx.x) + 1); }
__global__ void fail_in_block(int*, unsigned block) {
  if (blockIdx.x == block) __trap();
}
__global__ void dynamic_bytes(unsigned char* out, int bytes) {
  GPU_DYNAMIC_SHARED(unsigned char, s);
  s[bytes - 1] = 9;
  store(out, s[bytes - 1]);
}
__global__ void touch_far(signed char* p, size_t stride) {
  store(p + threadIdx.x * stride, static_cast<signed char>(threadIdx.x + 1));
}
__global__ void copy_vectors(const int4* in, int4* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) store(out + i, gpu::load_streaming(in + i));
}
__global__ void mark_blocks(int* out) {
  if (threadIdx.x == 0) store(out + blockIdx.x, 1);
}
__global__ void block_order(int* next, int* out) {
  if (threadIdx.x == 0) store(out + atomicAdd(next, 1), static_cast<int>(blockIdx.x));
}

using Ints = std::vector<int>;

void test_launch_errors() {
  DeviceArray<int> p(2048, 0);
  CHECK(gpu::launch(add_one, 1, 2048, 0, nullptr, p) == cudaErrorInvalidConfiguration);
  CHECK(gpu::launch(add_one, 0, 32, 0, nullptr, p) == cudaErrorInvalidConfiguration);
  CHECK(gpu::launch(add_one, dim3(1, 70000), 32, 0, nullptr, p) == cudaErrorInvalidConfiguration);
  CHECK(cudaPeekAtLastError() == cudaErrorInvalidConfiguration);
  CHECK(cudaGetLastError() == cudaErrorInvalidConfiguration);
  CHECK(cudaGetLastError() == cudaSuccess);
  CHECK(p.host() == Ints(2048, 0));

  emulation_reset();
  CHECK(gpu::launch(fail_in_block, 4, 1, 0, nullptr, p, 2u) == cudaErrorLaunchFailure);
  CHECK(emulation_fault_count() == 1);
  CHECK(std::strstr(emulation_fault(0), "fail_in_block, block (2,0,0)"));
  CHECK(emulation_fault(1)[0] == 0);
  // A fault leaves nothing behind: the next launch is clean.
  CHECK(gpu::launch(add_one, 1, 32, 0, nullptr, p) == cudaSuccess);
  emulation_reset();
  CHECK(emulation_fault_count() == 0);
}

void test_shared_limit() {
  DeviceArray<unsigned char> out(1);
  const auto f = reinterpret_cast<const void*>(dynamic_bytes);
  CHECK(gpu::launch(dynamic_bytes, 1, 1, 48 << 10, nullptr, out, 48 << 10) == cudaSuccess);
  CHECK(gpu::launch(dynamic_bytes, 1, 1, 64 << 10, nullptr, out, 64 << 10) ==
        cudaErrorInvalidValue);
  CHECK(cudaFuncSetAttribute(f, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 << 10) ==
        cudaSuccess);
  CHECK(gpu::launch(dynamic_bytes, 1, 1, 64 << 10, nullptr, out, 64 << 10) == cudaSuccess);
  CHECK(out.host()[0] == 9);
  emulation_set_architecture(72);
  CHECK(cudaFuncSetAttribute(f, cudaFuncAttributeMaxDynamicSharedMemorySize, 97 << 10) ==
        cudaErrorInvalidValue);
  emulation_set_architecture(87);
  cudaGetLastError();
}

void test_devices() {
  for (int sm : {72, 80, 86, 87, 89, 90, 100, 120}) {
    CHECK(emulation_set_architecture(sm) == 0);
    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, 0) == cudaSuccess);
    CHECK(properties.major * 10 + properties.minor == sm);
    int opt_in, major;
    CHECK(cudaDeviceGetAttribute(&opt_in, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0) ==
          cudaSuccess);
    CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess);
    CHECK(static_cast<size_t>(opt_in) == properties.sharedMemPerBlockOptin);
    CHECK(major == properties.major);
    const int arch = gpu::with_arch(sm, [](auto arch) { return decltype(arch)::sm; });
    CHECK(arch == (sm < 80 ? 72 : 80));
  }
  CHECK(emulation_set_architecture(75) == -1);
  emulation_set_architecture(87);
  size_t free_bytes, total;
  CHECK(cudaMemGetInfo(&free_bytes, &total) == cudaSuccess);
  CHECK(free_bytes > 0 && free_bytes <= total);
}

void test_memory() {
  int* p;
  CHECK(cudaMalloc(reinterpret_cast<void**>(&p), 64) == cudaSuccess);
  CHECK(reinterpret_cast<uintptr_t>(p) % 256 == 0);
  CHECK(p[0] == -1);  // not zeros
  CHECK(cudaMemset(p, 1, 64) == cudaSuccess);
  int v;
  CHECK(cudaMemcpy(&v, p + 3, 4, cudaMemcpyDeviceToHost) == cudaSuccess);
  CHECK(v == 0x01010101);
  CHECK(cudaFree(p) == cudaSuccess);
  CHECK(cudaFree(nullptr) == cudaSuccess);
  int local;
  CHECK(cudaFree(&local) == cudaErrorInvalidValue);
  cudaGetLastError();

  // A state tensor beyond 2^31 elements takes address space, not memory. (The checked runtime
  // keeps a byte for each.)
  if (emulation_checks_accesses()) return;
  signed char* giant;
  const size_t stride = (size_t{1} << 31) + 5;
  CHECK(cudaMalloc(reinterpret_cast<void**>(&giant), 3 * stride) == cudaSuccess);
  CHECK(gpu::launch(touch_far, 1, 3, 0, nullptr, giant, stride) == cudaSuccess);
  for (int i = 0; i < 3; ++i) {
    signed char far;
    cudaMemcpy(&far, giant + i * stride, 1, cudaMemcpyDeviceToHost);
    CHECK(far == i + 1);
  }
  cudaFree(giant);
}

void test_streams() {
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream) == cudaSuccess);
  DeviceArray<int> p(32, 0);
  emulation_reset();
  gpu::launch(add_one, 1, 32, 0, stream, p);
  cudaMemsetAsync(p, 0, 4, stream);
  CHECK(emulation_counter("stream_operations") == 2);
  CHECK(emulation_counter("default_stream") == 0);
  CHECK(emulation_counter("blocking_calls") == 0);
  gpu::launch(add_one, 1, 32, 0, nullptr, p);
  CHECK(emulation_counter("default_stream") == 1);
  cudaStreamSynchronize(stream);
  CHECK(emulation_counter("blocking_calls") == 1);
  CHECK(p.host()[0] == 1 && p.host()[31] == 2);

  cudaEvent_t start, end;
  cudaEventCreate(&start), cudaEventCreate(&end);
  cudaEventRecord(start, stream), cudaEventRecord(end, stream);
  float milliseconds = -1;
  CHECK(cudaEventElapsedTime(&milliseconds, start, end) == cudaSuccess && milliseconds >= 0);
  cudaEventDestroy(start), cudaEventDestroy(end);
  cudaStreamDestroy(stream);
}

void test_graph() {
  cudaStream_t stream;
  cudaStreamCreate(&stream);
  DeviceArray<int> p(32, 0);
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
  cudaStreamCaptureStatus status;
  cudaStreamIsCapturing(stream, &status);
  CHECK(status == cudaStreamCaptureStatusActive);
  {
    int* const argument = p;  // gone when the graph runs
    CHECK(gpu::launch(add_one, 1, 32, 0, stream, argument) == cudaSuccess);
    CHECK(gpu::launch(add_one, 1, 16, 0, stream, argument) == cudaSuccess);
  }
  // What waits or allocates is refused while a stream captures.
  void* q;
  CHECK(cudaMalloc(&q, 4) == cudaErrorStreamCaptureUnsupported);
  CHECK(cudaStreamSynchronize(stream) == cudaErrorStreamCaptureUnsupported);
  CHECK(cudaDeviceSynchronize() == cudaErrorStreamCaptureUnsupported);
  cudaGraph_t graph;
  CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
  cudaGetLastError();
  CHECK(p.host() == Ints(32, 0));  // recorded, not run

  cudaGraphExec_t executable;
  CHECK(cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess);
  cudaGraphDestroy(graph);
  for (int i = 0; i < 3; ++i) CHECK(cudaGraphLaunch(executable, stream) == cudaSuccess);
  CHECK(p.host()[0] == 6 && p.host()[31] == 3);
  cudaGraphExecDestroy(executable);
  CHECK(cudaStreamEndCapture(stream, &graph) == cudaErrorIllegalState);
  cudaGetLastError();
  cudaStreamDestroy(stream);
}

// The bytes that a kernel asks for, exactly.
void test_counters() {
  const int rows = 8, n = 1000, vectors = 1000;
  DeviceArray<float> in(rows * n, 1.f), out(rows);
  emulation_reset();
  gpu::launch(row_sum, rows, 128, 0, nullptr, in, out, n);
  CHECK(emulation_counter("load_bytes") == rows * n * 4);
  CHECK(emulation_counter("store_bytes") == rows * 4);
  CHECK(emulation_counter("atomic_bytes") == 0);
  CHECK(emulation_counter("launches") == 1);
  CHECK(emulation_counter("blocks") == rows);
  CHECK(emulation_counter("threads") == rows * 128);
  CHECK(emulation_counter("block_barriers") == rows);
  CHECK(emulation_counter("warp_collectives") == rows * (128 / 32 + 1) * 5);
  CHECK(emulation_counter("no such counter") == UINT64_MAX);

  DeviceArray<int4> a(vectors, int4{1, 2, 3, 4}), b(vectors);
  emulation_reset();
  gpu::launch(copy_vectors, 8, 128, 0, nullptr, a, b, vectors);
  CHECK(emulation_counter("load_bytes") == vectors * 16);
  CHECK(emulation_counter("store_bytes") == vectors * 16);

  // Shared atomics are not global traffic: 5 bins once a block, and one vote a warp.
  DeviceArray<int> x(256, 2), counts(5, 0), positive(1, 0);
  emulation_reset();
  gpu::launch(histogram, 2, 128, 5 * sizeof(int), nullptr, x, counts, positive, 256, 5);
  CHECK(emulation_counter("load_bytes") == 256 * 4);
  CHECK(emulation_counter("atomic_bytes") == (2 * 1 + 8) * 4);

  // wmma: A and B tiles of 16 x 16 halves for each of the K / 16 steps, and C once.
  DeviceArray<half> ha(32 * 64, half(1.f)), hb(16 * 64, half(1.f));
  DeviceArray<float> c(32 * 16);
  emulation_reset();
  gpu::launch(wmma_product<16, 16, half, float>, dim3(1, 2), 32, 0, nullptr, ha, hb, c, 16, 64);
  CHECK(emulation_counter("load_bytes") == 2 * 4 * 2 * 16 * 16 * 2);
  CHECK(emulation_counter("store_bytes") == 32 * 16 * 4);

  // cp.async counts what it reads.
  emulation_reset();
  gpu::launch(mma_product<gpu::Arch<80>>, dim3(2, 2), 32, 0, nullptr, ha, hb, c, 16, 64);
  CHECK(emulation_counter("load_bytes") == 4 * 4 * (16 + 8) * 16 * 2);
}

void test_block_sampling() {
  DeviceArray<int> out(100, 0);
  emulation_reset();
  emulation_set_block_sampling(10);
  CHECK(gpu::launch(mark_blocks, 100, 32, 0, nullptr, out) == cudaSuccess);
  CHECK(emulation_counter("blocks") == 10);
  // Who reads what the blocks left out would have written is not to blame.
  DeviceArray<int> marks(100);
  gpu::launch(mark_blocks, 100, 32, 0, nullptr, marks);
  CHECK(gpu::launch(add_one, 1, 100, 0, nullptr, marks) == cudaSuccess);
  emulation_set_block_sampling(1);
  const Ints got = out.host();
  for (int i = 0; i < 100; ++i) CHECK(got[i] == (i % 10 == 0));
}

// The order of blocks under each schedule; a seed gives the same order again.
void test_schedules() {
  const auto order = [](const char* schedule) {
    CHECK(emulation_set_schedule(schedule) == 0);
    DeviceArray<int> next(1, 0), out(16);
    gpu::launch(block_order, 16, 32, 0, nullptr, next, out);
    return out.host();
  };
  const Ints forward = order("seq"), reversed = order("rev");
  for (int i = 0; i < 16; ++i) CHECK(forward[i] == i && reversed[i] == 15 - i);
  CHECK(order("rand:1") == order("rand:1"));
  CHECK(order("rand:1") != order("rand:2") || order("rand:1") != order("rand:3"));
  for (const char* bad : {"", "rand", "rand:", "rand:x", "sideways"})
    CHECK(emulation_set_schedule(bad) == -1);
  CHECK(emulation_set_schedule("seq") == 0);
}

// Host threads that launch at once take turns.
void test_host_threads() {
  DeviceArray<int> a(32, 0), b(32, 0);
  const auto work = [](int* p) {
    for (int i = 0; i < 50; ++i) gpu::launch(add_one, 1, 32, 0, nullptr, p);
  };
  std::thread one(work, static_cast<int*>(a)), other(work, static_cast<int*>(b));
  one.join(), other.join();
  CHECK(a.host() == Ints(32, 50));
  CHECK(b.host() == Ints(32, 50));
}

}  // namespace

int main() {
  test_launch_errors();
  test_shared_limit();
  test_devices();
  test_memory();
  test_streams();
  test_graph();
  test_counters();
  test_block_sampling();
  test_schedules();
  test_host_threads();
  CHECK(emulation_fault_count() == 0);
  return finish();
}
