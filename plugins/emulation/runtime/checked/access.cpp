// The runtime that watches every access of kernels compiled with -fsanitize=thread (for the
// calls that puts before each access; the sanitizer's own library is not linked).
#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <vector>

#include "../../control.h"
#include "../fault.hpp"
#include "../settings.hpp"
#include "order.hpp"
#include "shadow.hpp"
#include "watch.hpp"

namespace emulation {
namespace {

constexpr size_t kArena = size_t{16} << 30, kAlignment = 256, kFilled = 64 << 20;
constexpr size_t kDynamicShared = 256 << 10;

struct Arena {
  char* memory = static_cast<char*>(reserve(kArena));
  Region region = make_region("global memory", false, reinterpret_cast<uintptr_t>(memory), kArena);
  size_t used = 0;
  std::map<uintptr_t, size_t> allocations;
};
Arena& arena() {
  static Arena a;
  return a;
}

struct Dynamic {
  char* memory = static_cast<char*>(reserve(kDynamicShared));
  Region region = make_region("dynamic shared memory", true, reinterpret_cast<uintptr_t>(memory),
                              kDynamicShared);
  size_t bytes = 0;
};
Dynamic& dynamic() {
  static Dynamic d;
  return d;
}

Places places;
std::vector<Copy> in_flight;

// ---- static shared memory: the writable data of the module that holds the kernel ----
// Kernels have no other writable variables than those they declare __shared__.
Region static_region;

struct ModuleSearch {
  uintptr_t code;
  uintptr_t begin, end;
};

int find_writable_segment(dl_phdr_info* module, size_t, void* argument) {
  auto& search = *static_cast<ModuleSearch*>(argument);
  bool holds_code = false;
  uintptr_t begin = UINTPTR_MAX, end = 0;
  for (int i = 0; i < module->dlpi_phnum; ++i) {
    const auto& segment = module->dlpi_phdr[i];
    if (segment.p_type != PT_LOAD) continue;
    const uintptr_t from = module->dlpi_addr + segment.p_vaddr, to = from + segment.p_memsz;
    holds_code |= search.code >= from && search.code < to;
    if (!(segment.p_flags & PF_W)) continue;
    begin = std::min(begin, from);
    end = std::max(end, to);
  }
  if (!holds_code || begin >= end) return 0;
  search.begin = begin;
  search.end = end;
  return 1;
}

void find_static_shared(const void* kernel_function) {
  static std::map<uintptr_t, Region> regions;
  ModuleSearch search{reinterpret_cast<uintptr_t>(kernel_function), 0, 0};
  if (!dl_iterate_phdr(find_writable_segment, &search)) return;
  Region& region = regions[search.begin];
  if (!region.name)
    region = make_region("static shared memory", true, search.begin, search.end - search.begin);
  static_region = region;
}

const Region* region_of(uintptr_t address) {
  if (arena().region.contains(address)) return &arena().region;
  if (dynamic().region.contains(address)) return &dynamic().region;
  const auto place = reinterpret_cast<uintptr_t>(&index);
  if (static_region.contains(address) && !(address >= place && address < place + sizeof index))
    return &static_region;
  return nullptr;
}

// ---- reports ----
const char* verb(Access access) {
  return access == Access::load ? "read" : access == Access::store ? "write" : "atomic";
}

// One report of a launch for each kind of fault and code address, since finding the lines is slow.
std::set<std::pair<std::string, const void*>> reported;
template <class Message>
void complain(const char* kind, const void* code, Message message) {
  if (!reported.insert({kind, code}).second) return;
  const SourceLine at = source_line(code);
  report(at.file, at.line, kind, message());
}

std::string where(const Region& region, uintptr_t address) {
  if (&region != &arena().region) return region.name;
  const auto next = arena().allocations.upper_bound(address);
  if (next == arena().allocations.begin()) return region.name;
  const auto& [begin, bytes] = *std::prev(next);
  return text("global memory (byte %zu of an allocation of %zu)", address - begin, bytes);
}

std::string who(const Stamp& past, Access access) {
  const void* code = places.code(past.site);
  const SourceLine at = code ? source_line(code) : SourceLine{"?", "an unknown place", 0};
  const std::string by =
      order::in_this_block(past)
          ? text("thread %u", static_cast<unsigned>(past.thread))
          : text("block %llu of the grid", static_cast<unsigned long long>(order::block_of(past)));
  return text("%s at %s:%d by %s", verb(access), at.file.c_str(), at.line, by.c_str());
}

// ---- the check of one access ----
// True if what lies there was never written: for shared memory, not by this block. Of global memory
// a sample of the blocks tells nothing, since those left out may be the ones that write it.
bool unwritten(const Region& region, const Cell& cell, uint8_t state) {
  if (region.is_shared) return !order::in_this_block(cell.write);
  return state == kUnwritten && settings().block_sampling == 1;
}

struct Conflict {
  Stamp with;
  Access access;
};

bool find_conflict(const Region& region, const Cell& cell, Access access, Conflict& conflict) {
  const bool atomic = access == Access::atomic;
  const auto concurrent = [&](const Stamp& past) {
    return past.epoch && !(atomic && past.is_atomic) && order::unordered(past, region.is_shared);
  };
  if (concurrent(cell.write)) {
    conflict = {cell.write, cell.write.is_atomic ? Access::atomic : Access::store};
    return true;
  }
  if (access == Access::load) return false;
  for (const Stamp& read : {cell.read, cell.other_read})
    if (concurrent(read)) {
      conflict = {read, Access::load};
      return true;
    }
  return false;
}

void note_read(const Region& region, Cell& cell, const Stamp& mine) {
  const auto mine_too = [&](const Stamp& past, unsigned threads) {
    return order::in_this_block(past) && past.thread / threads == mine.thread / threads;
  };
  if (cell.read.epoch && !mine_too(cell.read, 1)) {
    const bool far = cell.other_read.epoch && !mine_too(cell.other_read, kLanes) &&
                     order::unordered(cell.other_read, region.is_shared);
    if (!far || !mine_too(cell.read, kLanes)) cell.other_read = cell.read;
  }
  cell.read = mine;
}

void note(const Region& region, Cell& cell, const Stamp& mine, Access access) {
  if (access == Access::load) return note_read(region, cell, mine);
  // An atomic does not make up for a plain write that the same thread has just made.
  const bool plain_before = cell.write.epoch == mine.epoch && cell.write.thread == mine.thread &&
                            cell.write.clock == mine.clock && !cell.write.is_atomic;
  if (access == Access::atomic && plain_before) return;
  cell.write = mine;
  cell.read = cell.other_read = {};
}

void check(const Region& region, uintptr_t address, size_t bytes, Access access, const void* code) {
  const auto subject = [&] {
    return text("%s of %zu bytes in ", verb(access), bytes) + where(region, address);
  };
  if ((bytes & (bytes - 1)) == 0 && bytes <= 16 && address % bytes)
    complain("misaligned access", code, [&] { return subject() + text(", at %#zx", address); });
  const Stamp mine = order::now(places.number(code), access == Access::atomic);
  const bool bounded = &region != &static_region;
  for (uintptr_t a = address; a < address + bytes; ++a) {
    uint8_t& state = region.state(a);
    Cell& cell = region.cell(a);
    Conflict conflict;
    if (bounded && state == kOutside)
      return complain("out of bounds", code, [&] { return subject(); });
    if (state == kInFlight)
      return complain("copy in flight", code,
                      [&] { return subject() + ", where a cp.async has not been waited for"; });
    if (access != Access::store && unwritten(region, cell, state)) {
      complain("uninitialised read", code, [&] {
        return subject() + (region.is_shared ? ", not written by this block" : ", never written");
      });
    } else if (find_conflict(region, cell, access, conflict)) {
      complain("race", code, [&] {
        return subject() + ", and " + who(conflict.with, conflict.access) + ", in no order";
      });
    }
    note(region, cell, mine, access);
    if (access != Access::load) state = kWritten;
  }
}

void check_if_watched(const void* p, size_t bytes, Access access, const void* code) {
  const auto address = reinterpret_cast<uintptr_t>(p);
  if (const Region* region = region_of(address)) check(*region, address, bytes, access, code);
}

}  // namespace

void watch(const void* p, size_t bytes, Access access, const void* code) {
  const auto address = reinterpret_cast<uintptr_t>(p);
  if (!in_kernel()) {
    if (access != Access::load && arena().region.contains(address)) host_wrote(p, bytes);
    return;
  }
  const Region* region = region_of(address);
  if (!region) return;
  if (!region->is_shared)
    complain("uncounted access", code, [&] {
      return text("%s of %zu bytes in global memory without gpu::load or gpu::store", verb(access),
                  bytes);
    });
  check(*region, address, bytes, access, code);
}

// ---- device memory ----
void* device_allocate(size_t bytes) {
  Arena& a = arena();
  if (a.allocations.empty()) {
    clear_reserved(a.region.cells, a.used * sizeof(Cell));
    a.used = 0;
  }
  // A gap, so that an overrun meets no other allocation.
  const size_t taken = (bytes + 2 * kAlignment - 1) / kAlignment * kAlignment;
  if (taken < bytes || taken > kArena - a.used) return nullptr;
  char* p = a.memory + a.used;
  a.used += taken;
  a.allocations[reinterpret_cast<uintptr_t>(p)] = bytes;
  std::memset(&a.region.state(reinterpret_cast<uintptr_t>(p)), kUnwritten, bytes);
  if (bytes <= kFilled) std::memset(p, 0xFF, bytes);
  return p;
}

bool device_release(void* p) {
  Arena& a = arena();
  const auto found = a.allocations.find(reinterpret_cast<uintptr_t>(p));
  if (found == a.allocations.end()) return false;
  std::memset(&a.region.state(found->first), kOutside, found->second);
  a.allocations.erase(found);
  return true;
}

bool device_contains(const void* p) {
  return arena().region.contains(reinterpret_cast<uintptr_t>(p));
}

void host_wrote(const void* p, size_t bytes) {
  if (device_contains(p))
    std::memset(&arena().region.state(reinterpret_cast<uintptr_t>(p)), kWritten, bytes);
}

void* allocate_dynamic_shared(size_t) { return dynamic().memory; }
void release_dynamic_shared(void*) {}

// ---- announced accesses ----
void global_load(const void* p, size_t bytes) {
  counters.load_bytes += bytes;
  check_if_watched(p, bytes, Access::load, __builtin_return_address(0));
}
void global_store(const void* p, size_t bytes) {
  counters.store_bytes += bytes;
  check_if_watched(p, bytes, Access::store, __builtin_return_address(0));
}
void count_if_global(const void* p, size_t bytes, bool store) {
  if (device_contains(p)) (store ? counters.store_bytes : counters.load_bytes) += bytes;
  check_if_watched(p, bytes, store ? Access::store : Access::load, __builtin_return_address(0));
}
void atomic(const void* p, size_t bytes) {
  check_if_watched(p, bytes, Access::atomic, __builtin_return_address(0));
  if (!device_contains(p)) return;
  counters.atomic_bytes += bytes;
  order::atomic_on(p);
}
void fence() { order::fence(); }

namespace access {

void launch_begins(const void* kernel_function, const void*, size_t dynamic_bytes) {
  reported.clear();
  order::launch_begins();
  find_static_shared(kernel_function);
  Region& region = dynamic().region;
  std::memset(region.states, kUnwritten, dynamic_bytes);
  std::memset(region.states + dynamic_bytes, kOutside, kDynamicShared - dynamic_bytes);
}

void block_begins(uint64_t number) {
  order::block_begins(number);
  for (const Copy& copy : in_flight) copy_ends(copy);
  in_flight.clear();
}

void block_barrier() { order::block_barrier(); }
void warp_barrier(const Lanes& lanes) { order::warp_barrier(lanes); }
void named_barrier_arrival(int id) { order::named_barrier_arrival(id); }
void named_barrier_departure(int id, Thread& t) { order::named_barrier_departure(id, t); }
void named_barrier_reset(int id) { order::named_barrier_reset(id); }

void copy_starts(const Copy& copy, const void* code) {
  if (copy.filled) check_if_watched(copy.from, copy.filled, Access::load, code);
  check_if_watched(copy.to, copy.bytes, Access::store, code);
  const auto to = reinterpret_cast<uintptr_t>(copy.to);
  const Region* region = region_of(to);
  if (!region || !region->is_shared)
    return complain("out of bounds", code, [] { return "cp.async to what is not shared memory"; });
  std::memset(&region->state(to), kInFlight, copy.bytes);
  in_flight.push_back(copy);
}

// From here on the copy is an ordinary write of the thread that waited for it.
void copy_ends(const Copy& copy) {
  const auto to = reinterpret_cast<uintptr_t>(copy.to);
  const Region* region = region_of(to);
  if (!region) return;
  std::memset(&region->state(to), kWritten, copy.bytes);
  if (!in_kernel()) return;
  for (int i = 0; i < copy.bytes; ++i) {
    Stamp& write = region->cell(to + i).write;
    write = order::now(write.site, false);
  }
}

}  // namespace access
}  // namespace emulation

int emulation_checks_accesses() { return 1; }
