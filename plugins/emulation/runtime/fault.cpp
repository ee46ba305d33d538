#include "fault.hpp"

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <set>
#include <vector>

#include "scheduler.hpp"

namespace emulation {
namespace {

std::vector<std::string> faults;
std::set<std::string> reported;  // kind, file and line of each
char report_order;               // ThreadSanitizer's object for the two

std::string position() {
  if (!in_kernel()) return "";
  const uint3 b = index.block, t = index.thread;
  return text(" [%s, block (%u,%u,%u), thread (%u,%u,%u)]", kernel_name().c_str(), b.x, b.y, b.z,
              t.x, t.y, t.z);
}

std::string format_arguments(const char* format, va_list arguments) {
  char buffer[1024];
  std::vsnprintf(buffer, sizeof buffer, format, arguments);
  return buffer;
}

}  // namespace

EmulationCounters counters;

std::string text(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const std::string result = format_arguments(format, arguments);
  va_end(arguments);
  return result;
}

void report(const std::string& file, int line, const char* kind, const std::string& message) {
  acquire(&report_order);
  if (reported.insert(text("%s %s:%d", kind, file.c_str(), line)).second) {
    faults.push_back(text("%s:%d: %s: ", file.c_str(), line, kind) + message + position());
    std::fprintf(stderr, "emulation: %s\n", faults.back().c_str());
  }
  release(&report_order);
}

void fail(const Site& site, const char* kind, const char* format, ...) {
  {  // abandon_launch runs no destructors
    va_list arguments;
    va_start(arguments, format);
    const std::string message = format_arguments(format, arguments);
    va_end(arguments);
    report(site.file, site.line, kind, std::string(site.operation) + ": " + message);
  }
  abandon_launch();
}

}  // namespace emulation

void emulation_reset() {
  emulation::faults.clear();
  emulation::reported.clear();
  emulation::counters = {};
  cudaGetLastError();
}

const EmulationCounters* emulation_counters() { return &emulation::counters; }

uint64_t emulation_counter(const char* name) {
#define EMULATION_LOOKUP(counter) \
  if (!std::strcmp(name, #counter)) return emulation::counters.counter;
  EMULATION_COUNTERS(EMULATION_LOOKUP)
#undef EMULATION_LOOKUP
  return UINT64_MAX;
}

int emulation_fault_count() { return static_cast<int>(emulation::faults.size()); }

const char* emulation_fault(int i) {
  return i >= 0 && i < emulation_fault_count() ? emulation::faults[i].c_str() : "";
}
