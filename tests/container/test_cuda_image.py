"""The stages that compile, with this machine's CUDA and TensorRT headers in place of a Jetson's.

nvcc compiles the plugins for AGX Orin's GPU, and PyCUDA its source against a stub of libcuda, in a
Debian that has no driver. `make container` takes some minutes for it.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgepool.docker_args import build_args
from edgepool.targets import find_target
from tests.container import images
from tests.container.test_image import MOST_MEGABYTES
from tests.plugins import toolchain
from tests.plugins.test_device_compilers import fetched

PLACE = "opt/edgepool/lib/python3.11/site-packages"
LIBRARY = PLACE + "/edgepool/_data/plugins/libedgepool_plugins.so"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Our Debian with what a Jetson's image has: toolkit, headers, TensorRT for Python."""
    if images.why_not():
        pytest.skip(images.why_not())
    toolchain.tool("nvcc")
    toolkit = toolchain.cuda_include().parent
    image = "localhost/debian-cuda"
    folder = tmp_path_factory.mktemp("cuda")
    stub = folder / "libcuda.so"
    write_stub(stub)
    packages = folder / "packages"
    (packages / "tensorrt").mkdir(parents=True)
    (packages / "tensorrt" / "__init__.py").write_text(
        "raise ImportError('libnvdla_compiler.so')\n"
    )
    with images.container(images.base()) as (name, _):
        for source, place in (
            (toolkit, "/usr/local/cuda"),
            (stub, "/usr/local/cuda/lib64/stubs/"),
            (fetched("tensorrt"), "/usr/include/x86_64-linux-gnu"),
            (packages, "/usr/lib/python3.11/dist-packages"),
        ):
            images.buildah("add", "--quiet", name, source, place)
        images.buildah("commit", "--quiet", name, image)
    return image


def write_stub(path: Path) -> None:
    """A library with the names of the driver's functions, as CUDA's own stub has them."""
    compiler = toolchain.tool("cc")
    header = toolchain.cuda_include() / "cuda.h"
    command = [compiler, "-E", "-I", header.parent, header]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = set(re.findall(r"\bCUresult\s+(cu\w+)\s*\(", text))
    assert "cuMemAlloc_v2" in names
    source = path.with_suffix(".c")
    source.write_text("\n".join("int %s(void) { return 0; }" % name for name in sorted(names)))
    options = ["-shared", "-Wl,-soname,libcuda.so.1", "-fno-builtin", source, "-o", path]
    subprocess.run([compiler, *options], check=True)


@pytest.fixture(scope="module")
def arguments(cuda: str) -> dict[str, str]:
    """Those of AGX Orin, with the versions that this base has."""
    return {
        **build_args(find_target("jetson-agx-orin")),
        "BASE_IMAGE": cuda,
        "RUNTIME_IMAGE": images.base(),
        "PYTHON": "3.11",
        "REQUIREMENTS": "jp6",
        "CUDA": "13.0",
        "TENSORRT": "10.14.1",
    }


@pytest.fixture(scope="module")
def image(arguments: dict[str, str]) -> str:
    return images.build("Dockerfile.jetson", arguments, "edgepool-orin")


@pytest.fixture(scope="module")
def files(image: str) -> Iterator[Path]:
    with images.container(image) as (_, folder):
        yield folder


def python(image: str, script: str) -> str:
    with images.container(image) as (name, _):
        command = ("/opt/edgepool/bin/python", "-c", script)
        return images.buildah("run", *images.CHROOT, "--user", "10001", name, "--", *command)


def test_the_library_is_where_engines_take_it_from(image: str) -> None:
    script = (
        "import json; from edgepool.plugin_library import build_record, installed;"
        "print(json.dumps([str(installed()), build_record(installed())]))"
    )
    place, record = json.loads(python(image, script))
    assert place == "/" + LIBRARY
    assert (record["sm"], record["cuda"], record["machine"]) == ([87], "13.0", "x86_64")
    assert record["tensorrt"].startswith("10.14.")
    assert not record["emulated"]


def test_pycuda_was_linked_without_a_driver(arguments: dict[str, str]) -> None:
    """It asks for the libcuda that the driver brings when the image runs, and for no cuRAND."""
    image = images.build("Dockerfile.jetson", arguments, "edgepool-packages", "packages")
    with images.container(image) as (_, files):
        (module,) = files.glob(PLACE + "/pycuda/_driver*.so")
        dump = ["objdump", "-p", module]
        needed = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    assert "libcuda.so.1" in needed
    assert "libcurand" not in needed
    script = "import pycuda; print(pycuda.VERSION_TEXT)\ntry:\n import pycuda.driver\nexcept "
    assert "libcuda.so.1" in python(image, script + "ImportError as error:\n print(error)")


def test_the_image_has_tensorrt_for_python_and_no_compiler(files: Path) -> None:
    assert (files / PLACE / "tensorrt" / "__init__.py").is_file()
    names = {path.name for path in files.rglob("*") if path.is_file()}
    assert not {"nvcc", "ptxas", "gcc", "g++", "c++", "cmake", "ninja", "cuda.h"} & names


def test_size_of_our_layers(image: str) -> None:
    assert images.megabytes(image) - images.megabytes(images.base()) < MOST_MEGABYTES


def test_a_library_that_was_compiled_elsewhere(
    arguments: dict[str, str], files: Path, tmp_path: Path
) -> None:
    """Is taken from the context of a package where it fits, and refused where it does not."""
    context = tmp_path / "package"
    context.mkdir()
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    paths = subprocess.run(listed, capture_output=True, text=True, check=True, cwd=images.ROOT)
    for path in paths.stdout.split():
        if (images.ROOT / path).is_file() and not path.startswith(("tests/", "docs/")):
            (context / path).parent.mkdir(parents=True, exist_ok=True)
            (context / path).write_bytes((images.ROOT / path).read_bytes())
    library = "plugins/libedgepool_plugins.so"
    (context / library).write_bytes((files / LIBRARY).read_bytes())
    taken = {**arguments, "PLUGINS": library}
    images.build("Dockerfile.jetson", taken, "edgepool-taken", "plugins", context=context)
    for change, message in (
        ({"TENSORRT": "10.3.0.30"}, "tensorrt is 10.14, not 10.3"),
        ({"TENSORRT": "10.14.1", "PLUGINS": "README.md"}, "not a library of edgepool's plugins"),
    ):
        with pytest.raises(RuntimeError, match=message):
            refused = {**taken, **change}
            images.build("Dockerfile.jetson", refused, "edgepool-taken", "plugins", context=context)
