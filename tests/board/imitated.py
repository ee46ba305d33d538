"""The entrypoint on an imitated board: `python -m tests.board.imitated SYSROOT SM ARGUMENTS...`.

The board is the files of a folder, and packages of the names of TensorRT and PyCUDA that PYTHONPATH
has first (`environment`). What the product asks of the driver by itself is answered here.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

from edgepool import __version__
from edgepool.board import ready
from edgepool.cli.entrypoint import main
from edgepool.engine import gpu
from edgepool.plugin_library import FORMAT, NAME, SECTION, VERSION
from edgepool.runtime import device_memory
from edgepool.runtime.cuda_graph import DriverGraphs
from tests.runtime.fake_cuda import fake_libcuda

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = Path(__file__).parent / "packages"


def environment(cache: Path, tensorrt: str, **more: str) -> dict[str, str]:
    """What a process on the board has in its environment."""
    path = os.pathsep.join(map(str, (PACKAGES, ROOT)))
    return {
        **os.environ,
        "PYTHONPATH": path,
        "EDGEPOOL_CACHE": str(cache),
        "IMITATED_TENSORRT": tensorrt,
        **more,
    }


def plugin_library(cache: Path, tensorrt: str, sm: int) -> Path:
    """A real library with nothing but a record, where `edgepool build-plugins` puts its own."""
    record = {
        "format": FORMAT, "record": VERSION, "version": __version__, "commit": "", "cuda": "12.6",
        "tensorrt": tensorrt, "interface": "IPluginV3", "sm": [sm], "ptx": [], "emulated": False,
        "operators": [],
    }  # fmt: skip
    path = cache / "plugins" / f"sm_{sm}" / NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    source = path.with_suffix(".c")
    text = json.dumps(json.dumps(record))  # a literal of C, too
    section = SECTION.decode()
    source.write_text(f'__attribute__((section("{section}"), used)) const char r[] = {text};\n')
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(path), str(source)], check=True)
    source.unlink()
    return path


def on(root: Path, sm: int, argv: list[str]) -> int:
    """Run the entrypoint on the board whose files are in a folder; returns the exit code."""
    import pycuda.driver

    graphs = DriverGraphs.__new__(DriverGraphs)
    graphs._cuda = fake_libcuda(pycuda.driver.GPU)
    # Ignored by mypy because a function stands in for a class, whose constructor opens libcuda.
    device_memory.DriverGraphs = lambda: graphs  # type: ignore[assignment,misc]
    gpu.find = lambda: gpu.Gpu("imitated", sm, 32 << 30, "12.6")
    ready.make_ready = functools.partial(ready.make_ready, root=root)
    return main(argv)


if __name__ == "__main__":
    sys.exit(on(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
