// What the device headers ask of the runtime. Everything here is compiled once, without
// sanitizers, in runtime/; the headers beside this file give it CUDA's names.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>

namespace emulation {

// Where in the kernel source an operation stands.
struct Site {
  const char* file;
  int line;
  const char* operation;
};
// Default arguments that take the caller's position, and the Site made of them.
#define EMULATION_CALLER const char *file_ = __builtin_FILE(), int line_ = __builtin_LINE()
#define EMULATION_SITE(operation) \
  ::emulation::Site { file_, line_, operation }
// Inlined even at -O0, so that a return address in the runtime lies in the kernel's own code.
#define EMULATION_INLINE inline __attribute__((always_inline))

// The running thread's place, read by kernels as threadIdx, blockIdx, blockDim and gridDim.
struct Index {
  uint3 thread, block;
  dim3 block_size, grid_size;
};
extern Index index;

// ---- faults ----
// Records the fault and gives up the launch; called inside a kernel it does not return.
void fail(const Site&, const char* kind, const char* format, ...)
    __attribute__((format(printf, 3, 4)));
// Fails unless the imitated device has at least this compute capability.
void require(const Site&, int sm);

// ---- threads of a block ----
struct BarrierResult {
  int threads, predicate_true;
};
BarrierResult block_barrier(const Site&, bool predicate);
// `threads` of the block meet at barrier `id`; without `wait` the caller only reports its arrival.
void named_barrier(const Site&, int id, int threads, bool wait);

// ---- lanes of a warp ----
enum class Reduction {
  ballot,
  match_any,
  match_all,
  add,
  min,
  max,
  min_signed,
  max_signed,
  bit_and,
  bit_or,
  bit_xor
};
int lane();
unsigned active_lanes();
void warp_barrier(const Site&, unsigned mask);
uint64_t shuffle(const Site&, unsigned mask, uint64_t value, int source_lane);
uint32_t reduce(const Site&, unsigned mask, Reduction, uint64_t value);
// Fails unless all 32 lanes come here.
void whole_warp(const Site&);

// ---- matrix instructions; the register layouts are those of the PTX ISA ----
// Each lane brings one 16-byte row; matrix m takes the rows of lanes 8m to 8m + 7.
void ldmatrix(const Site&, const void* row, int matrices, bool transposed, uint32_t* registers);
void mma_f16(const Site&, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
             const float (&c)[4]);
void mma_s8(const Site&, int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
            const int (&c)[4]);
// d = a b + c over fragments whose element e of a tile sits in lane e / n as element e % n.
enum class Element { f16, f32, s8, u8, s32 };
struct WmmaShape {
  int m, n, k;
  Element input, c, d;
};
void wmma(const Site&, const WmmaShape&, const void* a, const void* b, const void* c, void* d);

// ---- memory ----
// Called before a kernel touches global memory; counts, and in the checked runtime checks.
void global_load(const void*, size_t bytes);
void global_store(const void*, size_t bytes);
// Called before an access that may be to global memory or not; counts only if it is.
void count_if_global(const void*, size_t bytes, bool store);
// The same for an atomic; `fence` is __threadfence.
void atomic(const void*, size_t bytes);
void fence();
// Shared memory of the launch whose size the host chose.
void* dynamic_shared();
// cp.async: copies wait in the thread that issued them until it waits for their group.
struct Copy {
  void* to;
  const void* from;
  int bytes, filled;  // `filled` bytes from `from`, the rest zeros
};
void copy_start(const Site&, const Copy&);
void copy_commit();
// The next copy to carry out so that at most `keep` groups stay in flight; false if none.
bool copy_next(int keep, Copy&);

// ---- launch ----
struct Kernel {
  const void* function;
  void (*invoke)(const void* closure);
  std::function<void()> (*own)(const void* closure);  // a copy that outlives the caller
  const void* closure;
};
cudaError_t launch(const Kernel&, dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t);

}  // namespace emulation
