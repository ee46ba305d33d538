# TENSORRT_INCLUDE, TENSORRT_VERSION and, of NV_TENSORRT_MAJOR, TENSORRT_MAJOR. Headers are all that is
# compiled against; they are looked for in TENSORRT_ROOT, then where TensorRT's packages put them, then
# where scripts/toolchains.sh does.
set(TENSORRT_ROOT "$ENV{TENSORRT_ROOT}" CACHE PATH "The folder of TensorRT or of its headers")
if(DEFINED ENV{XDG_CACHE_HOME})
  set(cache $ENV{XDG_CACHE_HOME})
else()
  set(cache $ENV{HOME}/.cache)
endif()
if(TENSORRT_ROOT)
  find_path(TENSORRT_INCLUDE NvInferRuntime.h PATHS ${TENSORRT_ROOT} ${TENSORRT_ROOT}/include
            NO_DEFAULT_PATH)
else()
  find_path(TENSORRT_INCLUDE NvInferRuntime.h
            PATH_SUFFIXES ${CMAKE_SYSTEM_PROCESSOR}-linux-gnu
            PATHS /usr/local/tensorrt/include $ENV{EDGEPOOL_TOOLCHAINS}/tensorrt
                  ${cache}/edgepool/toolchains/tensorrt)
endif()
if(NOT TENSORRT_INCLUDE)
  message(FATAL_ERROR
    "No TensorRT headers (NvInferRuntime.h): install TensorRT's development package (libnvinfer-dev), "
    "or set TENSORRT_ROOT to a folder that has them or has them in include/, or run "
    "scripts/toolchains.sh of the edgepool repository, which fetches TensorRT 10.14's.")
endif()

set(TENSORRT_VERSION "")
file(READ ${TENSORRT_INCLUDE}/NvInferVersion.h text)
# 10.14 writes `#define NV_TENSORRT_MAJOR TRT_MAJOR_ENTERPRISE`, 8.5 the number.
foreach(part MAJOR MINOR PATCH BUILD)
  set(value "")
  foreach(name NV_TENSORRT_${part} TRT_${part}_ENTERPRISE)
    if(text MATCHES "#define ${name} ([0-9]+)")
      set(value ${CMAKE_MATCH_1})
    endif()
  endforeach()
  if(value STREQUAL "")
    message(FATAL_ERROR "${TENSORRT_INCLUDE}/NvInferVersion.h has no NV_TENSORRT_${part}")
  endif()
  set(TENSORRT_${part} ${value})
  string(APPEND TENSORRT_VERSION ".${value}")
endforeach()
string(SUBSTRING ${TENSORRT_VERSION} 1 -1 TENSORRT_VERSION)
if(EDGEPOOL_TENSORRT AND NOT EDGEPOOL_TENSORRT EQUAL TENSORRT_MAJOR)
  message(FATAL_ERROR
    "The library is for TensorRT ${EDGEPOOL_TENSORRT}, and the headers in ${TENSORRT_INCLUDE} are of "
    "${TENSORRT_VERSION}: build on the device itself, or set TENSORRT_ROOT to a TensorRT "
    "${EDGEPOOL_TENSORRT}.")
endif()
message(STATUS "TensorRT ${TENSORRT_VERSION} headers: ${TENSORRT_INCLUDE}")
