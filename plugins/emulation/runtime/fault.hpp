// Faults: recorded, printed once, and read back through control.h.
#pragma once
#include <string>

#include "../control.h"
#include "../runtime.hpp"

namespace emulation {

extern EmulationCounters counters;

// Records the fault and lets the kernel go on. One report for each kind, file and line.
void report(const std::string& file, int line, const char* kind, const std::string& message);

std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));

// The source line of a code address, from the program's debug information. Frames inlined from
// headers (the emulation's, NVIDIA's, the C++ library's) are passed over.
struct SourceLine {
  std::string function, file;
  int line = 0;
};
SourceLine source_line(const void* return_address);
std::string function_name(const void* function);

}  // namespace emulation
