#!/bin/bash
# Fetches what compiles the plugins for targets that the installed CUDA toolkit does not have:
#
#   cuda-11.8, cuda-12.6   trees for clang (-x cuda --cuda-path=TREE), for sm_72 and for JetPack 6
#   tensorrt               the TensorRT headers
#   tools                  cuobjdump and nvdisasm
#   aarch64                with --aarch64: what links for the boards, a Debian 11 (glibc 2.31) with
#                          libstdc++, and cudart 11.8 and 12.6
#
#     scripts/toolchains.sh [--aarch64] [FOLDER]    (default: edgepool/toolchains in the user's cache)
#
# The compiler itself is Debian's clang-19. A part that is there already is left alone, and one that
# was interrupted is made again. All comes from PyPI wheels, and aarch64's Debian 11 from the mirror
# that apt uses; nothing is executed from them.
set -euo pipefail

boards=
[ "${1:-}" = --aarch64 ] && boards=1 && shift
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

# Debian 11's packages for arm64, unpacked: apt with lists of its own, which touch none of the system.
sysroot() {
  local into=$1 mirror apt
  mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' |
    grep -m1 '/debian/*$') || { echo "error: apt knows no Debian mirror" >&2; exit 1; }
  mkdir -p "$work/apt/lists/partial" "$work/apt/archives/partial" "$into"
  touch "$work/apt/status"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror bullseye main" \
    >"$work/apt/sources.list"
  apt=(apt-get -qq -o "Dir::State=$work/apt" -o "Dir::State::status=$work/apt/status"
    -o "Dir::Cache=$work/apt" -o "Dir::Etc::sourcelist=$work/apt/sources.list"
    -o Dir::Etc::sourceparts=/dev/null -o APT::Architecture=arm64 -o APT::Architectures=arm64
    -o APT::Sandbox::User=root)
  "${apt[@]}" update
  (cd "$work/apt" && "${apt[@]}" download libc6 libc6-dev libstdc++6 libstdc++-10-dev libgcc-s1 \
    libgcc-10-dev linux-libc-dev libcrypt1 libcrypt-dev)
  for package in "$work"/apt/*.deb; do dpkg-deb -x "$package" "$into"; done
  # An absolute link would lead out of the sysroot, and ld would take libdl.a for libdl.so.
  find "$into" -type l -lname '/*' | while read -r link; do
    ln -sfn "$(realpath -ms --relative-to="$(dirname "$link")" "$into$(readlink "$link")")" "$link"
  done
}

aarch64() {
  [ -d "$folder/aarch64" ] && return
  local made=$work/made-aarch64 version
  sysroot "$made/sysroot"
  for version in 11.8:cu11==11.8.89 12.6:cu12==12.6.77; do
    fetch "cudart-$version" --platform manylinux2014_aarch64 --only-binary=:all: \
      "nvidia-cuda-runtime-${version#*:}"
    mkdir "$made/cuda-${version%%:*}"
    cp "$work/cudart-$version"/nvidia/cuda_runtime/lib/libcudart.so.* "$made/cuda-${version%%:*}/"
    ln -s "$(basename "$made/cuda-${version%%:*}"/libcudart.so.*)" \
      "$made/cuda-${version%%:*}/libcudart.so"
  done
  mv "$made" "$folder/aarch64"
}

cuda_tree cuda-11.8 nvidia-cuda-nvcc-cu11==11.8.89 nvidia-cuda-runtime-cu11==11.8.89 \
  nvidia-cuda-cccl-cu11==11.8.89.post1
cuda_tree cuda-12.6 nvidia-cuda-nvcc-cu12==12.6.85 nvidia-cuda-runtime-cu12==12.6.77 \
  nvidia-cuda-cccl-cu12==12.6.77
headers
tools
[ -z "$boards" ] || aarch64
echo "$folder"
