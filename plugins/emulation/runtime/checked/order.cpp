#include "order.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unordered_map>
#include <vector>

namespace emulation {
namespace order {
namespace {

constexpr unsigned kLastClock = (1 << 14) - 1, kLastEpoch = (1 << 26) - 1;

uint64_t epoch = 0, block_start = 1, launch_start = 1;
uint16_t clock_of[kMaxThreads];
// seen[t][u]: how far thread t has seen the clock of thread u, in this epoch.
uint16_t seen[kMaxThreads][kMaxThreads];
bool seen_across_warps = false;
// What those saw who have arrived at each named barrier.
struct Gathered {
  uint16_t seen[kMaxThreads];
} gathered[16];

// The blocks of this launch, by their first epoch.
struct Started {
  uint64_t epoch, number;
};
std::vector<Started> blocks;

// A thread of `block` (an index into blocks) has made visible what was done before `epoch`, and
// what it did itself.
struct Published {
  size_t block;
  uint64_t epoch;
  int thread;
};
std::unordered_map<const void*, std::vector<Published>> published;
// What a thread of this block got to see, from when on.
struct Received {
  Published what;
  uint64_t epoch;
  int thread;
};
std::vector<Received> received;
bool fenced[kMaxThreads];

void next_epoch() {
  if (++epoch > kLastEpoch) {
    std::fputs("emulation: too many barriers for the checked runtime in one process\n", stderr);
    std::abort();
  }
  for (int t = 0; t < block.threads; ++t) {
    clock_of[t] = 1;
    if (seen_across_warps)
      std::memset(seen[t], 0, block.threads * sizeof seen[t][0]);
    else
      std::memset(&seen[t][t / kLanes * kLanes], 0, kLanes * sizeof seen[t][0]);
  }
  if (seen_across_warps) std::memset(gathered, 0, sizeof gathered);
  seen_across_warps = false;
}

void advance(int t) {
  seen[t][t] = clock_of[t];
  if (clock_of[t] < kLastClock) ++clock_of[t];
}

size_t block_index(uint64_t at) {
  const auto next = std::upper_bound(blocks.begin(), blocks.end(), at,
                                     [](uint64_t e, const Started& b) { return e < b.epoch; });
  return static_cast<size_t>(next - blocks.begin()) - 1;
}

bool received_from(const Stamp& past) {
  const size_t from = block_index(past.epoch);
  for (const Received& r : received) {
    const bool visible = r.what.block == from && (past.epoch < r.what.epoch ||
                                                  static_cast<int>(past.thread) == r.what.thread);
    if (visible && (r.epoch < epoch || r.thread == current->id)) return true;
  }
  return false;
}

}  // namespace

void launch_begins() {
  launch_start = epoch + 1;
  blocks.clear();
  published.clear();
}

void block_begins(uint64_t number) {
  // A block of another size may have left clocks that this one's do not cover.
  std::memset(seen, 0, seen_across_warps ? sizeof seen : 0);
  next_epoch();
  block_start = epoch;
  blocks.push_back({epoch, number});
  received.clear();
  std::fill(fenced, fenced + block.threads, false);
}

void block_barrier() { next_epoch(); }

void warp_barrier(const Lanes& lanes) {
  int first = -1;
  for (int l = 0; l < kLanes; ++l)
    if (lanes.active >> l & 1) {
      const int t = lanes.thread[l]->id;
      advance(t);
      if (first < 0) first = t;
    }
  // All see what any has seen.
  const int begin = seen_across_warps ? 0 : first / kLanes * kLanes;
  const int end = seen_across_warps ? block.threads : begin + kLanes;
  uint16_t together[kMaxThreads] = {};
  for (int l = 0; l < kLanes; ++l)
    if (lanes.active >> l & 1)
      for (int u = begin; u < end; ++u)
        together[u] = std::max(together[u], seen[lanes.thread[l]->id][u]);
  for (int l = 0; l < kLanes; ++l)
    if (lanes.active >> l & 1)
      std::copy(together + begin, together + end, seen[lanes.thread[l]->id] + begin);
}

void named_barrier_arrival(int id) {
  const int t = current->id;
  seen_across_warps = true;
  advance(t);
  for (int u = 0; u < block.threads; ++u)
    gathered[id].seen[u] = std::max(gathered[id].seen[u], seen[t][u]);
}

void named_barrier_departure(int id, Thread& t) {
  for (int u = 0; u < block.threads; ++u)
    seen[t.id][u] = std::max(seen[t.id][u], gathered[id].seen[u]);
}

void named_barrier_reset(int id) { gathered[id] = {}; }

void fence() { fenced[current->id] = true; }

void atomic_on(const void* address) {
  const auto found = published.find(address);
  if (found != published.end())
    for (const Published& p : found->second)
      if (p.block + 1 != blocks.size()) received.push_back({p, epoch, current->id});
  if (!fenced[current->id]) return;
  std::vector<Published>& here = published[address];
  const Published mine{blocks.size() - 1, epoch, current->id};
  if (!here.empty() && here.back().block == mine.block && here.back().thread == mine.thread)
    here.back() = mine;
  else
    here.push_back(mine);
}

Stamp now(uint64_t site, bool is_atomic) {
  const auto t = static_cast<uint64_t>(current->id);
  return {epoch, clock_of[t], t, site, is_atomic};
}

bool in_this_block(const Stamp& past) { return past.epoch >= block_start; }

bool unordered(const Stamp& past, bool in_shared_memory) {
  if (past.epoch < launch_start) return false;
  if (past.epoch < block_start) return !in_shared_memory && !received_from(past);
  if (past.epoch < epoch) return false;
  const int me = current->id;
  return static_cast<int>(past.thread) != me && seen[me][past.thread] < past.clock;
}

uint64_t block_of(const Stamp& past) { return blocks[block_index(past.epoch)].number; }

}  // namespace order
}  // namespace emulation
