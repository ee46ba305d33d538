// The kernels of kernels.cuh for a GPU, and one kernel twice: with gpu::load and gpu::store, and by
// plain accesses. Both must become the same instructions.
#include "kernels.cuh"

#ifdef __NVCC__  // which compiles for sm_80 and newer; clang compiles for sm_72
template __global__ void warp_reduce<int>(const int*, int*);
#endif
template __global__ void tiled_product<16>(const float*, const float*, float*, int, int, int);
template __global__ void fused_multiply<half2, half>(const half*, const half*, half*, int, half);
template __global__ void wmma_product<16, 16, half, float>(const half*, const half*, float*, int,
                                                           int);
template __global__ void wmma_product<16, 16, signed char, int>(const signed char*,
                                                                const signed char*, int*, int, int);
template __global__ void mma_product<gpu::Arch<80>>(const half*, const half*, float*, int, int);
template __global__ void mma_product_int8<gpu::Arch<80>>(const signed char*, const signed char*,
                                                         int*, int, int);
template __global__ void async_copies<gpu::Arch<80>>(const char*, char*, int);

struct alignas(16) EightHalves {
  half v[8];
};

template <bool Plain, class T>
GPU_DEVICE void copy(const T* in, T* out) {
  if (Plain)
    out[threadIdx.x] = in[threadIdx.x];
  else
    store(out + threadIdx.x, load(in + threadIdx.x));
}

extern "C" {
__global__ void copy_words(const float* in, float* out) { copy<false>(in, out); }
__global__ void copy_words_plain(const float* in, float* out) { copy<true>(in, out); }
__global__ void copy_vectors(const uint4* in, uint4* out) { copy<false>(in, out); }
__global__ void copy_vectors_plain(const uint4* in, uint4* out) { copy<true>(in, out); }
// No plain twin: a compiler may split the copy of a structure, and load never does.
__global__ void copy_halves(const EightHalves* in, EightHalves* out) { copy<false>(in, out); }

cudaError_t launch_copy(const float* in, float* out, cudaStream_t stream) {
  return gpu::launch(copy_words, 1, 32, 0, stream, in, out);
}
}
