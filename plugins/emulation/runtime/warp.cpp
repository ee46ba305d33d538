// Warp collectives: the lanes of a mask meet, one computation serves them all, all go on.
// Rules: CUDA C++ Programming Guide, "Warp Vote", "Warp Shuffle" and "Synchronization Functions".
#include <cstring>

#include "access.hpp"
#include "fault.hpp"
#include "scheduler.hpp"

namespace emulation {
namespace {

struct Exchange {
  uint64_t value, result;
  int source;
  Reduction reduction;
};

bool same_operation(const Thread& a, const Thread& b, bool any_line) {
  return a.combine == b.combine && !std::strcmp(a.site.operation, b.site.operation) &&
         (any_line || a.site.line == b.site.line);
}

void combine_barrier(Lanes& lanes) {
  for (int l = 0; l < kLanes; ++l)
    if (lanes.active >> l & 1) acquire(&lanes.thread[l]->arrived);
  access::warp_barrier(lanes);
  for (int l = 0; l < kLanes; ++l)
    if (lanes.active >> l & 1) release(&lanes.thread[l]->left);
}

// Runs the collective of `mask` if all of its lanes are there. Exited lanes take no part.
void try_collective(int w, unsigned mask) {
  auto& warp = block.warp[w];
  const unsigned needed = mask & warp.exists & ~warp.exited;
  if (!needed || (warp.waiting & needed) != needed) return;
  Lanes lanes;
  Thread* first = nullptr;
  for (int l = 0; l < kLanes; ++l) {
    if (!(needed >> l & 1)) continue;
    Thread& t = block.thread[w * kLanes + l];
    if (warp.mixed && t.mask != mask) return;  // it takes part in another one first
    lanes.thread[l] = &t;
    if (!first) first = &t;
    // Only __syncwarp may stand in different places.
    else if (!same_operation(*first, t, t.combine == combine_barrier))
      fail(first->site, "divergent warp", "lane %d of mask 0x%08x is at %s, %s:%d", l, mask,
           t.site.operation, t.site.file, t.site.line);
  }
  lanes.active = needed;
  {
    Unwatched looking_away;
    first->combine(lanes);
  }
  ++counters.warp_collectives;
  warp.waiting &= ~needed;
  for (int l = 0; l < kLanes; ++l)
    if (needed >> l & 1) make_ready(*lanes.thread[l]);
}

// A lane that waits for `me` with one mask, while `me` waits for it with another, waits for ever.
void check_other_masks(const Site& site, const Thread& me, unsigned mask, unsigned waiting) {
  for (int l = 0; l < kLanes; ++l) {
    if (!(waiting & mask & 1u << l)) continue;
    const Thread& other = block.thread[me.id / kLanes * kLanes + l];
    if (other.mask != mask && (other.mask & lane_bit(me)))
      fail(site, "bad mask", "mask 0x%08x, but lane %d waits with mask 0x%08x at %s:%d", mask, l,
           other.mask, other.site.file, other.site.line);
  }
}

void combine_shuffle(Lanes& lanes) {
  for (int l = 0; l < kLanes; ++l) {
    if (!(lanes.active >> l & 1)) continue;
    auto& mine = lanes.slot<Exchange>(l);
    if (!(lanes.active >> mine.source & 1))
      fail(lanes.thread[l]->site, "bad mask",
           "lane %d reads lane %d, which is not in mask 0x%08x or has exited", l, mine.source,
           lanes.thread[l]->mask);
    mine.result = lanes.slot<Exchange>(mine.source).value;
  }
}

uint32_t reduced(const Lanes& lanes, Reduction reduction, uint64_t mine) {
  uint32_t result = 0;
  bool first = true;
  for (int l = 0; l < kLanes; ++l) {
    if (!(lanes.active >> l & 1)) continue;
    const uint64_t wide = lanes.slot<Exchange>(l).value;
    const auto v = static_cast<uint32_t>(wide);
    const auto s = static_cast<int32_t>(v), r = static_cast<int32_t>(result);
    switch (reduction) {
      case Reduction::ballot: result |= uint32_t{wide != 0} << l; break;
      case Reduction::match_any:
      case Reduction::match_all: result |= uint32_t{wide == mine} << l; break;
      case Reduction::add: result += v; break;
      case Reduction::min: result = first || v < result ? v : result; break;
      case Reduction::max: result = first || v > result ? v : result; break;
      case Reduction::min_signed: result = first || s < r ? v : result; break;
      case Reduction::max_signed: result = first || s > r ? v : result; break;
      case Reduction::bit_and: result = first ? v : result & v; break;
      case Reduction::bit_or: result |= v; break;
      case Reduction::bit_xor: result ^= v; break;
    }
    first = false;
  }
  return reduction == Reduction::match_all && result != lanes.active ? 0 : result;
}

void combine_reduction(Lanes& lanes) {
  bool shared = false;  // every lane gets the same, except from match_any
  uint64_t last = 0;
  for (int l = 0; l < kLanes; ++l) {
    if (!(lanes.active >> l & 1)) continue;
    auto& mine = lanes.slot<Exchange>(l);
    if (!shared) last = reduced(lanes, mine.reduction, mine.value);
    mine.result = last;
    shared = mine.reduction != Reduction::match_any;
  }
}

}  // namespace

void warp_collective(const Site& site, unsigned mask, void* slot, Combine combine) {
  Thread& me = *current;
  auto& warp = block.warp[me.id / kLanes];
  const unsigned mine = lane_bit(me);
  if (!(mask & mine)) fail(site, "bad mask", "lane %d is not in its own mask 0x%08x", lane(), mask);
  if (!warp.waiting) {
    warp.mask = mask;
    warp.mixed = false;
  } else if (warp.mask != mask || warp.mixed) {
    warp.mixed = true;
    check_other_masks(site, me, mask, warp.waiting);
  }
  me.site = site;
  me.mask = mask;
  me.slot = slot;
  me.combine = combine;
  me.state = State::at_warp;
  warp.waiting |= mine;
  try_collective(me.id / kLanes, mask);
  yield_thread();
}

// The exit of a lane can complete what the others of its warp wait for.
void warp_exit(Thread& t) {
  auto& warp = block.warp[t.id / kLanes];
  warp.exited |= lane_bit(t);
  for (int l = 0; l < kLanes; ++l) {
    const Thread& other = block.thread[t.id / kLanes * kLanes + l];
    if ((warp.waiting >> l & 1) && (other.mask & lane_bit(t)))
      try_collective(t.id / kLanes, other.mask);
  }
}

unsigned active_lanes() {
  const auto& warp = block.warp[current->id / kLanes];
  return warp.exists & ~warp.exited;
}

void warp_barrier(const Site& site, unsigned mask) {
  release(&current->arrived);
  warp_collective(site, mask, nullptr, combine_barrier);
  acquire(&current->left);
}

uint64_t shuffle(const Site& site, unsigned mask, uint64_t value, int source_lane) {
  Exchange exchange{value, 0, source_lane, {}};
  warp_collective(site, mask, &exchange, combine_shuffle);
  return exchange.result;
}

uint32_t reduce(const Site& site, unsigned mask, Reduction reduction, uint64_t value) {
  Exchange exchange{value, 0, 0, reduction};
  warp_collective(site, mask, &exchange, combine_reduction);
  return static_cast<uint32_t>(exchange.result);
}

}  // namespace emulation
