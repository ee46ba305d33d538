// cp.async: a copy stays in flight until its thread waits for it, so that a missing wait is seen.
#include "access.hpp"
#include "fault.hpp"
#include "scheduler.hpp"

extern "C" __attribute__((weak)) void* __asan_region_is_poisoned(void*, size_t);

namespace emulation {
namespace {

void check_addressable(const Site& site, const void* p, int bytes, const char* what) {
  if (__asan_region_is_poisoned && __asan_region_is_poisoned(const_cast<void*>(p), bytes))
    fail(site, "out of bounds", "%d bytes at %p, the %s, are not addressable", bytes, p, what);
}

}  // namespace

void copy_start(const Site& site, const Copy& copy) {
  require(site, 80);
  const auto misaligned = [&](const void* p) {
    return reinterpret_cast<uintptr_t>(p) % static_cast<unsigned>(copy.bytes) != 0;
  };
  if (misaligned(copy.to) || misaligned(copy.from))
    fail(site, "misaligned access", "%p <- %p is not aligned to %d bytes", copy.to, copy.from,
         copy.bytes);
  check_addressable(site, copy.from, copy.filled, "source");
  check_addressable(site, copy.to, copy.bytes, "destination");
  if (device_contains(copy.from)) counters.load_bytes += copy.filled;
  access::copy_starts(copy, __builtin_return_address(0));
  current->copies.push_back(copy);
}

void copy_commit() {
  size_t grouped = 0;
  for (size_t n : current->groups) grouped += n;
  current->groups.push_back(current->copies.size() - grouped);
}

bool copy_next(int keep, Copy& copy) {
  Thread& me = *current;
  while (me.groups.size() > static_cast<size_t>(keep)) {
    if (me.groups.front() == 0) {
      me.groups.erase(me.groups.begin());
      continue;
    }
    --me.groups.front();
    copy = me.copies.front();
    me.copies.erase(me.copies.begin());
    access::copy_ends(copy);
    return true;
  }
  return false;
}

}  // namespace emulation
