#!/bin/bash
# Fetches what compiles the plugins for targets that the installed CUDA toolkit does not have:
#
#   cuda-11.8, cuda-12.6   trees for clang (-x cuda --cuda-path=TREE), for sm_72 and for JetPack 6
#   tensorrt               the TensorRT headers
#   tools                  cuobjdump and nvdisasm
#
#     scripts/toolchains.sh [FOLDER]     (default: edgepool/toolchains in the user's cache folder)
#
# The compiler itself is Debian's clang-19. A part that is there already is left alone, and one that
# was interrupted is made again. Everything comes from PyPI wheels; nothing is executed from them.
set -euo pipefail

folder=$(realpath -m "${1:-${XDG_CACHE_HOME:-$HOME/.cache}/edgepool/toolchains}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$folder"

# fetch NAME REQUIREMENT...: unpacks the wheels into $work/NAME
fetch() {
  local name=$1
  shift
  "${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps \
    --dest "$work/$name-wheels" "$@"
  mkdir -p "$work/$name"
  for wheel in "$work/$name-wheels"/*.whl; do
    "${PYTHON:-python3}" -m zipfile -e "$wheel" "$work/$name"
  done
}

# The wheels of CUDA 11 and 12 hold ptxas, libdevice and headers, but no nvcc.
cuda_tree() {
  local name=$1
  [ -d "$folder/$name" ] && return
  fetch "$@"
  local from=$work/$name/nvidia tree=$work/$name-tree
  mkdir -p "$tree/bin" "$tree/include" "$tree/lib64" "$tree/nvvm/libdevice"
  for include in "$from"/*/include; do cp -r "$include/." "$tree/include/"; done
  install -m 755 "$from/cuda_nvcc/bin/ptxas" "$tree/bin/ptxas"
  cp "$from"/cuda_nvcc/nvvm/libdevice/*.bc "$tree/nvvm/libdevice/"
  cp "$from"/cuda_runtime/lib/libcudart.so.* "$tree/lib64/"
  ln -s "$(basename "$from"/cuda_runtime/lib/libcudart.so.*)" "$tree/lib64/libcudart.so"
  # clang's wrapper header includes it, and no kernel here uses it.
  echo "// empty" >"$tree/include/curand_mtgp32_kernel.h"
  install -m 755 "$(dirname "$0")/fatbinary.py" "$tree/bin/fatbinary"
  mv "$tree" "$folder/$name"
}

headers() {
  [ -d "$folder/tensorrt" ] && return
  fetch kernel-lens kernel-lens==2.0.1
  local found
  found=$(find "$work/kernel-lens" -name NvInferRuntime.h -print -quit)
  [ -n "$found" ] || { echo "error: no TensorRT headers in the kernel-lens wheel" >&2; exit 1; }
  mkdir "$work/tensorrt"
  cp "$(dirname "$found")"/Nv*.h "$work/tensorrt/"
  mv "$work/tensorrt" "$folder/tensorrt"
}

tools() {
  [ -d "$folder/tools" ] && return
  fetch tools nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
  mkdir "$work/bin"
  find "$work/tools" -type f \( -name cuobjdump -o -name nvdisasm \) -exec install -m 755 {} "$work/bin" \;
  mv "$work/bin" "$folder/tools"
}

cuda_tree cuda-11.8 nvidia-cuda-nvcc-cu11==11.8.89 nvidia-cuda-runtime-cu11==11.8.89 \
  nvidia-cuda-cccl-cu11==11.8.89.post1
cuda_tree cuda-12.6 nvidia-cuda-nvcc-cu12==12.6.85 nvidia-cuda-runtime-cu12==12.6.77 \
  nvidia-cuda-cccl-cu12==12.6.77
headers
tools
echo "$folder"
