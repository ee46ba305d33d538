#pragma once
#include "../runtime.hpp"

namespace emulation {

// Runs the kernel to its end; false if a fault was found. The launch has been validated.
bool execute(const Kernel&, dim3 grid, dim3 block, void* dynamic, size_t dynamic_bytes);

}  // namespace emulation
