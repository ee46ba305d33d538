#include "shadow.hpp"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

namespace emulation {

void* reserve(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    std::perror("emulation: no address space for the checks");
    std::abort();
  }
  return p;
}

void release_reserved(void* p, size_t bytes) { munmap(p, bytes); }
void clear_reserved(void* p, size_t bytes) { madvise(p, bytes, MADV_DONTNEED); }

Region make_region(const char* name, bool is_shared, uintptr_t begin, size_t bytes) {
  Region region;
  region.name = name;
  region.is_shared = is_shared;
  region.begin = begin;
  region.end = begin + bytes;
  region.cells = static_cast<Cell*>(reserve(bytes * sizeof(Cell)));
  region.states = static_cast<uint8_t*>(reserve(bytes));
  return region;
}

uint64_t Places::number(const void* code) {
  const auto key = reinterpret_cast<uintptr_t>(code);
  for (uintptr_t slot = key * 0x9E3779B97F4A7C15ull >> 50;; slot = (slot + 1) % (2 * kPlaces)) {
    const uint16_t found = slots_[slot];
    if (found && codes_[found] == code) return found;
    if (found) continue;
    if (used_ + 1 == kPlaces) return 0;
    codes_[++used_] = code;
    slots_[slot] = static_cast<uint16_t>(used_);
    return used_;
  }
}

}  // namespace emulation
