#!/bin/bash
# On a board, in one command: what docs/verification.md lists as not run, as far as a board can show it.
# Looks at the machine, compiles the plugins, checks kernels on the GPU, and takes a bundle through its
# parity gate, engine build, benchmark and text; then prints those rows of the table filled in.
#
#     scripts/board_check.sh [BUNDLE]                  a bundle, or an extracted package
#     BACKEND=ort scripts/board_check.sh [BUNDLE]      a rehearsal on any machine, which fills in nothing
#
# PYTHON is the interpreter that has edgepool (.venv/bin/python by default). The kernels' check needs
# edgepool's test packages there, too. What the steps print is kept in board-check/, or in LOG.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
backend=${BACKEND:-trt}
bundle=${1:-edgepool-bundle}
log=${LOG:-board-check}
[ -x "$(command -v "$python")" ] || { echo "error: no $python: make install, or set PYTHON" >&2; exit 3; }
mkdir -p "$log" || exit 2
: >"$log/steps"

# step NAME COMMAND...: runs it, and notes its exit code and seconds
step() {
  local name=$1 started=$SECONDS
  shift
  echo "== $name: $*" >&2
  "$@" >"$log/$name.out" 2> >(tee "$log/$name.err" >&2)
  echo "$name $? $((SECONDS - started))" >>"$log/steps"
}

kernels() {
  "$python" -c "import pytest, torch" 2>/dev/null ||
    { echo "error: $python lacks edgepool's test packages: make install" >&2; return 3; }
  PYTHON=$python scripts/gpu_check.sh
}

entrypoint() { "$python" jetson/entrypoint "$1" "$bundle" --backend "$backend" --json "${@:2}"; }

export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
step doctor "$python" -m edgepool doctor --json
step plugins "$python" -m edgepool build-plugins --json
step kernels kernels
step check entrypoint check
step build entrypoint build
step bench entrypoint bench
step run entrypoint run --prompt "The capital of France is" --max-new-tokens 32
"$python" scripts/board_report.py "$log" "$backend"
