#include "scheduler.hpp"

#include <algorithm>
#include <cstring>
#include <map>

#include "access.hpp"
#include "fault.hpp"
#include "launch.hpp"
#include "settings.hpp"

namespace emulation {

Index index;
Block block;
Thread* current = nullptr;

namespace {

Context host;
ContextList idle;   // contexts that no thread of this block uses
ContextList spent;  // those whose thread has exited, kept apart under ThreadSanitizer
const Kernel* kernel = nullptr;
bool abandoned = false;
char launch_order, end_order;

// ---- who runs next ----
// Threads that can run; each is in the ring at most once.
uint16_t ready[kMaxThreads];
unsigned first_ready = 0, end_ready = 0;
Order order = Order::forward;
uint64_t random_state = 1;

uint64_t next_random() {  // xorshift64
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state;
}

Thread* pick() {
  if (first_ready == end_ready) return nullptr;
  uint16_t& head = ready[first_ready % kMaxThreads];
  if (order == Order::random) {
    const unsigned other = first_ready + next_random() % (end_ready - first_ready);
    std::swap(head, ready[other % kMaxThreads]);
  } else if (order == Order::reversed) {
    return &block.thread[ready[--end_ready % kMaxThreads]];
  }
  ++first_ready;
  return &block.thread[head];
}

void set_running(Thread& t) {
  current = &t;
  index.thread = t.index;
}

void context_main();

Context* take_context() {
  Context* context = idle.pop();
  return context ? context : create_context(context_main);
}

// Goes on with `next`, or with the host if there is none, on another stack than `from`.
void go_to(Context& from, Thread* next) {
  if (!next) {
    switch_context(from, host);
    return;
  }
  if (!next->context) next->context = take_context();
  set_running(*next);
  switch_context(from, *next->context);
}

void exit_thread(Thread& t) {
  t.state = State::exited;
  t.copies.clear();
  t.groups.clear();
  ++block.exited;
  warp_exit(t);
  block_barrier_try();
  t.context = nullptr;
}

// What every context does: run threads from their first instruction to their last. A thread that
// has not started yet needs no switch, unless ThreadSanitizer must tell it from the last one.
void context_main() {
  Context& own = *current->context;
  entered_context(own);
  for (;;) {
    Thread& t = *current;
    acquire(&launch_order);
    kernel->invoke(kernel->closure);
    release(&end_order);
    exit_thread(t);
    Thread* next = pick();
    if (next && !next->context && !thread_sanitizer()) {
      next->context = &own;
      set_running(*next);
    } else {
      (thread_sanitizer() ? spent : idle).push(&own);
      go_to(own, next);
    }
  }
}

std::string waiting_threads() {
  std::map<std::string, int> count;
  for (int i = 0; i < block.threads; ++i) {
    const Thread& t = block.thread[i];
    ++count[t.state == State::exited
                ? "exited"
                : text("at %s, %s:%d", t.site.operation, t.site.file, t.site.line)];
  }
  std::string result;
  for (const auto& [where, n] : count)
    result += text("%s%d %s", result.empty() ? "" : "; ", n, where.c_str());
  return result;
}

void report_deadlock() {
  for (int i = 0; i < block.threads; ++i) {
    Thread& t = block.thread[i];
    if (t.state == State::exited) continue;
    set_running(t);
    report(t.site.file, t.site.line, "deadlock",
           "the threads of the block wait for each other for ever: " + waiting_threads());
    current = nullptr;
    abandoned = true;
    return;
  }
}

void prepare_block(dim3 size) {
  block.exited = 0;
  for (int w = 0; w * kLanes < block.threads; ++w) {
    const int lanes = std::min(kLanes, block.threads - w * kLanes);
    block.warp[w] = {};
    block.warp[w].exists = lanes == kLanes ? ~0u : (1u << lanes) - 1;
  }
  block.barrier.arrived = block.barrier.predicate_true = 0;
  for (auto& named : block.named) named.arrived = 0;
  first_ready = end_ready = 0;
  uint3 at{0, 0, 0};
  for (int i = 0; i < block.threads; ++i) {
    Thread& t = block.thread[i];
    t.id = i;
    t.index = at;
    t.context = nullptr;
    make_ready(t);
    if (++at.x < size.x) continue;
    at.x = 0;
    if (++at.y < size.y) continue;
    at.y = 0;
    ++at.z;
  }
  while (Context* context = spent.pop()) idle.push(context);
}

void run_block(uint64_t number, dim3 grid, dim3 size) {
  index.block = {static_cast<unsigned>(number % grid.x),
                 static_cast<unsigned>(number / grid.x % grid.y),
                 static_cast<unsigned>(number / grid.x / grid.y)};
  prepare_block(size);
  access::block_begins(number);
  release(&launch_order);
  go_to(host, pick());
  acquire(&end_order);
  if (!abandoned && block.exited == block.threads) named_barriers_end();
  current = nullptr;
  if (!abandoned && block.exited < block.threads) report_deadlock();
  ++counters.blocks;
  counters.threads += block.threads;
}

// Threads that never came to their end leave their contexts in mid-kernel.
void recover_contexts() {
  for (int i = 0; i < block.threads; ++i) {
    Thread& t = block.thread[i];
    if (!t.context) continue;
    restart_context(*t.context, context_main);
    idle.push(t.context);
    t.context = nullptr;
    t.copies.clear();
    t.groups.clear();
  }
}

struct ContextOwner {
  ~ContextOwner() {
    while (Context* context = idle.pop()) destroy_context(context);
    while (Context* context = spent.pop()) destroy_context(context);
  }
} context_owner;

}  // namespace

void make_ready(Thread& t) {
  t.state = State::ready;
  ready[end_ready++ % kMaxThreads] = static_cast<uint16_t>(t.id);
}

void yield_thread() {
  Thread& me = *current;
  Thread* next = pick();
  if (next == &me) return;
  go_to(*me.context, next);
}

void abandon_launch() {
  if (!in_kernel()) return;
  abandoned = true;
  release(&end_order);
  switch_context(*current->context, host);
}

std::string kernel_name() { return function_name(kernel->function); }

int lane() { return current->id % kLanes; }

void require(const Site& site, int sm) {
  if (settings().device.sm < sm)
    fail(site, "unsupported instruction", "needs sm_%d, this device is sm_%d", sm,
         settings().device.sm);
}

bool execute(const Kernel& k, dim3 grid, dim3 size, void* dynamic, size_t dynamic_bytes) {
  const int faults_before = emulation_fault_count();
  kernel = &k;
  abandoned = false;
  order = settings().order;
  random_state = settings().seed * 0x9E3779B97F4A7C15ull | 1;
  block.threads = static_cast<int>(size.x * size.y * size.z);
  index.grid_size = grid;
  index.block_size = size;
  adopt_host_context(host);
  access::launch_begins(k.function, dynamic, dynamic_bytes);
  const uint64_t blocks = static_cast<uint64_t>(grid.x) * grid.y * grid.z;
  const uint64_t every = settings().block_sampling;
  const uint64_t start = order == Order::random ? next_random() % blocks : 0;
  for (uint64_t i = 0; i < blocks && !abandoned; ++i) {
    const uint64_t number = order == Order::reversed ? blocks - 1 - i : (start + i) % blocks;
    if (number % every) continue;
    // What no block has written must not look like data of the block before.
    std::memset(dynamic, 0xFF, dynamic_bytes);
    run_block(number, grid, size);
  }
  if (abandoned) recover_contexts();
  return emulation_fault_count() == faults_before;
}

}  // namespace emulation
