// CUDA C++ for a host compiler: what a kernel source sees when it is built for the CPU. Types,
// half and bfloat16 come from NVIDIA's headers, whose host functions are real; the rest is here.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

// NVIDIA's headers give these a meaning that only nvcc understands.
#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __launch_bounds__
#undef __forceinline__
#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __constant__ static const
// Blocks run one after another, so one copy serves them all; AddressSanitizer guards its ends.
#define __shared__ static
#ifndef __grid_constant__
#define __grid_constant__
#endif

#include "atomics.hpp"
#include "half.hpp"
#include "intrinsics.hpp"
#include "launch.hpp"
#include "matrix.hpp"
#include "memory.hpp"
#include "runtime.hpp"
#include "sync.hpp"
#include "warp.hpp"
#include "wmma.hpp"
