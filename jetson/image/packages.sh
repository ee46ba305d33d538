#!/bin/sh
# edgepool and the packages that it needs, in the virtual environment /opt/edgepool, which is all that the
# image gets. Takes REQUIREMENTS, and PLUGINS: `none` is an image for machines without a GPU.
set -eu
tools="/opt/tools/bin/python -m pip --disable-pip-version-check --no-cache-dir"
python3 -m venv --without-pip --system-site-packages /opt/edgepool
pip="$tools --python /opt/edgepool/bin/python"
site=$(echo /opt/edgepool/lib/python3*/site-packages)
wheels=$(mktemp -d)

$pip install --quiet --no-deps --only-binary :all: -r "jetson/requirements-$REQUIREMENTS.txt"

# A package of `edgepool package` brings the wheel, a checkout the sources.
if ls wheel/edgepool-*.whl >/dev/null 2>&1; then
  cp wheel/edgepool-*.whl "$wheels"
else
  $tools wheel --quiet --no-deps --no-build-isolation --wheel-dir "$wheels" .
fi

if [ "$PLUGINS" != none ]; then
  # libcuda comes from the board's driver when the image runs; here its stub is linked.
  echo "CUDA_ENABLE_CURAND = False" >"$HOME/.aksetup-defaults.py"
  pycuda=$(grep '^pycuda==' jetson/requirements-cuda.txt)
  PATH=/usr/local/cuda/bin:$PATH PYTHONPATH=$site $tools wheel --quiet --no-deps --no-build-isolation \
    --no-binary pycuda --wheel-dir "$wheels" "$pycuda"
  grep -v '^pycuda==' jetson/requirements-cuda.txt >"$wheels/requirements.txt"
  $pip install --quiet --no-deps --only-binary :all: -r "$wheels/requirements.txt"

  # TensorRT's package for Python is in no registry: it is the base image's, and not imported here,
  # since that takes the driver.
  for part in /usr/lib/python3*/dist-packages/tensorrt* /usr/local/lib/python3*/dist-packages/tensorrt*; do
    case ${part##*/} in
      tensorrt | tensorrt-*-info) [ -e "$part" ] && cp -r "$part" "$site/" ;;
    esac
  done
  [ -d "$site/tensorrt" ] || { echo "error: the base image has no tensorrt for Python" >&2 && exit 1; }
fi
$pip install --quiet --no-deps "$wheels"/*.whl
rm -rf "$wheels"
