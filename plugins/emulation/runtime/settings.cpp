#include "settings.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "../control.h"

namespace emulation {
namespace {

// Shared memory: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
constexpr Device kDevices[] = {
    {72, 8, 96 << 10},  {80, 108, 163 << 10}, {86, 84, 99 << 10},    {87, 16, 163 << 10},
    {89, 76, 99 << 10}, {90, 132, 227 << 10}, {100, 148, 227 << 10}, {120, 170, 99 << 10},
};

bool parse_schedule(const char* text, Settings& s) {
  if (!std::strcmp(text, "seq") || !std::strcmp(text, "rev")) {
    s.order = text[0] == 's' ? Order::forward : Order::reversed;
    return true;
  }
  if (std::strncmp(text, "rand:", 5) != 0 || !text[5]) return false;
  char* end;
  const uint64_t seed = std::strtoull(text + 5, &end, 10);
  if (*end) return false;
  s.order = Order::random;
  s.seed = seed;
  return true;
}

bool parse_device(int sm, Settings& s) {
  for (const Device& device : kDevices)
    if (device.sm == sm) {
      s.device = device;
      return true;
    }
  return false;
}

void refuse(const char* variable, const char* value) {
  std::fprintf(stderr, "emulation: %s=%s is not known; see plugins/emulation/control.h\n", variable,
               value);
  std::exit(2);
}

Settings from_environment() {
  Settings s{Order::forward, 0, {}, 1};
  const char* schedule = std::getenv("EMULATION_SCHEDULE");
  if (schedule && !parse_schedule(schedule, s)) refuse("EMULATION_SCHEDULE", schedule);
  const char* sm = std::getenv("EMULATION_ARCH");
  if (!parse_device(sm ? std::atoi(sm) : 87, s)) refuse("EMULATION_ARCH", sm);
  return s;
}

Settings& mutable_settings() {
  static Settings s = from_environment();
  return s;
}

}  // namespace

const Settings& settings() { return mutable_settings(); }

}  // namespace emulation

int emulation_set_schedule(const char* schedule) {
  return emulation::parse_schedule(schedule, emulation::mutable_settings()) ? 0 : -1;
}
int emulation_set_architecture(int sm) {
  return emulation::parse_device(sm, emulation::mutable_settings()) ? 0 : -1;
}
void emulation_set_block_sampling(uint64_t every) {
  emulation::mutable_settings().block_sampling = every ? every : 1;
}
