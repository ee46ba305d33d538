# The library for GPUs: kernels are CUDA, compiled by nvcc for CMAKE_CUDA_ARCHITECTURES.
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  message(FATAL_ERROR
    "No CUDA compiler (nvcc): install the CUDA toolkit, and put its bin folder on PATH or set CUDACXX "
    "to its nvcc. Without one, -D EDGEPOOL_EMULATED=ON runs the kernels on the CPU.")
endif()
if(NOT CMAKE_CUDA_ARCHITECTURES)
  message(FATAL_ERROR "Set CMAKE_CUDA_ARCHITECTURES, such as 87-real, or choose a preset")
endif()
foreach(architecture ${CMAKE_CUDA_ARCHITECTURES})
  if(NOT architecture MATCHES "^([0-9]+)(-real|-virtual)?$")
    message(FATAL_ERROR "CMAKE_CUDA_ARCHITECTURES: ${architecture} is no number, NUMBER-real or "
                        "NUMBER-virtual")
  endif()
  set(number ${CMAKE_MATCH_1})
  set(kind "${CMAKE_MATCH_2}")
  if(NOT kind STREQUAL "-virtual")
    list(APPEND record_sms ${number})
  endif()
  if(NOT kind STREQUAL "-real")
    set(record_ptx ${number})
  endif()
endforeach()

# What the compiler does not know makes its trial fail, with a message about the compiler.
execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --list-gpu-code
                OUTPUT_VARIABLE compiler_codes ERROR_QUIET)
foreach(number ${record_sms} ${record_ptx})
  if(compiler_codes AND NOT compiler_codes MATCHES "sm_${number}(\n|$)")
    string(REGEX MATCH "sm_[0-9]+" oldest "${compiler_codes}")
    message(FATAL_ERROR "${CMAKE_CUDA_COMPILER} does not compile for sm_${number} (its oldest is "
                        "${oldest}): take a toolkit that does; CUDA 13 has no sm_72, CUDA 12.8 is the "
                        "first with sm_100 and sm_120")
  endif()
endforeach()
# Kernels have two paths; where every device takes the same one, only that is compiled.
set(older ${record_sms} ${record_ptx})
set(newer ${older})
list(FILTER older INCLUDE REGEX "^[1-7]?[0-9]$")
list(FILTER newer EXCLUDE REGEX "^[1-7]?[0-9]$")
if(NOT older)
  target_compile_definitions(edgepool_plugins PRIVATE GPU_ONLY_ARCH=80)
elseif(NOT newer)
  target_compile_definitions(edgepool_plugins PRIVATE GPU_ONLY_ARCH=72)
endif()

enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
set(record_cuda ${CUDAToolkit_VERSION_MAJOR}.${CUDAToolkit_VERSION_MINOR})

set_source_files_properties(${operators} PROPERTIES LANGUAGE CUDA)
set_target_properties(edgepool_plugins PROPERTIES
  CXX_VISIBILITY_PRESET hidden
  CUDA_VISIBILITY_PRESET hidden
  VISIBILITY_INLINES_HIDDEN ON
  CUDA_RUNTIME_LIBRARY Static)
target_link_libraries(edgepool_plugins PRIVATE CUDA::cudart_static ${CMAKE_DL_LIBS})
set(for_host -Wall -Wextra ${werror} ${here})
list(JOIN for_host "," for_host)
set(for_device "")
if(EDGEPOOL_WERROR)
  set(for_device -Werror=all-warnings)
endif()
target_compile_options(edgepool_plugins PRIVATE
  $<$<COMPILE_LANG_AND_ID:CUDA,NVIDIA>:${for_device} -Xcompiler=${for_host}>
  $<$<COMPILE_LANG_AND_ID:CUDA,Clang>:-Wall -Wextra ${werror} ${here}>)
# Without symbols: nvcc's hold the names of its temporary files.
target_link_options(edgepool_plugins PRIVATE -s -Wl,--exclude-libs,ALL -Wl,-z,now)

if(TENSORRT_MAJOR LESS 10)
  # Its creators register themselves when the library is loaded, for which TensorRT has to be there,
  # and stay registered.
  target_link_options(edgepool_plugins PRIVATE -Wl,-z,nodelete)
  find_library(NVINFER nvinfer HINTS ${TENSORRT_ROOT}/lib)
  if(NVINFER)
    target_link_libraries(edgepool_plugins PRIVATE
      -Wl,--push-state,--no-as-needed ${NVINFER} -Wl,--pop-state)
  endif()
endif()
