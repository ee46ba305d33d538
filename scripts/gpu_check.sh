#!/bin/bash
# The kernels on the GPU of this machine, in under 8 minutes: compiles them with its nvcc, holds them
# to the PyTorch definitions on the cases that the CPU emulation runs, and times decode kernels at 1M
# tokens of context against the bandwidth of a copy (70 % at least). Needs a GPU with 6 GB of free
# memory, nvcc, and edgepool's test packages (make install); without a GPU it says so, and checks
# nothing.
#
#     scripts/gpu_check.sh [PYTEST_ARGUMENT...]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || [ -n "${PYTHON:-}" ] || { echo "error: no $python: make install" >&2; exit 3; }
timeout 480 "$python" -m pytest -q -s -rs -p no:cacheprovider --timeout 480 \
  tests/gpu/test_kernels.py tests/gpu/test_speed.py "$@"
