"""Whether a machine has what engines need: a line for each thing, with what to do about it.

A Jetson is held against the profile of its board and JetPack (export/targets), another machine
against what edgepool needs at least.
"""

from __future__ import annotations

from pathlib import Path
from typing import Iterator, List, Optional

from .. import __version__
from ..errors import BadInput
from ..plugin_library import NAME, build_record, installed
from ..targets import Target, find_target
from . import condition
from .line import MISSING, OK, WRONG, Line
from .machine import Found, Machine, numbers

LEAST_TENSORRT = (10, 3)  # of a machine that is no Xavier
LEAST_PYTHON = (3, 8)
PACKAGES = ("jinja2", "numpy", "onnxruntime", "rich", "tokenizers", "typer")
JETPACKS = {35: "JetPack 5", 36: "JetPack 6", 38: "JetPack 7", 39: "JetPack 7"}


def examine(root: Path = Path("/")) -> List[Line]:
    """Every line about the machine whose files are below `root`; raises BadInput for no folder."""
    if not root.is_dir():
        raise BadInput("%s: no such folder" % root)
    machine = Machine(root)
    target = profile_of(machine)
    lines = [*_system(machine, target), *_gpu(machine)]
    if lines[-1].state == MISSING:
        lines.append(_tensorrt_rtx(machine))
    else:
        lines += _nvidia(machine, target)
    lines += _python(machine)
    if target is not None:
        lines.append(condition.power(machine))
    return [*lines, *condition.memory(machine, target), condition.disk(root)]


def profile_of(machine: Machine) -> Optional[Target]:
    """The profile of a Jetson; None for another machine.

    By its chip and release; where a container does not show the release, by the image's TensorRT.
    """
    chip, release = machine.chip(), machine.l4t()[0]
    if chip == "tegra194":
        return find_target("jetson-agx-xavier")
    if chip != "tegra234":
        return None
    if not release:
        tensorrt = machine.find_library("libnvinfer.so")
        version = numbers(tensorrt.version)[:2] if tensorrt else (10, 3)
        release = 35 if version < (10,) else 36 if version <= (10, 3) else 39
    suffix = "-jp5" if release == 35 else "-jp7" if release >= 38 else ""
    return find_target("jetson-agx-orin" + suffix)


# ----------------------------------------------------------------------------------- system


def _system(machine: Machine, target: Optional[Target]) -> Iterator[Line]:
    yield Line("system", OK, machine.system())
    if not machine.chip():
        return
    yield Line("board", OK if target else WRONG, machine.board(), "" if target else _other_board())
    release, version = machine.l4t()
    meta = machine.packages().get("nvidia-jetpack", "")
    name = "JetPack %s" % meta.split("-")[0] if meta else JETPACKS.get(release, "")
    if not release and machine.in_container():
        fix = "mount /etc/nv_tegra_release into the container to compare it with the image"
        yield Line("JetPack", OK, "not to be seen from the container", fix)
    elif not release:
        fix = "reinstall JetPack: a board has this file"
        yield Line("JetPack", MISSING, "no /etc/nv_tegra_release", fix)
    elif release < 35:
        fix = "flash JetPack 5.1 (Xavier) or 6 (Orin): TensorRT before 8.5 is not supported"
        yield Line("JetPack", WRONG, "L4T %s" % version, fix)
    elif release not in JETPACKS:
        fix = "edgepool knows JetPack 5, 6 and 7: install one of them, or a newer edgepool"
        yield Line("JetPack", WRONG, "unknown, L4T %s" % version, fix)
    else:
        yield Line("JetPack", OK, "%s, L4T %s" % (name, version))


def _other_board() -> str:
    return "edgepool is made for AGX Xavier and AGX Orin: expect to build the plugins yourself"


def _gpu(machine: Machine) -> Iterator[Line]:
    gpus, driver = machine.gpus(), machine.driver()
    inside = " (in a container: start it with --runtime nvidia)" if machine.in_container() else ""
    if machine.chip() or gpus:
        if driver is None:
            fix = "install NVIDIA's driver" + inside
            yield Line("driver", MISSING, "no libcuda.so", fix)
        else:
            yield Line("driver", OK, driver.version or "found", path=driver.path)
    if gpus:
        yield Line("GPU", OK, ", ".join(gpus))
    elif machine.chip():
        yield Line("GPU", WRONG, "no /dev/nvhost-gpu or /dev/nvgpu", "reboot the board" + inside)
    else:
        fix = (
            "models run on the CPU (ONNX Runtime), and engines of TensorRT-RTX can be built"
            + inside
        )
        yield Line("GPU", MISSING, "no NVIDIA GPU", fix)


# ----------------------------------------------------------------------------------- NVIDIA


