// Linked into the plugin library under test, whose own objects call these in place of the heap
// (ld --wrap): how often they do, and what they do when there is no memory.
#include <cstdint>
#include <cstdlib>
#include <new>

extern "C" {
uint64_t conformance_heap_calls = 0;
int64_t conformance_heap_fails_in = -1;  // calls until one finds no memory; -1: none does

static bool exhausted() {
  ++conformance_heap_calls;
  return conformance_heap_fails_in >= 0 && conformance_heap_fails_in-- == 0;
}

void* __wrap_malloc(size_t size) { return exhausted() ? nullptr : std::malloc(size); }
void* __wrap_calloc(size_t n, size_t size) { return exhausted() ? nullptr : std::calloc(n, size); }
void* __wrap_realloc(void* p, size_t size) { return exhausted() ? nullptr : std::realloc(p, size); }
void* __wrap__Znwm(size_t size) {
  if (exhausted()) throw std::bad_alloc();
  return ::operator new(size);
}
void* __wrap__Znam(size_t size) {
  if (exhausted()) throw std::bad_alloc();
  return ::operator new[](size);
}
void* __wrap__ZnwmRKSt9nothrow_t(size_t size, const std::nothrow_t& none) {
  return exhausted() ? nullptr : ::operator new(size, none);
}
void* __wrap__ZnamRKSt9nothrow_t(size_t size, const std::nothrow_t& none) {
  return exhausted() ? nullptr : ::operator new[](size, none);
}
}
