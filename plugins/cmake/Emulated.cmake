# The library for the CPU: kernels are C++, and emulation/runtime stands in for libcudart.
#
# EDGEPOOL_EMULATION   plain; or checked, whose runtime watches every access; or asan, tsan
set(EDGEPOOL_EMULATION plain CACHE STRING "plain, checked, asan or tsan")
find_path(CUDA_INCLUDE cuda_fp16.h
          PATHS $ENV{CUDA_HOME}/include /usr/local/cuda/include NO_DEFAULT_PATH)
if(NOT CUDA_INCLUDE)
  message(FATAL_ERROR "No CUDA headers (cuda_fp16.h): set CUDA_HOME to a CUDA toolkit, 12.2 or later. "
                      "Neither nvcc nor a GPU is needed.")
endif()
find_package(Threads REQUIRED)

set(runtime_kind plain)
set(sanitize "")
if(EDGEPOOL_EMULATION STREQUAL "checked")
  set(runtime_kind checked)
  set(sanitize -fsanitize=thread,alignment -DEMULATION_CHECKED)
elseif(EDGEPOOL_EMULATION STREQUAL "asan")
  set(sanitize -fsanitize=address,undefined -fno-sanitize-recover=undefined)
elseif(EDGEPOOL_EMULATION STREQUAL "tsan")
  set(sanitize -fsanitize=thread)
elseif(NOT EDGEPOOL_EMULATION STREQUAL "plain")
  message(FATAL_ERROR "EDGEPOOL_EMULATION is plain, checked, asan or tsan, not ${EDGEPOOL_EMULATION}")
endif()

# The runtime is compiled without sanitizers, which it works for.
file(GLOB runtime CONFIGURE_DEPENDS emulation/runtime/*.cpp emulation/runtime/${runtime_kind}/*.cpp)
add_library(emulation OBJECT ${runtime})
target_include_directories(emulation PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
target_include_directories(emulation SYSTEM PRIVATE ${CUDA_INCLUDE})
target_compile_options(emulation PRIVATE -O2 -Wall -Wextra ${werror} -fno-gnu-unique ${here})

target_link_libraries(edgepool_plugins PRIVATE emulation Threads::Threads ${CMAKE_DL_LIBS})
target_include_directories(edgepool_plugins SYSTEM PRIVATE ${CUDA_INCLUDE})
# -ffp-contract: one rounding for each operation, on every processor. -fno-gnu-unique and -Bsymbolic:
# each library of a process has its own shared memory.
target_compile_options(edgepool_plugins PRIVATE -O1 -g -ffp-contract=off -fno-gnu-unique ${sanitize})
target_link_options(edgepool_plugins PRIVATE -Wl,-Bsymbolic)
if(sanitize AND NOT runtime_kind STREQUAL "checked")
  target_link_options(edgepool_plugins PRIVATE ${sanitize})
endif()
set(record_cuda "")
set(record_sms "")
set(record_ptx "")
