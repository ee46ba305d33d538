#pragma once
#include <cstddef>

#include "../access.hpp"

namespace emulation {

enum class Access { load, store, atomic };

// An access that the compiler announced; `code` is an address in the code that makes it.
void watch(const void*, size_t bytes, Access, const void* code);

}  // namespace emulation
