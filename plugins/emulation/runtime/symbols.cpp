// Code addresses to source lines, by binutils' addr2line: slow, and needed for faults only.
#include <dlfcn.h>
#include <unistd.h>

#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "fault.hpp"

namespace emulation {
namespace {

bool ends_with(const std::string& file, const char* end) {
  const size_t n = std::strlen(end);
  return file.size() >= n && file.compare(file.size() - n, n, end) == 0;
}

bool is_kernel_source(const std::string& file) {
  return (ends_with(file, ".cuh") || ends_with(file, ".cu") || ends_with(file, ".cpp")) &&
         !ends_with(file, "/portable.cuh");
}

// The function and line of an address, and those it was inlined into, innermost first.
std::vector<SourceLine> frames(const void* code) {
  Dl_info module;
  if (!dladdr(code, &module)) return {};
  // The main program's own name may be relative to a folder that was left.
  char program[PATH_MAX] = {};
  const bool is_library = std::strstr(module.dli_fname, ".so") != nullptr;
  if (!is_library && readlink("/proc/self/exe", program, sizeof program - 1) < 0) return {};
  const ptrdiff_t offset =
      static_cast<const char*>(code) - static_cast<const char*>(module.dli_fbase);
  const std::string command = text("LD_PRELOAD= addr2line -f -C -i -e '%s' 0x%tx 2>/dev/null",
                                   is_library ? module.dli_fname : program, offset);
  FILE* pipe = popen(command.c_str(), "r");
  if (!pipe) return {};
  std::vector<SourceLine> result;
  char function[4096], line[4096];
  while (std::fgets(function, sizeof function, pipe) && std::fgets(line, sizeof line, pipe)) {
    const char* colon = std::strrchr(line, ':');
    if (!colon) continue;
    SourceLine frame;
    frame.function.assign(function, std::strcspn(function, "\n"));
    frame.file.assign(line, colon - line);
    frame.line = std::atoi(colon + 1);
    result.push_back(frame);
  }
  pclose(pipe);
  return result;
}

}  // namespace

SourceLine source_line(const void* return_address) {
  // A return address lies after the call, perhaps already on the next line.
  const auto all = frames(static_cast<const char*>(return_address) - 1);
  for (const SourceLine& frame : all)
    if (is_kernel_source(frame.file)) return frame;
  return all.empty() ? SourceLine{"?", "?", 0} : all.front();
}

std::string function_name(const void* function) {
  const auto all = frames(function);
  if (all.empty()) return "kernel";
  std::string name = all.back().function;
  for (const char* noise : {"void ", "(anonymous namespace)::"}) {
    const size_t at = name.find(noise);
    if (at == 0) name.erase(0, std::strlen(noise));
  }
  return name.substr(0, name.find('('));
}

}  // namespace emulation
