#!/bin/sh
# The plugin library, into the installed package, the one place in an image that edgepool loads it from.
# PLUGINS: `build`, with the image's own CUDA and TensorRT headers, for ARCHITECTURES; `none`; or a
# library in the context that was compiled elsewhere. CUDA and TENSORRT: versions that the library, and so
# the base image, has to be of; empty: any.
set -eu
place=$(echo /opt/edgepool/lib/python3*/site-packages/edgepool/_data/plugins)
library=$place/libedgepool_plugins.so
case $PLUGINS in
  none)
    echo "There is no plugin library in this image: bundles run on ONNX Runtime in it, not on TensorRT."
    exit
    ;;
  build)
    PATH=/opt/tools/bin:/usr/local/cuda/bin:$PATH
    cmake -G Ninja -S "$place" -B /tmp/plugins -D EDGEPOOL_WERROR=OFF \
      -D CMAKE_CUDA_ARCHITECTURES="$(echo "$ARCHITECTURES" | tr , ';')" \
      -D EDGEPOOL_VERSION="$(/opt/edgepool/bin/edgepool --version | cut -d' ' -f2)" \
      -D EDGEPOOL_TENSORRT="${TENSORRT%%.*}"
    cmake --build /tmp/plugins
    install -m 644 /tmp/plugins/libedgepool_plugins.so "$library"
    rm -rf /tmp/plugins
    ;;
  *) install -m 644 "$PLUGINS" "$library" ;;
esac

/opt/edgepool/bin/edgepool inspect "$library"
/opt/edgepool/bin/python - "$library" "$TENSORRT" "$([ "$PLUGINS" = build ] && echo "$CUDA")" <<'PYTHON'
import platform
import sys
from pathlib import Path

from edgepool import __version__
from edgepool.plugin_library import build_record

library, tensorrt, cuda = sys.argv[1:]
record = build_record(Path(library))
for key in ("tensorrt", "cuda"):
    record[key] = ".".join(record[key].split(".")[:2])
wanted = {"version": __version__, "machine": platform.machine(), "emulated": False}
if tensorrt:
    wanted["tensorrt"] = ".".join(tensorrt.split(".")[:2])
if cuda:
    wanted["cuda"] = cuda
wrong = ["%s is %s, not %s" % (k, record[k], v) for k, v in wanted.items() if record[k] != v]
if wrong:
    sys.exit("error: the plugin library does not fit: " + ", ".join(wrong))
PYTHON
