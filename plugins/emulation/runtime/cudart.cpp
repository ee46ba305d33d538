// A stand-in for libcudart, so that what calls the CUDA runtime links and runs: device memory is
// host memory, streams run at once, and a stream that captures records what it is given.
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <vector>

#include "access.hpp"
#include "fault.hpp"
#include "launch.hpp"
#include "settings.hpp"

using namespace emulation;

// The handles are pointers to these types, which CUDA leaves undefined.
struct CUgraph_st {
  std::vector<std::function<cudaError_t()>> work;
};
struct CUgraphExec_st {
  CUgraph_st graph;
};
struct CUstream_st {
  CUgraph_st* capture = nullptr;
};
struct CUevent_st {
  std::chrono::steady_clock::time_point time;
};

namespace {

constexpr size_t kSharedWithoutOptIn = 48 << 10;
std::recursive_mutex one_at_a_time;  // host threads may launch together
cudaError_t last_error = cudaSuccess;
std::map<const void*, size_t> shared_limit;  // by kernel, from cudaFuncSetAttribute
int capturing_streams = 0;
void* dynamic_shared_memory = nullptr;

cudaError_t error(cudaError_t e) { return e == cudaSuccess ? e : last_error = e; }

// Runs the work, or records it if the stream captures.
cudaError_t on_stream(cudaStream_t stream, std::function<cudaError_t()> work) {
  ++counters.stream_operations;
  counters.default_stream += stream == nullptr;
  if (!stream || !stream->capture) return error(work());
  stream->capture->work.push_back(std::move(work));
  return cudaSuccess;
}

// Calls that wait are illegal while any stream captures (in the default, global mode).
cudaError_t blocking_call() {
  ++counters.blocking_calls;
  return error(capturing_streams ? cudaErrorStreamCaptureUnsupported : cudaSuccess);
}

cudaError_t refuse_launch(cudaError_t code, const std::string& why) {
  std::fprintf(stderr, "emulation: bad launch: %s\n", why.c_str());
  return error(code);
}

cudaError_t check_launch(const Kernel& kernel, dim3 grid, dim3 block, size_t shared_bytes) {
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (!threads || threads > kMaxThreads || block.x > 1024 || block.y > 1024 || block.z > 64)
    return refuse_launch(cudaErrorInvalidConfiguration,
                         text("a block of %u x %u x %u threads", block.x, block.y, block.z));
  if (!grid.x || !grid.y || !grid.z || grid.x > 0x7FFFFFFFu || grid.y > 65535 || grid.z > 65535)
    return refuse_launch(cudaErrorInvalidConfiguration,
                         text("a grid of %u x %u x %u blocks", grid.x, grid.y, grid.z));
  const auto limit = shared_limit.find(kernel.function);
  const size_t allowed = limit == shared_limit.end() ? kSharedWithoutOptIn : limit->second;
  if (shared_bytes > allowed)
    return refuse_launch(cudaErrorInvalidValue,
                         text("%zu bytes of dynamic shared memory, over the %zu that "
                              "cudaFuncSetAttribute allowed",
                              shared_bytes, allowed));
  return cudaSuccess;
}

}  // namespace

namespace emulation {

void* dynamic_shared() { return dynamic_shared_memory; }

cudaError_t launch(const Kernel& kernel, dim3 grid, dim3 block, size_t shared_bytes,
                   cudaStream_t stream) {
  std::lock_guard<std::recursive_mutex> lock(one_at_a_time);
  const cudaError_t bad = check_launch(kernel, grid, block, shared_bytes);
  if (bad != cudaSuccess) return bad;
  const auto run = [=](const Kernel& k) {
    ++counters.launches;
    dynamic_shared_memory = allocate_dynamic_shared(shared_bytes);
    const bool clean = execute(k, grid, block, dynamic_shared_memory, shared_bytes);
    release_dynamic_shared(dynamic_shared_memory);
    dynamic_shared_memory = nullptr;
    return clean ? cudaSuccess : cudaErrorLaunchFailure;
  };
  if (!stream || !stream->capture) return on_stream(stream, [&] { return run(kernel); });
  // The caller's closure will be gone when the graph runs.
  return on_stream(stream, [run, function = kernel.function, body = kernel.own(kernel.closure)] {
    const auto invoke = [](const void* f) { (*static_cast<const std::function<void()>*>(f))(); };
    return run({function, invoke, nullptr, &body});
  });
}

}  // namespace emulation

