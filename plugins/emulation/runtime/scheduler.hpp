// The execution of one launch: blocks one after another, the threads of a block in turns.
// A thread runs until it waits for others or ends; everything here is on one host thread.
#pragma once
#include <string>
#include <vector>

#include "../runtime.hpp"
#include "context.hpp"

namespace emulation {

constexpr int kMaxThreads = 1024, kLanes = 32, kMaxWarps = kMaxThreads / kLanes;

enum class State : uint8_t { ready, at_block_barrier, at_named_barrier, at_warp, exited };

struct Lanes;
using Combine = void (*)(Lanes&);

struct Thread {
  int id = 0;
  uint3 index{};
  State state = State::ready;
  Context* context = nullptr;  // from the first instruction to the last
  Site site{};                 // where it waits
  int barrier_id = 0;          // at_named_barrier
  unsigned mask = 0;           // at_warp: the lanes it waits for,
  void* slot = nullptr;        //   what it brings,
  Combine combine = nullptr;   //   and what is to be done with all of it
  char arrived = 0, left = 0;  // ThreadSanitizer's objects of a warp barrier
  std::vector<Copy> copies;    // cp.async in flight, oldest first
  std::vector<size_t> groups;  // copies in each committed group
};

// The lanes that take part in a warp collective, once all of them have arrived.
struct Lanes {
  unsigned active = 0;
  Thread* thread[kLanes] = {};
  Thread& first() const { return *thread[__builtin_ctz(active)]; }
  template <class Slot>
  Slot& slot(int l) const {
    return *static_cast<Slot*>(thread[l]->slot);
  }
};

struct Block {
  int threads = 0, exited = 0;
  Thread thread[kMaxThreads];
  struct {
    unsigned exists = 0, exited = 0, waiting = 0;
    unsigned mask = 0;   // of the first that waits
    bool mixed = false;  // others wait with other masks
  } warp[kMaxWarps];
  struct {
    int arrived = 0, predicate_true = 0;
    Site site, other;  // of the first arrival, and of one that is elsewhere
    bool divergent = false;
    unsigned generation = 0;
    BarrierResult result[2];
    char order[2];  // two by turns: the next arrival must not look like part of this one
  } barrier;
  struct {
    int expected = 0, arrived = 0;
    Site site;  // of the last arrival
    unsigned generation = 0;
    char order[2];
  } named[16];
};

extern Block block;
extern Thread* current;  // null outside kernels

inline bool in_kernel() { return current != nullptr; }
inline unsigned lane_bit(const Thread& t) { return 1u << (t.id % kLanes); }

// Waits at a warp collective; `combine` runs once for all lanes of `mask` when the last arrives.
void warp_collective(const Site&, unsigned mask, void* slot, Combine combine);
// Lets the thread run again after a wait.
void make_ready(Thread&);
// Gives the processor to the next ready thread; returns when this one's turn comes.
void yield_thread();
// Leaves the kernel for good; does nothing outside one.
void abandon_launch();
std::string kernel_name();

// What an exit changes for those that wait.
void block_barrier_try();
// The end of a block: arrivals at a named barrier that nobody met are a fault.
void named_barriers_end();
void warp_exit(Thread&);

}  // namespace emulation
