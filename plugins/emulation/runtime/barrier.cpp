// Barriers of a block: __syncthreads and its voting forms, and the named ones (bar.sync id, n).
#include <cstring>

#include "access.hpp"
#include "fault.hpp"
#include "scheduler.hpp"

namespace emulation {
namespace {

bool same_place(const Site& a, const Site& b) {
  return a.line == b.line && (a.file == b.file || !std::strcmp(a.file, b.file));
}

}  // namespace

// Lets the block go on once every thread that has not exited is at the barrier.
void block_barrier_try() {
  auto& barrier = block.barrier;
  if (!barrier.arrived || barrier.arrived + block.exited < block.threads) return;
  if (block.exited)
    fail(barrier.site, "divergent barrier", "%d of %d threads arrived, the others have exited",
         barrier.arrived, block.threads);
  if (barrier.divergent)
    fail(barrier.site, "divergent barrier", "other threads of the block are at %s, %s:%d",
         barrier.other.operation, barrier.other.file, barrier.other.line);
  barrier.result[barrier.generation % 2] = {barrier.arrived, barrier.predicate_true};
  barrier.arrived = barrier.predicate_true = 0;
  ++barrier.generation;
  ++counters.block_barriers;
  access::block_barrier();
  for (int i = 0; i < block.threads; ++i) make_ready(block.thread[i]);
}

BarrierResult block_barrier(const Site& site, bool predicate) {
  auto& barrier = block.barrier;
  Thread& me = *current;
  me.site = site;
  me.state = State::at_block_barrier;
  const unsigned generation = barrier.generation;
  if (barrier.arrived++ == 0) {
    barrier.site = site;
    barrier.divergent = false;
  } else if (!same_place(barrier.site, site)) {
    barrier.other = site;
    barrier.divergent = true;
  }
  barrier.predicate_true += predicate;
  release(&barrier.order[generation % 2]);
  block_barrier_try();
  yield_thread();
  acquire(&barrier.order[generation % 2]);
  return barrier.result[generation % 2];
}

void named_barriers_end() {
  for (int id = 1; id <= 15; ++id) {
    const auto& barrier = block.named[id];
    if (barrier.arrived)
      report(barrier.site.file, barrier.site.line, "divergent barrier",
             text("%d of %d threads arrived at barrier %d before the block ended", barrier.arrived,
                  barrier.expected, id));
  }
}

void named_barrier(const Site& site, int id, int threads, bool wait) {
  if (id < 1 || id > 15) fail(site, "bad barrier", "barrier %d: ids are 1 to 15", id);
  const int most = (block.threads + kLanes - 1) / kLanes * kLanes;
  if (threads < kLanes || threads % kLanes || threads > most)
    fail(site, "bad barrier", "%d threads: not a multiple of 32 within the block's %d", threads,
         block.threads);
  auto& barrier = block.named[id];
  Thread& me = *current;
  if (barrier.arrived && barrier.expected != threads)
    fail(site, "divergent barrier", "barrier %d is for %d threads here, and for %d at %s:%d", id,
         threads, barrier.expected, barrier.site.file, barrier.site.line);
  barrier.expected = threads;
  barrier.site = site;
  const unsigned generation = barrier.generation;
  me.site = site;
  me.barrier_id = id;
  if (wait) me.state = State::at_named_barrier;
  release(&barrier.order[generation % 2]);
  access::named_barrier_arrival(id);
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.generation;
    for (int i = 0; i < block.threads; ++i) {
      Thread& t = block.thread[i];
      if (t.state != State::at_named_barrier || t.barrier_id != id) continue;
      access::named_barrier_departure(id, t);
      make_ready(t);
    }
    access::named_barrier_reset(id);
  }
  if (!wait) return;
  yield_thread();
  acquire(&barrier.order[generation % 2]);
}

}  // namespace emulation
