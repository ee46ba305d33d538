"""Compile C++ and CUDA sources for the tests of the plugins; what has not changed is kept.

Objects and programs lie in build/tests, under a name that holds a digest of everything that went
into them, so that several test processes share them and a second run compiles nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Iterable, Sequence

import pytest

ROOT = Path(__file__).parents[2]
PLUGINS = ROOT / "plugins"
RUNTIME = PLUGINS / "emulation" / "runtime"
BUILD = ROOT / "build" / "tests"

WARNINGS = ("-Wall", "-Wextra", "-Werror")
# How a source is built to run under the emulation. `checked` is the runtime that watches every
# access; the others link the plain one.
KINDS = {
    "plain": (),
    "asan": ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    "tsan": ("-fsanitize=thread",),
    "checked": ("-fsanitize=thread,alignment", "-DEMULATION_CHECKED"),
}


def cuda_include() -> Path:
    """The folder with NVIDIA's headers (cuda_fp16.h and its like); no GPU or nvcc is needed."""
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if home and (Path(home) / "include" / "cuda_fp16.h").exists():
            return Path(home) / "include"
    pytest.skip("no CUDA headers: set CUDA_HOME to a toolkit, 12.2 or later")


def tool(*names: str) -> str:
    """The first of the programs that is installed; skips the test if none is."""
    for name in names:
        path = shutil.which(name)
        if path:
            return path
    pytest.skip("not installed: " + " or ".join(names))


def _digest(parts: Iterable[object]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.read_bytes() if isinstance(part, Path) else str(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()[:16]


def compile_once(
    name: str, command: Sequence[object], inputs: Iterable[Path], output_flag: str = "-o"
) -> Path:
    """Run `command OUTPUT_FLAG file` unless the same was run before; returns the file.

    `inputs` are the files whose content decides whether it is the same.
    """
    key = _digest([*map(str, command), *sorted(set(inputs))])
    BUILD.mkdir(parents=True, exist_ok=True)
    output = BUILD / ("%s-%s" % (key, name))
    with (BUILD / (output.name + ".lock")).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not output.exists():
            staged = output.with_name("staged-" + output.name)
            run = subprocess.run(
                [*map(str, command), output_flag, str(staged)], capture_output=True, text=True
            )
            if run.returncode:
                pytest.fail("%s\n%s" % (" ".join(run.args), run.stderr), pytrace=False)
            staged.rename(output)
    return output


def with_includes(*sources: Path) -> set[Path]:
    """The files and all that they include in quotes, directly or not."""
    known: set[Path] = set()
    pending = list(sources)
    while pending:
        path = pending.pop()
        if path in known:
            continue
        known.add(path)
        for name in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE):
            found = [f / name for f in (path.parent, PLUGINS) if (f / name).exists()]
            pending += [f.resolve() for f in found[:1]]
    return known


def base_flags(compiler: str) -> list[object]:
    # -ffp-contract: one rounding for each operation, on every processor.
    flags = [compiler, "-std=c++17", "-g", "-fPIC", "-ffp-contract=off", *WARNINGS]
    if "clang" not in Path(compiler).name:
        # Else the shared memory of a template is one for all libraries of a process.
        flags.append("-fno-gnu-unique")
    return [*flags, "-isystem", cuda_include(), "-I", PLUGINS]


def runtime_objects(checked: bool, compiler: str | None = None) -> list[Path]:
    """The emulation's runtime, built without sanitizers."""
    compiler = compiler or tool("g++")
    sources = [
        *RUNTIME.glob("*.cpp"),
        *(RUNTIME / ("checked" if checked else "plain")).glob("*.cpp"),
    ]
    flags = [*base_flags(compiler), "-O2", "-c"]
    return [compile_once(s.stem + ".o", [*flags, s], with_includes(s)) for s in sorted(sources)]


def emulated(
    source: Path, kind: str, *flags: str, library: bool = False, compiler: str | None = None
) -> Path:
    """A program, or a shared library, that runs the kernels of `source` on the CPU.

    `kind` is a key of KINDS. The sanitizers' own run-time libraries are linked for all but
    `checked`, whose runtime answers the compiler's calls itself.
    """
    compiler = compiler or tool("g++")
    built = compile_once(
        source.stem + ".o",
        [*base_flags(compiler), "-O1", *KINDS[kind], *flags, "-c", source],
        with_includes(source),
    )
    objects = [built, *runtime_objects(kind == "checked", compiler)]
    sanitizers = () if kind == "checked" else KINDS[kind]
    shared = ("-shared", "-Wl,-Bsymbolic") if library else ()
    return compile_once(
        source.stem + (".so" if library else ""),
        [compiler, *shared, *sanitizers, *objects, "-ldl", "-lpthread"],
        objects,
    )


def run(program: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run an emulated program; its stdout and stderr come together as `stdout`."""
    return subprocess.run(
        [str(program), *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
