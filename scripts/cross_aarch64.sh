#!/bin/bash
# The plugin library for the boards, made and tried on an x86-64 machine without a GPU:
#
#   xavier    sm_72, CUDA 11.8 in place of JetPack 5's 11.4, TensorRT 8's interface; glibc 2.31
#   orin      sm_87, CUDA 12.6, TensorRT 10's interface; glibc 2.35
#   emulated  the kernels on the CPU, once for each interface
#
# clang-19 compiles them against Debian 11, whose glibc is 2.31. Then: no library may need a newer
# glibc than its board has; each is loaded under qemu-user and lists its operators; and the emulated
# ones compute random cases there (tests/plugins/test_aarch64.py), held to the PyTorch definitions.
#
#     apt-get install clang-19 binutils-aarch64-linux-gnu qemu-user
#     scripts/toolchains.sh --aarch64
#     scripts/cross_aarch64.sh [--no-tests] [xavier] [orin] [emulated]     (default: all three)
#
# Libraries are left in build/aarch64; one that is newer than all of plugins/ is left alone.
# TOOLCHAINS names the folder of toolchains.sh, PYTHON an interpreter with edgepool's test packages.
set -euo pipefail
cd "$(dirname "$0")/.."
toolchains=${TOOLCHAINS:-${XDG_CACHE_HOME:-$HOME/.cache}/edgepool/toolchains}
sysroot=$toolchains/aarch64/sysroot
out=build/aarch64
tests=1
[ "${1:-}" = --no-tests ] && tests= && shift
[ $# -gt 0 ] || set -- xavier orin emulated

fail() { echo "error: $*" >&2 && exit 1; }
for tool in clang++-19 aarch64-linux-gnu-objdump qemu-aarch64; do
  command -v $tool >/dev/null || fail "not installed: $tool"
done
[ -d "$sysroot" ] || fail "no $sysroot: scripts/toolchains.sh --aarch64"

compile=(clang++-19 --target=aarch64-linux-gnu "--sysroot=$sysroot" -std=c++17 -fPIC -DNDEBUG
  -Wall -Wextra -Werror -I plugins -isystem "$toolchains/tensorrt")

# build LIBRARY FLAGS_FOR_OPERATORS -- FLAGS_FOR_COMMON -- FLAGS_TO_LINK: all of plugins/, two at a
# time
build() {
  local library=$out/$1 objects operator common source
  [ -e "$library" ] && [ -z "$(find plugins -newer "$library" -print -quit)" ] && return
  shift
  operator=() common=()
  while [ "$1" != -- ]; do operator+=("$1") && shift; done && shift
  while [ "$1" != -- ]; do common+=("$1") && shift; done && shift
  objects=$library.objects
  rm -rf "$objects" && mkdir -p "$objects"
  for source in plugins/*/plugin.cpp; do
    printf '%s\0' "${compile[*]@Q} ${operator[*]@Q} -c $source -o $objects/$(basename "$(dirname "$source")").o"
  done >"$objects/commands"
  for source in plugins/common/*.cpp; do
    printf '%s\0' "${compile[*]@Q} ${common[*]@Q} -c $source -o $objects/$(basename "$source").o"
  done >>"$objects/commands"
  xargs -0 -P 2 -I{} bash -c '{}' <"$objects/commands"
  "${compile[@]}" -shared "$objects"/*.o "$@" -o "$library"
}

# board NAME SM CUDA GLIBC ENTRY FLAG...: the library, its glibc, and what it lists under qemu
board() {
  local name=$1 sm=$2 cuda=$toolchains/cuda-$3 most=$4 entry=$5 library=libedgepool_plugins-$1.so
  shift 5
  local cudart=$toolchains/aarch64/$(basename "$cuda")
  build "$library" -O3 -x cuda "--cuda-path=$cuda" "--cuda-gpu-arch=sm_$sm" \
    -Wno-unknown-cuda-version -Wno-pass-failed "$@" -- -O3 -isystem "$cuda/include" "$@" -- "-L$cudart" -lcudart
  check "$library" "$most" "$entry" "$cudart"
}

emulated() {
  local headers=${CUDA_HOME:-/usr/local/cuda}/include version source objects=$out/emulation
  mkdir -p "$objects"
  if [ -n "$(find plugins/emulation -newer "$objects/made" -print -quit 2>&1)" ]; then
    for source in plugins/emulation/runtime/*.cpp plugins/emulation/runtime/plain/*.cpp; do
      printf '%s\0' "${compile[*]@Q} -O2 -isystem $headers -c $source -o $objects/$(echo "$source" | tr / -).o"
    done | xargs -0 -P 2 -I{} bash -c '{}'
    touch "$objects/made"
  fi
  for version in 3 2; do
    local flags=(-O1 -ffp-contract=off -isystem "$headers")
    [ $version = 3 ] || flags+=(-DEDGEPOOL_PLUGIN_V2)
    build "emulated-v$version.so" -x c++ "${flags[@]}" -- "${flags[@]}" -- \
      -Wl,-Bsymbolic "$objects"/*.o -ldl -lpthread
    check "emulated-v$version.so" 2.31 "$([ $version = 3 ] && echo getCreators || echo getPluginCreators)" .
  done
}

# check LIBRARY GLIBC ENTRY FOLDER_OF_CUDART
check() {
  local needs
  needs=$(aarch64-linux-gnu-objdump -T "$out/$1" | grep -oE 'GLIBC_[0-9.]+' | sort -uV | tail -n 1)
  echo "$1: needs $needs, of glibc $2"
  [ "$(printf '%s\n' "$needs" "GLIBC_$2" | sort -V | tail -n 1)" = "GLIBC_$2" ] || fail "$1 needs $needs"
  qemu-aarch64 -L "$sysroot" -E "LD_LIBRARY_PATH=$4" "$out/replay" "$out/$1" "$3"
}

mkdir -p "$out"
"${compile[@]}" -O1 -Wno-deprecated-declarations -isystem "${CUDA_HOME:-/usr/local/cuda}/include" \
  -rdynamic tests/plugins/conformance/replay.cpp -ldl -o "$out/replay"
for what; do
  case $what in
    xavier) board xavier 72 11.8 2.31 getPluginCreators -DGPU_ONLY_ARCH=72 -DEDGEPOOL_PLUGIN_V2 ;;
    orin) board orin 87 12.6 2.35 getCreators -DGPU_ONLY_ARCH=80 ;;
    emulated) emulated ;;
    *) fail "unknown: $what" ;;
  esac
done
[ -z "$tests" ] || "${PYTHON:-python3}" -m pytest -q tests/plugins/test_aarch64.py
