// The part of the libcudart stand-in that describes the imitated device.
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "scheduler.hpp"
#include "settings.hpp"

using emulation::settings;

namespace {
constexpr size_t kSharedWithoutOptIn = 48 << 10;
constexpr int kRegistersPerBlock = 64 << 10;
}  // namespace

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidValue; }
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const emulation::Device& device = settings().device;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = device.sm / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = device.sm % 10; break;
    case cudaDevAttrMultiProcessorCount: *value = device.processors; break;
    case cudaDevAttrWarpSize: *value = emulation::kLanes; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = emulation::kMaxThreads; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = kSharedWithoutOptIn; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(device.shared_opt_in);
      break;
    case cudaDevAttrMaxRegistersPerBlock: *value = kRegistersPerBlock; break;
    case cudaDevAttrIntegrated: *value = device.sm == 72 || device.sm == 87; break;
    default: *value = 0; return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  const emulation::Device& device = settings().device;
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "emulated sm_%d", device.sm);
  properties->major = device.sm / 10;
  properties->minor = device.sm % 10;
  properties->multiProcessorCount = device.processors;
  properties->warpSize = emulation::kLanes;
  properties->maxThreadsPerBlock = emulation::kMaxThreads;
  properties->sharedMemPerBlock = kSharedWithoutOptIn;
  properties->sharedMemPerBlockOptin = device.shared_opt_in;
  properties->regsPerBlock = kRegistersPerBlock;
  properties->integrated = device.sm == 72 || device.sm == 87;
  size_t free_bytes;
  return cudaMemGetInfo(&free_bytes, &properties->totalGlobalMem);
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  *free_bytes = static_cast<size_t>(sysconf(_SC_AVPHYS_PAGES)) * page;
  *total = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * page;
  return cudaSuccess;
}
