// kernel<<<grid, block, shared, stream>>>(arguments), as a function.
#pragma once
#include <type_traits>

#include "runtime.hpp"

#define GPU_DYNAMIC_SHARED(T, name) T* name = static_cast<T*>(::emulation::dynamic_shared())

namespace gpu {

template <class... Parameters>
inline cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                          cudaStream_t stream, std::common_type_t<Parameters>... arguments) {
  const auto body = [=] { kernel(arguments...); };
  using Body = decltype(body);
  return emulation::launch(
      {reinterpret_cast<const void*>(kernel),
       [](const void* closure) { (*static_cast<Body*>(closure))(); },
       [](const void* closure) -> std::function<void()> { return *static_cast<Body*>(closure); },
       &body},
      grid, block, shared_bytes, stream);
}

}  // namespace gpu
