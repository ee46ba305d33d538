// The runtime that watches no access. Memory comes from malloc, so that AddressSanitizer's does.
#include "../access.hpp"

#include <cstdlib>
#include <cstring>
#include <map>

#include "../../control.h"
#include "../fault.hpp"

namespace emulation {
namespace {
constexpr size_t kAlignment = 256, kFilled = 64 << 20;
std::map<uintptr_t, size_t> allocations;
}  // namespace

void* device_allocate(size_t bytes) {
  void* p;
  if (posix_memalign(&p, kAlignment, bytes ? bytes : 1)) return nullptr;
  // Not zeros: NaN as float, -1 as an integer. A sparse giant stays sparse.
  if (bytes <= kFilled) std::memset(p, 0xFF, bytes);
  allocations[reinterpret_cast<uintptr_t>(p)] = bytes;
  return p;
}

bool device_release(void* p) {
  if (!allocations.erase(reinterpret_cast<uintptr_t>(p))) return false;
  std::free(p);
  return true;
}

bool device_contains(const void* p) {
  const auto address = reinterpret_cast<uintptr_t>(p);
  auto next = allocations.upper_bound(address);
  return next != allocations.begin() && address - (--next)->first < next->second;
}

void host_wrote(const void*, size_t) {}

void* allocate_dynamic_shared(size_t bytes) {
  void* p;
  return posix_memalign(&p, 128, bytes ? bytes : 1) ? nullptr : p;
}
void release_dynamic_shared(void* p) { std::free(p); }

void global_load(const void*, size_t bytes) { counters.load_bytes += bytes; }
void global_store(const void*, size_t bytes) { counters.store_bytes += bytes; }
void count_if_global(const void* p, size_t bytes, bool store) {
  if (device_contains(p)) (store ? counters.store_bytes : counters.load_bytes) += bytes;
}
void atomic(const void* p, size_t bytes) {
  if (device_contains(p)) counters.atomic_bytes += bytes;
}
void fence() {}

namespace access {
void launch_begins(const void*, const void*, size_t) {}
void block_begins(uint64_t) {}
void block_barrier() {}
void warp_barrier(const Lanes&) {}
void named_barrier_arrival(int) {}
void named_barrier_departure(int, Thread&) {}
void named_barrier_reset(int) {}
void copy_starts(const Copy&, const void*) {}
void copy_ends(const Copy&) {}
}  // namespace access

}  // namespace emulation

int emulation_checks_accesses() { return 0; }
