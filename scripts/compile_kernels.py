#!/usr/bin/env python3
"""Compile the plugins for every GPU that edgepool supports, and write docs/kernels.md's tables.

nvcc 13 compiles for sm_80 and later; for sm_72, which it does not know, clang-19 over CUDA 11.8.
Each links a whole plugin library. No GPU is needed.

    scripts/toolchains.sh                  # once: CUDA 11.8, TensorRT's headers, cuobjdump
    scripts/compile_kernels.py             # write the tables; fails if a kernel spills
    scripts/compile_kernels.py --check     # the same, but fails if the tables are not these

--sm and --operator choose a part, which is compiled and with --check compared, never written. What
has not changed since it was compiled last is not compiled again.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kernel_report

ROOT = Path(__file__).resolve().parents[1]
PLUGINS = ROOT / "plugins"
DOCUMENT = ROOT / "docs" / "kernels.md"
CLANG_SMS, NVCC_SMS = (72,), (80, 86, 87, 89, 90, 100, 120)
WARNINGS = ("-Wall", "-Wextra", "-Werror")


class Failed(Exception):
    """One line: what is wrong and what to do."""


class Compiler:
    """Compiles and links for one architecture, into `folder`; keeps what has not changed."""

    def __init__(self, folder: Path, toolchains: Path, sm: int) -> None:
        self.folder, self.sm = folder, sm
        folder.mkdir(parents=True, exist_ok=True)
        common: list[object] = ["-std=c++17", "-O3", "-DNDEBUG", "-I", PLUGINS]
        common += ["-isystem", toolchains / "tensorrt"]
        if sm in CLANG_SMS:
            cuda = toolchains / "cuda-11.8"
            clang = "clang++-19"
            # Xavier has TensorRT 8.5, whose interface is V2.
            common += ["-fPIC", *WARNINGS, "-DEDGEPOOL_PLUGIN_V2"]
            self.host = [clang, "-isystem", cuda / "include", *common]
            self.device = [clang, "-x", "cuda", "--cuda-path=%s" % cuda, *common]
            self.device += ["--cuda-gpu-arch=sm_%d" % sm, "-Wno-unknown-cuda-version"]
            self.device.append("-Wno-pass-failed")  # loops that nvcc unrolls and clang does not
            self.device += ["-Xcuda-ptxas", "-v", "-DGPU_ONLY_ARCH=72"]
            self.link_flags = ["-L%s" % (cuda / "lib64"), "-lcudart"]
            release = _found(r"version ([\d.]+)", _output(clang, "--version"))
            ptxas = _found(r"V([\d.]+)", _output(cuda / "bin" / "ptxas", "--version"))
            self.version = "clang %s with ptxas %s" % (release, ptxas)
        else:
            common.append("-Xcompiler=" + ",".join(["-fPIC", *WARNINGS]))
            self.host = ["nvcc", *common]
            self.device = ["nvcc", "-x", "cu", *common, "-Werror=all-warnings"]
            self.device += ["-arch=sm_%d" % sm, "-Xptxas=-v", "-DGPU_ONLY_ARCH=80"]
            self.link_flags = []
            self.version = "nvcc " + _found(r"V([\d.]+)", _output("nvcc", "--version"))

    def compile(self, source: Path, device: bool) -> tuple[Path, str]:
        """The object of a source, and what ptxas said."""
        command = [*(self.device if device else self.host), "-c", source]
        name = "-".join(source.relative_to(PLUGINS).with_suffix("").parts)
        digest = _digest([*command, self.version], with_includes(source))
        built = self.folder / ("%s-%s.o" % (digest[:16], name))
        log = built.with_suffix(".log")  # written last
        if not log.exists():
            said = _run([*command, "-o", built])
            log.write_text(said)
        return built, log.read_text()

    def link(self, objects: Sequence[Path]) -> None:
        library = self.folder / ("libedgepool_plugins-sm_%d.so" % self.sm)
        _run([self.device[0], "-shared", *objects, *self.link_flags, "-o", library])


def with_includes(source: Path) -> list[Path]:
    """The source and all of plugins/ that it includes, directly or not."""
    known: set[Path] = set()
    pending = [source]
    while pending:
        path = pending.pop()
        if path not in known:
            known.add(path)
            names = re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE)
            tried = [folder / name for name in names for folder in (path.parent, PLUGINS)]
            pending += [found.resolve() for found in tried if found.exists()]
    return sorted(known)


def _digest(command: Sequence[object], files: Sequence[Path]) -> str:
    digest = hashlib.sha256("\0".join(map(str, command)).encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _run(command: Sequence[object]) -> str:
    """Runs it; what it printed on stderr. Raises Failed."""
    words = list(map(str, command))
    try:
        run = subprocess.run(words, capture_output=True, text=True)
    except FileNotFoundError:
        raise Failed("not installed: %s" % words[0]) from None
    if run.returncode:
        sys.stderr.write("%s\n%s%s" % (shlex.join(words), run.stdout, run.stderr))
        raise Failed("%s failed" % words[0])
    return run.stderr


def _output(*command: object) -> str:
    try:
        return subprocess.run(
            list(map(str, command)), capture_output=True, text=True, check=True
        ).stdout
    except FileNotFoundError:
        raise Failed("not installed: %s (scripts/toolchains.sh)" % command[0]) from None


def _found(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if not found:
        raise Failed("no version in %r" % text)
    return found.group(1)


def compiled(
    compilers: Sequence[Compiler], operators: Sequence[str], tools: Path, jobs: int
) -> list[kernel_report.Kernel]:
    """Every kernel of the operators, all if there are none, as each compiler makes it.

    Links a whole plugin library for each architecture when all operators are asked for.
    """
    sources = sorted(PLUGINS.glob("*/plugin.cpp"))
    chosen = [s for s in sources if not operators or s.parent.name in operators]
    common = [] if operators else sorted((PLUGINS / "common").glob("*.cpp"))
    kernels: list[kernel_report.Kernel] = []
    with ThreadPoolExecutor(jobs) as pool:
        running = [
            (
                compiler,
                [(s, pool.submit(compiler.compile, s, s in chosen)) for s in chosen + common],
            )
            for compiler in compilers
        ]
        for compiler, of_sources in running:
            built = [(source, *future.result()) for source, future in of_sources]
            for source, file, log in built:
                if source in chosen:
                    loads = kernel_report.global_loads(file, compiler.sm, tools)
                    kernels += kernel_report.kernels(source.parent.name, log, loads)
            if not operators:
                compiler.link([file for _, file, _ in built])
    return kernels


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    default = os.environ.get("EDGEPOOL_TOOLCHAINS") or cache / "edgepool" / "toolchains"
    add("--check", action="store_true", help="compare with the tables instead of writing them")
    add("--sm", type=int, action="append", choices=CLANG_SMS + NVCC_SMS, help="may be repeated")
    add("--operator", action="append", default=[], help="folder of plugins/; may be repeated")
    add("--toolchains", type=Path, default=default, help="what scripts/toolchains.sh fetched")
    add("--output", type=Path, default=ROOT / "build" / "kernels")
    add("--jobs", type=int, default=2, help="compilers at a time (default 2)")
    options = parser.parse_args(arguments)
    sms = options.sm or [*CLANG_SMS, *NVCC_SMS]
    whole = not options.sm and not options.operator
    try:
        compilers = [Compiler(options.output, options.toolchains, sm) for sm in sms]
        tools = options.toolchains / "tools"
        kernels = compiled(compilers, options.operator, tools, options.jobs)
        launches = kernel_report.launches()
        tables = kernel_report.tables(
            kernels, launches, dict.fromkeys(c.version for c in compilers)
        )
    except (Failed, kernel_report.Unknown) as error:
        print("error: %s" % error, file=sys.stderr)
        return 1
    problems = [
        "%s spills %d bytes on sm_%d" % (k.name, k.spills, k.sm) for k in kernels if k.spills
    ]
    if options.check and not kernel_report.same_compilers(DOCUMENT.read_text(), tables):
        print("docs/kernels.md comes from other compilers, so its tables are not compared")
    elif options.check:
        problems += kernel_report.differences(DOCUMENT.read_text(), tables, whole)
    elif whole:
        DOCUMENT.write_text(kernel_report.replaced(DOCUMENT.read_text(), tables))
    else:
        print(tables)
    for problem in problems:
        print("error: %s" % problem, file=sys.stderr)
    print("%d kernels, %d faults" % (len(kernels), len(problems)))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
