"""Build the library of TensorRT plugins from the sources in plugins/, with CMake and nvcc.

The sources come with the package; what compiles them is the machine's, and what is missing is named
with what to install.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections import deque
from pathlib import Path
from typing import Any, Callable, Deque, Dict, List, Optional, Sequence, Tuple

from . import __version__, files
from .errors import GateFailed, MissingRequirement
from .plugin_library import NAME, build_record
from .progress import Report, silent
from .resources import resource

OLDEST_CMAKE = (3, 22)
KEPT_LINES = 4000  # of what the tools print, for the message about a failure
CONFIGURING, COMPILING = "configuring the build", "compiling the plugins"


def build(
    sm: int,
    folder: Path,
    report: Report = silent,
    echo: Optional[Callable[[str], None]] = None,
    ptx: bool = False,
    tensorrt: Optional[int] = None,
) -> Dict[str, Any]:
    """Write folder/libedgepool_plugins.so for compute capability `sm`; returns its record.

    ptx: with PTX, too, for GPUs that are newer; tensorrt: the major version that it has to be for;
    echo: is given each line that the tools print.
    Raises MissingRequirement for a tool, header or GPU architecture that is not there, GateFailed
    if the sources do not compile, BadInput for a folder that cannot be written.
    """
    tools = find_tools()
    options = {
        "CMAKE_CUDA_ARCHITECTURES": "%d" % sm if ptx else "%d-real" % sm,
        "CMAKE_CUDA_COMPILER": tools["nvcc"],
        "EDGEPOOL_VERSION": __version__,
        "EDGEPOOL_WERROR": "OFF",
    }
    if tensorrt is not None:
        options["EDGEPOOL_TENSORRT"] = str(tensorrt)
    with tempfile.TemporaryDirectory(prefix="edgepool-plugins-") as work:
        report(CONFIGURING, 0, 1)
        configure = [tools["cmake"], "-S", str(resource("plugins")), "-B", work]
        configure += ["-D%s=%s" % item for item in options.items()]
        if "ninja" in tools:
            configure += ["-G", "Ninja"]
        code, lines = _run(configure, echo)
        if code:
            raise MissingRequirement("the plugins cannot be built here: %s" % _cmake_error(lines))
        report(CONFIGURING, 1, 1)

        def follow(line: str) -> None:
            step = re.match(r"\[ *(\d+)(?:/(\d+)|%)\]", line)
            if step:
                report(COMPILING, int(step[1]), int(step[2] or 100))
            if echo:
                echo(line)

        jobs = str(len(os.sched_getaffinity(0)))
        code, lines = _run([tools["cmake"], "--build", work, "--parallel", jobs], follow)
        if code:
            raise GateFailed("the plugins do not compile: %s" % _compiler_error(lines))
        built = Path(work) / NAME
        record = build_record(built)
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        with files.new_file(folder / NAME) as stream, built.open("rb") as source:
            os.fchmod(stream.fileno(), 0o755)  # not for others to write, whatever the umask
            shutil.copyfileobj(source, stream)
    return record


def find_tools() -> Dict[str, str]:
    """Paths of cmake, nvcc and, where there is one, ninja; MissingRequirement names what is not."""
    tools = {}
    cmake = shutil.which("cmake")
    found = _cmake_version(cmake) if cmake else None
    if cmake is None or found is None or found < OLDEST_CMAKE:
        raise MissingRequirement(
            "CMake 3.22 or later is needed to build the plugins%s: pip install cmake"
            % (" (%s is %d.%d)" % (cmake, *found) if found else "")
        )
    tools["cmake"] = cmake
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc") or _toolkit_nvcc()
    if nvcc is None or shutil.which(nvcc) is None:
        raise MissingRequirement(
            "the CUDA compiler nvcc is needed to build the plugins: install the CUDA toolkit (on a "
            "Jetson: apt install nvidia-jetpack), and put its bin folder on PATH or set CUDACXX to "
            "its nvcc"
        )
    tools["nvcc"] = nvcc
    if shutil.which("c++") is None and shutil.which("g++") is None and "CXX" not in os.environ:
        raise MissingRequirement(
            "a C++ compiler is needed to build the plugins: apt install g++, or set CXX"
        )
    ninja = shutil.which("ninja")
    if ninja:
        tools["ninja"] = ninja
    elif shutil.which("make") is None:
        raise MissingRequirement("make or ninja is needed to build the plugins: apt install make")
    return tools


def _toolkit_nvcc() -> Optional[str]:
    """The nvcc of a toolkit that is not on PATH."""
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        nvcc = os.path.join(home, "bin", "nvcc") if home else ""
        if nvcc and os.access(nvcc, os.X_OK):
            return nvcc
    return None


def _cmake_version(cmake: str) -> Optional[Tuple[int, int]]:
    code, lines = _run([cmake, "--version"], None)
    version = re.search(r"(\d+)\.(\d+)", " ".join(lines[:1])) if code == 0 else None
    return (int(version[1]), int(version[2])) if version else None


def _run(command: Sequence[str], echo: Optional[Callable[[str], None]]) -> Tuple[int, List[str]]:
    """Exit code and the last lines of what a program printed; it ends when we do."""
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        universal_newlines=True,
        errors="replace",
        env={**os.environ, "LC_ALL": "C"},
    )
    lines: Deque[str] = deque(maxlen=KEPT_LINES)
    assert child.stdout is not None
    try:
        for line in child.stdout:
            lines.append(line.rstrip())
            if echo:
                echo(line.rstrip())
        return child.wait(), list(lines)
    finally:
        if child.poll() is None:
            child.terminate()  # cmake passes it on to the compilers
            child.wait()
        child.stdout.close()


def _cmake_error(lines: Sequence[str]) -> str:
    """The text of the first error that CMake reports: the indented lines after its heading."""
    text: List[str] = []
    for i, line in enumerate(lines):
        if line.startswith("CMake Error"):
            for following in lines[i + 1 :]:
                if following and not following.startswith("  "):
                    break
                if text and not following.strip():
                    break
                if following.strip():
                    text.append(following.strip())
            break
    return " ".join(text) or (lines[-1] if lines else "CMake says nothing")


def _compiler_error(lines: Sequence[str]) -> str:
    """The first line that a compiler calls an error, or the last that there is."""
    errors = (line for line in lines if re.search(r"\b(fatal|error)\b", line, re.IGNORECASE))
    return next(errors, lines[-1] if lines else "the build says nothing")
