// One warp's ldmatrix and mma on registers that test_matrices.py fills; it knows the layouts.
#include "common/portable.cuh"

namespace {

using A80 = gpu::Arch<80>;

// Registers are stored as [lane][register].
__global__ void multiply_f16(const uint32_t* a, const uint32_t* b, const float* c, float* d) {
  const int l = threadIdx.x;
  uint32_t fa[4], fb[2];
  float fc[4], fd[4];
  for (int i = 0; i < 4; ++i) fa[i] = gpu::load(a + l * 4 + i);
  for (int i = 0; i < 2; ++i) fb[i] = gpu::load(b + l * 2 + i);
  for (int i = 0; i < 4; ++i) fc[i] = gpu::load(c + l * 4 + i);
  gpu::mma_f16<A80>(fd, fa, fb, fc);
  for (int i = 0; i < 4; ++i) gpu::store(d + l * 4 + i, fd[i]);
}

__global__ void multiply_s8(const uint32_t* a, const uint32_t* b, const int* c, int* d) {
  const int l = threadIdx.x;
  uint32_t fa[4], fb[2];
  int fc[4], fd[4];
  for (int i = 0; i < 4; ++i) fa[i] = gpu::load(a + l * 4 + i);
  for (int i = 0; i < 2; ++i) fb[i] = gpu::load(b + l * 2 + i);
  for (int i = 0; i < 4; ++i) fc[i] = gpu::load(c + l * 4 + i);
  gpu::mma_s8<A80>(fd, fa, fb, fc);
  for (int i = 0; i < 4; ++i) gpu::store(d + l * 4 + i, fd[i]);
}

// Four 8 x 8 matrices of 16-bit elements, loaded by x1, x2 and x4: 7 registers a lane.
template <bool Transposed>
__global__ void load_matrices(const uint16_t* matrices, uint32_t* registers) {
  __shared__ __align__(16) uint16_t s[32][8];
  const int l = threadIdx.x;
  for (int i = 0; i < 8; ++i) s[l][i] = gpu::load(matrices + l * 8 + i);
  __syncwarp();
  uint32_t r1, r2[2], r4[4];
  gpu::ldmatrix_x1<A80, Transposed>(r1, s[l % 8]);
  gpu::ldmatrix_x2<A80, Transposed>(r2, s[l % 16]);
  gpu::ldmatrix_x4<A80, Transposed>(r4, s[l]);
  uint32_t* out = registers + l * 7;
  gpu::store(out, r1);
  for (int i = 0; i < 2; ++i) gpu::store(out + 1 + i, r2[i]);
  for (int i = 0; i < 4; ++i) gpu::store(out + 3 + i, r4[i]);
}

}  // namespace

extern "C" {
int run_mma_f16(const uint32_t* a, const uint32_t* b, const float* c, float* d) {
  return gpu::launch(multiply_f16, 1, 32, 0, nullptr, a, b, c, d);
}
int run_mma_s8(const uint32_t* a, const uint32_t* b, const int* c, int* d) {
  return gpu::launch(multiply_s8, 1, 32, 0, nullptr, a, b, c, d);
}
int run_ldmatrix(const uint16_t* matrices, int transposed, uint32_t* registers) {
  return gpu::launch(transposed ? load_matrices<true> : load_matrices<false>, 1, 32, 0, nullptr,
                     matrices, registers);
}
}
