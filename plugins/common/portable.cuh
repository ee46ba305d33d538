// The one header of a kernel source. nvcc and clang (-x cuda) compile the source for a GPU; a host
// compiler (-x c++) compiles it for the CPU emulation in ../emulation. What differs between
// compilers or architectures has a name here, in namespace gpu:
//
//   launch(kernel, grid, block, shared_bytes, stream, arguments...)
//   GPU_DYNAMIC_SHARED(T, name)     T* name = the launch's dynamic shared memory, 128-byte aligned
//   GPU_DEVICE                      a small device function
//   GPU_UNROLL, GPU_NO_UNROLL       before a loop
//   Arch<SM>, with_arch(sm, f)      what an architecture has, as a template parameter
//   load, load_readonly, load_streaming, store     global memory, 1 to 16 bytes a thread
//   barrier_sync(id, threads), barrier_arrive      barriers of some warps of a block
//   cp_async<A, Bytes>, cp_async_commit<A>, cp_async_wait<A, Keep>
//   ldmatrix_x1/x2/x4<A, Transposed>, mma_f16<A>, mma_s8<A>
//
// and nvcuda::wmma, shuffles, votes, atomics, __dp4a and arithmetic keep CUDA's own names.
// On a GPU each of them is one instruction and costs nothing more.
#pragma once

#if defined(__CUDACC__) || defined(__CUDA__)
#define GPU_COMPILED_FOR_DEVICE 1
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <mma.h>
#else
#include "../emulation/device.hpp"
#endif

#include <cstdint>

#define GPU_DEVICE __device__ __forceinline__

namespace gpu {

// Instructions by compute capability: PTX ISA, "Target ISA Notes" of each.
template <int SM>
struct Arch {
  static constexpr int sm = SM;
  static constexpr bool has_ldmatrix = SM >= 75;
  static constexpr bool has_mma = SM >= 80;  // m16n8k16 of half, m16n8k32 of int8
  static constexpr bool has_cp_async = SM >= 80;
  static constexpr bool has_warp_reduce = SM >= 80;  // __reduce_*_sync
};

// Calls f with the newest Arch that kernels are written for and that the device can execute. A build
// for devices that all want the same Arch names it in GPU_ONLY_ARCH, and compiles half as much.
template <class F>
auto with_arch([[maybe_unused]] int device_sm, F&& f) {
#ifdef GPU_ONLY_ARCH
  return f(Arch<GPU_ONLY_ARCH>{});
#else
  return device_sm >= 80 ? f(Arch<80>{}) : f(Arch<72>{});
#endif
}

}  // namespace gpu

#ifndef GPU_COMPILED_FOR_DEVICE
#define GPU_UNROLL
#define GPU_NO_UNROLL
#else
#define GPU_UNROLL _Pragma("unroll")
#define GPU_NO_UNROLL _Pragma("unroll 1")

#define GPU_DYNAMIC_SHARED(T, name)                                       \
  extern __shared__ __align__(128) unsigned char gpu_dynamic_shared_[];   \
  T* name = reinterpret_cast<T*>(gpu_dynamic_shared_)

namespace gpu {

namespace detail {
template <class T>
struct Same {  // takes no part in deduction
  using type = T;
};
}  // namespace detail

template <class... Parameters>
inline cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block,
                          size_t shared_bytes, cudaStream_t stream,
                          typename detail::Same<Parameters>::type... arguments) {
  kernel<<<grid, block, shared_bytes, stream>>>(arguments...);
  return cudaPeekAtLastError();
}

// ---- global memory ----
namespace detail {

template <int Bytes>
struct Word;
template <>
struct Word<1> { using type = unsigned char; };
template <>
struct Word<2> { using type = unsigned short; };
template <>
struct Word<4> { using type = unsigned int; };
template <>
struct Word<8> { using type = uint2; };
template <>
struct Word<16> { using type = uint4; };
template <class T>
using WordOf = typename Word<sizeof(T)>::type;
template <class T>
GPU_DEVICE const WordOf<T>* word(const T* p) {
  return reinterpret_cast<const WordOf<T>*>(p);
}
template <class T>
GPU_DEVICE T from_word(const WordOf<T>& w) {
  return *reinterpret_cast<const T*>(&w);
}

}  // namespace detail

