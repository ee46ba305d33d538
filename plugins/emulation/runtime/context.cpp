#include "context.hpp"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>

// Present when the program is linked with the sanitizer, null otherwise.
#define WEAK __attribute__((weak))
extern "C" {
WEAK void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size);
WEAK void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, size_t* size);
WEAK void __asan_unpoison_memory_region(const volatile void*, size_t);
WEAK void* __tsan_create_fiber(unsigned flags);
WEAK void __tsan_destroy_fiber(void*);
WEAK void* __tsan_get_current_fiber();
WEAK void __tsan_switch_to_fiber(void*, unsigned flags);
WEAK void __tsan_acquire(void*);
WEAK void __tsan_release(void*);
WEAK void AnnotateIgnoreReadsBegin(const char* file, int line);
WEAK void AnnotateIgnoreReadsEnd(const char* file, int line);
WEAK void AnnotateIgnoreWritesBegin(const char* file, int line);
WEAK void AnnotateIgnoreWritesEnd(const char* file, int line);
}

// emulation_switch(save, load): stores the callee-saved registers and the stack pointer, takes
// the others. The return address on the new stack decides where it goes on.
extern "C" void emulation_switch(void** save, void* load);
#if defined(__x86_64__)
asm(R"(
  .text
  .globl emulation_switch
  .hidden emulation_switch
  .type emulation_switch, @function
emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size emulation_switch, . - emulation_switch
)");
constexpr int kSavedWords = 6;  // then the return address
#elif defined(__aarch64__)
asm(R"(
  .text
  .globl emulation_switch
  .hidden emulation_switch
  .type emulation_switch, %function
emulation_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
  .size emulation_switch, . - emulation_switch
)");
constexpr int kSavedWords = 20, kLinkRegister = 11;
#else
#error "the emulation switches stacks on x86-64 and aarch64 only"
#endif

namespace emulation {
namespace {

constexpr size_t kStack = 256 << 10, kGuard = 4 << 10;
constexpr unsigned kNoOrder = 1;  // __tsan_switch_to_fiber: a switch orders nothing

void prepare_stack(Context& context, void (*entry)()) {
  auto* top = reinterpret_cast<uint64_t*>(context.stack + context.size - 64);
#if defined(__x86_64__)
  *--top = 0;  // where `entry` would return to, and the alignment that a call leaves
  *--top = reinterpret_cast<uint64_t>(entry);
  for (int i = 0; i < kSavedWords; ++i) *--top = 0;
#else
  top -= kSavedWords;
  for (int i = 0; i < kSavedWords; ++i) top[i] = 0;
  top[kLinkRegister] = reinterpret_cast<uint64_t>(entry);
#endif
  context.stack_pointer = top;
}

}  // namespace

Context* create_context(void (*entry)()) {
  void* memory = mmap(nullptr, kStack + kGuard, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, kGuard, PROT_NONE) != 0) std::abort();
  auto* context = new Context;
  context->stack = static_cast<char*>(memory) + kGuard;
  context->size = kStack;
  if (__tsan_create_fiber) context->tsan_fiber = __tsan_create_fiber(0);
  prepare_stack(*context, entry);
  return context;
}

void restart_context(Context& context, void (*entry)()) {
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(context.stack, context.size);
  if (__tsan_destroy_fiber) {
    __tsan_destroy_fiber(context.tsan_fiber);
    context.tsan_fiber = __tsan_create_fiber(0);
  }
  context.asan_fake_stack = nullptr;
  prepare_stack(context, entry);
}

void destroy_context(Context* context) {
  if (__tsan_destroy_fiber) __tsan_destroy_fiber(context->tsan_fiber);
  munmap(context->stack - kGuard, kStack + kGuard);
  delete context;
}

void adopt_host_context(Context& context) {
  if (__tsan_get_current_fiber) context.tsan_fiber = __tsan_get_current_fiber();
  context.stack = nullptr;  // learnt at the first switch away
}

namespace {
Context* left;  // the context that the last switch suspended
}

void entered_context(Context& context) {
  if (!__sanitizer_finish_switch_fiber) return;
  const void* bottom;
  size_t size;
  __sanitizer_finish_switch_fiber(context.asan_fake_stack, &bottom, &size);
  if (!left->stack) {
    left->stack = const_cast<char*>(static_cast<const char*>(bottom));
    left->size = size;
  }
}

void switch_context(Context& from, Context& to) {
  left = &from;
  if (__sanitizer_start_switch_fiber)
    __sanitizer_start_switch_fiber(&from.asan_fake_stack, to.stack, to.size);
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(to.tsan_fiber, kNoOrder);
  emulation_switch(&from.stack_pointer, to.stack_pointer);
  entered_context(from);
}

bool thread_sanitizer() { return __tsan_create_fiber != nullptr; }
void release(void* object) {
  if (__tsan_release) __tsan_release(object);
}
void acquire(void* object) {
  if (__tsan_acquire) __tsan_acquire(object);
}

Unwatched::Unwatched() {
  if (!AnnotateIgnoreReadsBegin) return;
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
}
Unwatched::~Unwatched() {
  if (!AnnotateIgnoreReadsEnd) return;
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
}

}  // namespace emulation
