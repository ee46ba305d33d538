"""Build the plugin library for the CPU emulation, and the harness that plays TensorRT for it."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.plugins import toolchain
from tests.plugins.test_device_compilers import fetched

HERE = Path(__file__).parent
# What the plugins' own objects call through heap.cpp.
WRAPPED = ("malloc", "calloc", "realloc", "_Znwm", "_Znam", "_ZnwmRKSt9nothrow_t",
           "_ZnamRKSt9nothrow_t")  # fmt: skip


def flags(compiler: str) -> list[object]:
    """The compiler, and what it compiles a source with that includes TensorRT."""
    old = "-Wno-deprecated-declarations"  # the interface of TensorRT 8
    return [*toolchain.base_flags(compiler), "-isystem", fetched("tensorrt"), "-O1", old]


def harness() -> Path:
    """libconformance: it needs neither the plugins nor the emulation."""
    compiler = toolchain.tool("g++")
    source = HERE / "harness.cpp"
    return toolchain.compile_once(
        "conformance.so",
        [*flags(compiler), "-shared", source, "-ldl"],
        toolchain.with_includes(source),
    )


def plugin_library(kind: str, interface: int, *changes: tuple[str, str]) -> Path:
    """All plugins with the emulation; `kind` as in toolchain.KINDS, interface 2 or 3.

    changes: pieces of text of the sources, each of which must occur once, and what replaces them.
    """
    sources = sorted(p for p in toolchain.PLUGINS.glob("*/*.cpp") if p.parent.name != "emulation")
    if changes:
        sources = _changed(sources, changes)
    compiler = toolchain.tool("g++")
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(lambda s: _object(compiler, s, kind, interface), sources))
    heap = HERE / "heap.cpp"
    objects += [
        toolchain.compile_once(
            "heap.o", [compiler, *flags(compiler)[1:], "-O1", "-c", heap], [heap]
        ),
        *toolchain.runtime_objects(kind == "checked"),
    ]
    sanitizers = () if kind == "checked" else toolchain.KINDS[kind]
    return toolchain.compile_once(
        "edgepool_plugins.so",
        [compiler, "-shared", "-Wl,-Bsymbolic", *sanitizers, *objects, "-ldl", "-lpthread"],
        objects,
    )


def _object(compiler: str, source: Path, kind: str, interface: int) -> Path:
    name = "%s-%s.o" % (source.parent.name, source.stem)
    # Operators know nothing of TensorRT; their kernels are compiled once for both interfaces.
    which = ["-DEDGEPOOL_PLUGIN_V2"] if interface == 2 and source.parent.name == "common" else []
    if source.parents[1] != toolchain.PLUGINS:
        which.append("-Wno-error")  # a change may leave something unused
    compiled = [*flags(compiler), *toolchain.KINDS[kind], *which, "-c", source]
    command = [compiler, "-I", source.parent.parent, *compiled[1:]]
    built = toolchain.compile_once(name, command, toolchain.with_includes(source))
    wraps = ["-Wl,--wrap=" + symbol for symbol in WRAPPED]
    return toolchain.compile_once(
        "wrapped-" + name, [compiler, "-r", "-nostdlib", *wraps, built], [built]
    )


def _changed(sources: Sequence[Path], changes: Sequence[tuple[str, str]]) -> list[Path]:
    """The sources, with the changes made in copies of those that they concern."""
    originals = [p for p in toolchain.PLUGINS.rglob("*") if p.suffix in (".cpp", ".hpp", ".cuh")]
    originals.append(toolchain.PLUGINS / "emulation" / "control.h")
    texts = {p: p.read_text() for p in originals}
    changed = set()
    for old, new in changes:
        holders = [path for path, text in texts.items() for _ in range(text.count(old))]
        assert len(holders) == 1, "%r is in %s" % (old, holders or "no file")
        texts[holders[0]] = texts[holders[0]].replace(old, new)
        changed.add(holders[0])
    digest = hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()[:16]
    folder = toolchain.BUILD / "variants" / digest
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=toolchain.BUILD) as temporary:
            staged = Path(temporary) / "plugins"
            for path, text in texts.items():
                copy = staged / path.relative_to(toolchain.PLUGINS)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text(text)
            folder.parent.mkdir(exist_ok=True)
            staged.rename(folder)
    concerned = {s for s in sources if toolchain.with_includes(s) & changed}
    return [folder / s.relative_to(toolchain.PLUGINS) if s in concerned else s for s in sources]