def _nvidia(machine: Machine, target: Optional[Target]) -> Iterator[Line]:
    reinstall = (
        "sudo apt install --reinstall nvidia-jetpack"
        if target
        else "install TensorRT 10.3 or later"
    )
    yield _versioned(
        "CUDA", machine.cuda(), target, "cuda", "install CUDA" if not target else reinstall
    )
    if target is not None and target.software["tensorrt"].startswith("8."):
        yield _versioned("cuDNN", machine.find_library("libcudnn.so"), target, "cudnn", reinstall)
    tensorrt = machine.find_library("libnvinfer.so")
    yield _versioned("TensorRT", tensorrt, target, "tensorrt", reinstall)
    parser = machine.find_library("libnvonnxparser.so")
    if parser is None:
        yield Line("TensorRT's ONNX parser", MISSING, "no libnvonnxparser.so", reinstall)
    else:
        yield _same("TensorRT's ONNX parser", parser, tensorrt, reinstall)
    module = machine.python_packages().get("tensorrt")
    if module is None:
        fix = (
            "sudo apt install python3-libnvinfer" if target else "pip install 'edgepool[tensorrt]'"
        )
        yield Line("TensorRT for Python", MISSING, "no package tensorrt", fix)
    else:
        yield _same("TensorRT for Python", module, tensorrt, reinstall)
    yield _plugins(machine, target, tensorrt)


def _versioned(
    name: str, found: Optional[Found], target: Optional[Target], key: str, fix: str
) -> Line:
    """A library against the version in the target's profile: major and minor count."""
    if found is None:
        return Line(name, MISSING, "not found", fix)
    wanted = numbers(target.software[key])[:2] if target is not None else ()
    have = numbers(found.version)[: len(wanted)]
    # A library may state its major version alone: libcudnn.so.8.
    if target is not None and have != wanted[: len(have)]:
        release = "%s has %s" % (target.title, target.software[key])
        return Line(name, WRONG, found.version, "%s: %s" % (release, fix), found.path)
    if target is None and key == "tensorrt" and numbers(found.version)[:2] < LEAST_TENSORRT:
        return Line(name, WRONG, found.version, fix, found.path)
    return Line(name, OK, found.version, path=found.path)


def _same(name: str, found: Found, tensorrt: Optional[Found], fix: str) -> Line:
    """A part of TensorRT, which has to be of the same version as its library."""
    ours, theirs = numbers(found.version)[:2], numbers(tensorrt.version)[:2] if tensorrt else ()
    length = min(len(ours), len(theirs))
    if tensorrt is not None and ours[:length] != theirs[:length]:
        fix = "TensorRT is %s: %s" % (tensorrt.version, fix)
        return Line(name, WRONG, found.version, fix, found.path)
    return Line(name, OK, found.version, path=found.path)


def _plugins(machine: Machine, target: Optional[Target], tensorrt: Optional[Found]) -> Line:
    name, fix = "plugin library", "edgepool build-plugins"
    path = installed() if machine.is_this else _library_below(machine)
    if path is None:
        return Line(name, MISSING, "no %s" % NAME, fix)
    try:
        record = build_record(path)
    except (BadInput, OSError) as error:
        return Line(name, WRONG, str(error), fix)
    architectures = "/".join(str(sm) for sm in record["sm"])
    shown = "%s, TensorRT %s, sm_%s" % (record["version"], record["tensorrt"], architectures)
    faults = []
    if record["version"] != __version__:
        faults.append("this is edgepool %s" % __version__)
    if record["emulated"]:
        faults.append("it runs on the CPU only")
    if tensorrt is not None and numbers(record["tensorrt"])[:1] != numbers(tensorrt.version)[:1]:
        faults.append("TensorRT is %s" % tensorrt.version)
    if target is not None and target.sm not in record["sm"] and not record["ptx"]:
        faults.append("the GPU is sm_%d" % (target.sm or 0))
    if machine.cpu() and record["machine"] != machine.cpu():
        faults.append("it is for %s" % record["machine"])
    if faults:
        return Line(name, WRONG, shown, "%s: %s" % (", ".join(faults), fix), str(path))
    return Line(name, OK, shown, path=str(path))


def _library_below(machine: Machine) -> Optional[Path]:
    """The library in the places of another machine where edgepool puts it."""
    folders = [site + "/edgepool/_data/plugins" for site in machine.site_folders()]
    for home in ("/root", *machine.names("/home", "*")):
        folders += machine.names(home + "/.cache/edgepool/plugins", "*")
    paths = (machine.path("%s/%s" % (folder, NAME)) for folder in folders)
    return next((path for path in paths if path is not None), None)


def _tensorrt_rtx(machine: Machine) -> Line:
    packages = machine.python_packages()
    found = next((packages[x] for x in packages if x.startswith("tensorrt-rtx")), None)
    if found is None:
        return Line("TensorRT-RTX", MISSING, "not installed", "pip install 'edgepool[rtx]'")
    return Line("TensorRT-RTX", OK, found.version, path=found.path)


# ----------------------------------------------------------------------------------- Python


def _python(machine: Machine) -> Iterator[Line]:
    version = machine.python()
    if not version:
        yield Line("Python", MISSING, "no /usr/bin/python3", "install Python 3.8 or later")
    elif numbers(version)[:2] < LEAST_PYTHON:
        yield Line("Python", WRONG, version, "install Python 3.8 or later")
    else:
        yield Line("Python", OK, version)
    found = machine.python_packages()
    for name in PACKAGES:
        package = found.get(name)
        if package is None and name == "onnxruntime":
            package = found.get("onnxruntime-gpu")
        if package is None:
            yield Line(name, MISSING, "not installed", "pip install edgepool")
        elif name == "onnxruntime" and {"onnxruntime", "onnxruntime-gpu"} <= set(found):
            fix = "pip uninstall both, then install the one you want: they overwrite each other"
            yield Line(name, WRONG, "onnxruntime and onnxruntime-gpu", fix)
        else:
            yield Line(name, OK, package.version, path=package.path)
