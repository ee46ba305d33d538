// What the emulation costs: a thread, a barrier, a shuffle, a load. Prints nanoseconds
// of processor time, since the machine may be busy.
#include <ctime>

#include "check.hpp"
#include "common/portable.cuh"

namespace {

__global__ void barriers(int* out, int n) {
  for (int i = 0; i < n; ++i) __syncthreads();
  if (threadIdx.x == 0) gpu::store(out, n);
}
__global__ void shuffles(int* out, int n) {
  int v = threadIdx.x;
  for (int i = 0; i < n; ++i) v += __shfl_xor_sync(~0u, v, 1);
  gpu::store(out + threadIdx.x, v);
}
__global__ void loads(const int* in, int* out, int n) {
  int sum = 0;
  for (int i = 0; i < n; ++i) sum += gpu::load(in + (threadIdx.x + i) % 1024);
  gpu::store(out + threadIdx.x, sum);
}
__global__ void scale(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) gpu::store(y + i, 2 * gpu::load(x + i));
}

double now() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return t.tv_sec * 1e9 + t.tv_nsec;
}

template <class F>
double nanoseconds(F f) {
  double best = 1e30;
  for (int i = 0; i < 3; ++i) {
    const double start = now();
    f();
    best = std::min(best, now() - start);
  }
  return best;
}

}  // namespace

int main() {
  constexpr int kThreads = 1024, kRounds = 500, kMany = 1 << 20;
  constexpr double kEach = static_cast<double>(kThreads) * kRounds;
  DeviceArray<int> in(kThreads, 1), out(kThreads, 0);
  DeviceArray<float> x(kMany, 1.f), y(kMany, 0.f);
  const double thread =
      nanoseconds([&] { gpu::launch(scale, kMany / 256, 256, 0, nullptr, x, y, kMany); });
  const double barrier =
      nanoseconds([&] { gpu::launch(barriers, 1, kThreads, 0, nullptr, out, kRounds); });
  const double shuffle =
      nanoseconds([&] { gpu::launch(shuffles, 1, kThreads, 0, nullptr, out, kRounds); });
  const double load =
      nanoseconds([&] { gpu::launch(loads, 1, kThreads, 0, nullptr, in, out, kRounds); });
  std::printf("thread %.1f\nbarrier %.1f\nshuffle %.1f\nload %.1f\n", thread / kMany,
              barrier / kEach, shuffle / kEach, load / kEach);
  CHECK(emulation_fault_count() == 0);
  return finish();
}