// ---- errors ----
cudaError_t cudaPeekAtLastError() { return last_error; }
cudaError_t cudaGetLastError() {
  const cudaError_t e = last_error;
  last_error = cudaSuccess;
  return e;
}
const char* cudaGetErrorName(cudaError_t e) {
  switch (e) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorIllegalState: return "cudaErrorIllegalState";
    default: return "unrecognized error code";
  }
}
const char* cudaGetErrorString(cudaError_t e) { return cudaGetErrorName(e); }

// ---- memory ----
namespace {
cudaError_t allocate(void** p, size_t bytes) {
  std::lock_guard<std::recursive_mutex> lock(one_at_a_time);
  if (!p) return error(cudaErrorInvalidValue);
  ++counters.allocations;
  *p = device_allocate(bytes);
  return error(*p ? cudaSuccess : cudaErrorMemoryAllocation);
}
cudaError_t free_memory(void* p) {
  std::lock_guard<std::recursive_mutex> lock(one_at_a_time);
  if (!p) return cudaSuccess;
  ++counters.releases;
  return error(device_release(p) ? cudaSuccess : cudaErrorInvalidValue);
}
cudaError_t allocate_for_host(void** p, size_t bytes) {
  const cudaError_t e = allocate(p, bytes);
  if (e == cudaSuccess) host_wrote(*p, bytes);
  return e;
}
cudaError_t copy(void* to, const void* from, size_t bytes) {
  std::memmove(to, from, bytes);
  host_wrote(to, bytes);
  return cudaSuccess;
}
cudaError_t fill(void* to, int value, size_t bytes) {
  std::memset(to, value, bytes);
  host_wrote(to, bytes);
  return cudaSuccess;
}
}  // namespace

cudaError_t cudaMalloc(void** p, size_t bytes) {
  const cudaError_t e = blocking_call();
  return e == cudaSuccess ? allocate(p, bytes) : e;
}
cudaError_t cudaFree(void* p) {
  const cudaError_t e = blocking_call();
  return e == cudaSuccess ? free_memory(p) : e;
}
cudaError_t cudaMallocAsync(void** p, size_t bytes, cudaStream_t) { return allocate(p, bytes); }
cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return free_memory(p); }
cudaError_t cudaMallocHost(void** p, size_t bytes) { return allocate_for_host(p, bytes); }
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) { return allocate_for_host(p, bytes); }
cudaError_t cudaFreeHost(void* p) { return free_memory(p); }
cudaError_t cudaMallocManaged(void** p, size_t bytes, unsigned) {
  return allocate_for_host(p, bytes);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  const cudaError_t e = blocking_call();
  return e == cudaSuccess ? copy(to, from, bytes) : e;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  const cudaError_t e = blocking_call();
  return e == cudaSuccess ? fill(to, value, bytes) : e;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  return on_stream(stream, [=] { return copy(to, from, bytes); });
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return on_stream(stream, [=] { return fill(to, value, bytes); });
}

// ---- kernels ----
cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || static_cast<size_t>(value) > settings().device.shared_opt_in)
    return error(cudaErrorInvalidValue);
  shared_limit[function] = static_cast<size_t>(value);
  return cudaSuccess;
}

// ---- streams and events ----
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = new CUstream_st;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return cudaStreamCreate(stream);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return cudaStreamCreate(stream);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return blocking_call(); }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return blocking_call(); }
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return cudaEventCreate(event);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  event->time = std::chrono::steady_clock::now();
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) { return blocking_call(); }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  *milliseconds = std::chrono::duration<float, std::milli>(end->time - start->time).count();
  return cudaSuccess;
}

// ---- graphs ----
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  if (!stream || stream->capture) return error(cudaErrorIllegalState);
  stream->capture = new CUgraph_st;
  ++capturing_streams;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  if (!stream || !stream->capture) return error(cudaErrorIllegalState);
  *graph = stream->capture;
  stream->capture = nullptr;
  --capturing_streams;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = stream && stream->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                 unsigned long long) {
  *executable = new CUgraphExec_st{*graph};
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  return on_stream(stream, [executable] {
    for (const auto& work : executable->graph.work) {
      const cudaError_t e = work();
      if (e != cudaSuccess) return e;
    }
    return cudaSuccess;
  });
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete executable;
  return cudaSuccess;
}
