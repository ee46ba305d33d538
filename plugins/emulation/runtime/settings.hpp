// The schedule and the imitated device, from the environment or from control.h.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emulation {

enum class Order { forward, reversed, random };

struct Device {
  int sm, processors;
  size_t shared_opt_in;  // bytes a block may ask for
};

struct Settings {
  Order order;
  uint64_t seed;
  Device device;
  uint64_t block_sampling;
};

const Settings& settings();

}  // namespace emulation
