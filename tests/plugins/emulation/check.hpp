// The few things that the C++ tests of the emulation share.
#pragma once
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "emulation/control.h"

inline int failures = 0;

#define CHECK(condition)                                                    \
  do {                                                                      \
    if (!(condition)) {                                                     \
      ++failures;                                                           \
      std::printf("%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
    }                                                                       \
  } while (0)

// Device memory that is filled and read as on a real device.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t n) : n_(n) {
    cudaMalloc(reinterpret_cast<void**>(&p_), n * sizeof(T));
  }
  explicit DeviceArray(const std::vector<T>& v) : DeviceArray(v.size()) {
    cudaMemcpy(p_, v.data(), n_ * sizeof(T), cudaMemcpyHostToDevice);
  }
  DeviceArray(size_t n, T value) : DeviceArray(std::vector<T>(n, value)) {}
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(p_); }
  operator T*() const { return p_; }
  std::vector<T> host() const {
    std::vector<T> v(n_);
    cudaMemcpy(v.data(), p_, n_ * sizeof(T), cudaMemcpyDeviceToHost);
    return v;
  }

 private:
  T* p_ = nullptr;
  size_t n_;
};

inline std::mt19937& generator() {
  static std::mt19937 g(7);
  return g;
}
inline float uniform() { return std::uniform_real_distribution<float>(-1, 1)(generator()); }
inline int integer(int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(generator());
}

// The largest difference; NaN counts as infinite.
template <class A, class B>
double difference(const std::vector<A>& a, const std::vector<B>& b) {
  if (a.size() != b.size()) return INFINITY;
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double d = std::fabs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    worst = std::isnan(d) ? INFINITY : std::fmax(worst, d);
  }
  return worst;
}

inline int finish() {
  std::printf("%d failures\n", failures);
  return failures != 0;
}
