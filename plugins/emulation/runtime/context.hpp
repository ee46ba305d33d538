// Stacks that can be switched between: each CUDA thread that has started runs on one.
#pragma once
#include <cstddef>

namespace emulation {

struct Context {
  void* stack_pointer = nullptr;
  char* stack = nullptr;  // lowest usable byte; a guard page lies below
  size_t size = 0;
  void* tsan_fiber = nullptr;
  void* asan_fake_stack = nullptr;
  Context* next = nullptr;  // in a ContextList
};

// A stack of contexts that allocates nothing: ThreadSanitizer would see threads share the heap.
struct ContextList {
  Context* first = nullptr;
  void push(Context* context) {
    context->next = first;
    first = context;
  }
  Context* pop() {
    Context* context = first;
    if (context) first = context->next;
    return context;
  }
};

// A context that runs `entry`, which never returns, when it is first switched to.
Context* create_context(void (*entry)());
// Forgets what the context was doing, so that it starts at `entry` again.
void restart_context(Context&, void (*entry)());
void destroy_context(Context*);

// Suspends the caller, which runs on `from`, and goes on in `to`.
void switch_context(Context& from, Context& to);
// The first thing that `entry` calls, with its own context.
void entered_context(Context&);

// The context of the host thread; call before the first switch of a launch.
void adopt_host_context(Context&);

// True if ThreadSanitizer watches: then each CUDA thread of a block needs a context of its own.
bool thread_sanitizer();
// Order for ThreadSanitizer: what came before release(o) is seen after a later acquire(o).
void release(void* object);
void acquire(void* object);
// While one exists, ThreadSanitizer looks away: the last lane of a warp works on all lanes' values.
struct Unwatched {
  Unwatched();
  ~Unwatched();
};

}  // namespace emulation