template <class T>
GPU_DEVICE T load(const T* p) {
  return detail::from_word<T>(*detail::word(p));
}
// Memory that no thread of the launch writes.
template <class T>
GPU_DEVICE T load_readonly(const T* p) {
  return detail::from_word<T>(__ldg(detail::word(p)));
}
// Memory that will not be read again soon, so it should not push out what will be.
template <class T>
GPU_DEVICE T load_streaming(const T* p) {
  return detail::from_word<T>(__ldcs(detail::word(p)));
}
template <class T>
GPU_DEVICE void store(T* p, const typename detail::Same<T>::type& v) {
  *reinterpret_cast<detail::WordOf<T>*>(p) = *detail::word(&v);
}

// ---- barriers ----
GPU_DEVICE void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
GPU_DEVICE void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- asynchronous copies ----
GPU_DEVICE unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// A kernel for a newer Arch may also be compiled for an older target, where it must not run.
namespace detail {
template <class... Arguments>
GPU_DEVICE void absent(const Arguments&...) {
  __trap();
}
}  // namespace detail

template <class A, int Bytes = 16>
GPU_DEVICE void cp_async(void* shared, const void* global, int filled = Bytes) {
  static_assert(A::has_cp_async, "this architecture has no cp.async");
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "cp.async copies 4, 8 or 16 bytes");
#if __CUDA_ARCH__ >= 800
  if (Bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
                 "l"(global), "r"(filled)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)),
                 "l"(global), "n"(Bytes), "r"(filled)
                 : "memory");
#else
  detail::absent(shared, global, filled);
#endif
}
template <class A>
GPU_DEVICE void cp_async_commit() {
  static_assert(A::has_cp_async, "this architecture has no cp.async");
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  detail::absent();
#endif
}
template <class A, int Keep = 0>
GPU_DEVICE void cp_async_wait() {
  static_assert(A::has_cp_async, "this architecture has no cp.async");
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(Keep) : "memory");
#else
  detail::absent();
#endif
}

// ---- matrices ----
template <class A, bool Transposed = false>
GPU_DEVICE void ldmatrix_x1(uint32_t& r, const void* row) {
  static_assert(A::has_ldmatrix, "this architecture has no ldmatrix");
#if __CUDA_ARCH__ >= 750
  if (Transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                 : "=r"(r)
                 : "r"(shared_address(row))
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                 : "=r"(r)
                 : "r"(shared_address(row))
                 : "memory");
#else
  detail::absent(r, row);
#endif
}
template <class A, bool Transposed = false>
GPU_DEVICE void ldmatrix_x2(uint32_t (&r)[2], const void* row) {
  static_assert(A::has_ldmatrix, "this architecture has no ldmatrix");
#if __CUDA_ARCH__ >= 750
  if (Transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(row))
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(row))
                 : "memory");
#else
  detail::absent(r, row);
#endif
}
template <class A, bool Transposed = false>
GPU_DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  static_assert(A::has_ldmatrix, "this architecture has no ldmatrix");
#if __CUDA_ARCH__ >= 750
  if (Transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
#else
  detail::absent(r, row);
#endif
}

template <class A>
GPU_DEVICE void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                        const float (&c)[4]) {
  static_assert(A::has_mma, "this architecture has no mma.m16n8k16");
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
#else
  detail::absent(d, a, b, c);
#endif
}
template <class A>
GPU_DEVICE void mma_s8(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                       const int (&c)[4]) {
  static_assert(A::has_mma, "this architecture has no mma.m16n8k32");
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c[0]), "r"(c[1]),
        "r"(c[2]), "r"(c[3]));
#else
  detail::absent(d, a, b, c);
#endif
}

}  // namespace gpu
#endif
