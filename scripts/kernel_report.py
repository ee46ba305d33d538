"""What compilers and SASS say of the kernels, and the tables of docs/kernels.md made of it.

compile_kernels.py is the program; this module compiles nothing but launches.cpp.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN = "<!-- scripts/compile_kernels.py writes from here ... -->"
END = "<!-- ... to here -->"
NEITHER = "-"


class Unknown(Exception):
    """One line: what of a compiler's output or of the document cannot be read."""


@dataclass(frozen=True)
class Kernel:
    """A kernel that was compiled for an architecture."""

    operator: str  # folder of plugins/
    symbol: str
    sm: int
    registers: int  # of a thread
    static_shared: int  # bytes
    spills: int  # bytes of local memory, and of spilled registers stored and loaded
    load: int  # bits of the widest load from global memory

    @property
    def name(self) -> str:
        return readable([self.symbol])[self.symbol]


@dataclass(frozen=True)
class Launch:
    threads: int
    shared: int  # bytes of dynamic shared memory


@dataclass(frozen=True)
class Multiprocessor:
    """Limits by compute capability, from the CUDA C++ Programming Guide's table "Technical
    Specifications per Compute Capability"; granularities from the toolkit's cuda_occupancy.h."""

    warps: int
    blocks: int
    shared: int  # KiB
    reserved: int = 1024  # bytes of shared memory that each block costs besides its own
    shared_unit: int = 128  # bytes


MULTIPROCESSORS = {
    72: Multiprocessor(64, 32, 96, reserved=0, shared_unit=256),
    80: Multiprocessor(64, 32, 164),
    86: Multiprocessor(48, 16, 100),
    87: Multiprocessor(48, 16, 164),
    89: Multiprocessor(48, 24, 100),
    90: Multiprocessor(64, 32, 228),
    100: Multiprocessor(64, 32, 228),
    120: Multiprocessor(48, 24, 100),
}
REGISTERS, QUARTERS, REGISTER_UNIT = 64 << 10, 4, 256  # of a multiprocessor; units for a warp


def resident_blocks(sm: int, registers: int, threads: int, shared: int) -> int:
    """Blocks that a multiprocessor holds at once; `shared`: static and dynamic bytes of one."""
    limits = MULTIPROCESSORS[sm]
    warps = _up(threads, 32) // 32
    of_quarter = REGISTERS // QUARTERS // _up(registers * 32, REGISTER_UNIT)
    memory = _up(shared + limits.reserved, limits.shared_unit)
    by_memory = limits.shared * 1024 // memory if memory else limits.blocks
    return min(limits.blocks, limits.warps // warps, of_quarter * QUARTERS // warps, by_memory)


def occupancy(sm: int, registers: int, threads: int, shared: int) -> float:
    """Resident warps over the most that a multiprocessor holds."""
    blocks = resident_blocks(sm, registers, threads, shared)
    return blocks * (_up(threads, 32) // 32) / MULTIPROCESSORS[sm].warps


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


# ---- what the compilers say ----
def kernels(operator: str, ptxas: str, loads: Mapping[str, int]) -> list[Kernel]:
    """The kernels in what `ptxas -v` printed; `loads` as of global_loads."""
    found = []
    pieces = re.split(r"Compiling entry function '(\w+)' for 'sm_(\d+)\w?'", ptxas)
    for symbol, sm, text in zip(pieces[1::3], pieces[2::3], pieces[3::3]):
        # Device functions that are no kernels come after the kernel's own lines.
        spilled = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text
        )
        used = re.search(r"Used (\d+) registers(.*)", text)
        if not spilled or not used:
            raise Unknown("ptxas says nothing of %s for sm_%s" % (symbol, sm))
        shared = re.search(r"(\d+) bytes smem", used.group(2))
        found.append(
            Kernel(
                operator,
                symbol,
                int(sm),
                int(used.group(1)),
                int(shared.group(1)) if shared else 0,
                sum(map(int, spilled.groups())),
                loads.get(symbol, 0),
            )
        )
    return found


# How a kernel and its loads look in SASS, and in the PTX of sm_72, whose SASS cuobjdump 13 cannot
# read; a vector load of PTX is one instruction of SASS. cp.async loads, too.
SASS = re.compile(r"Function : (\w+)|\bLDG(?:STS)?\.E((?:\.\w+)*)")
PTX = re.compile(r"\.entry (\w+)|\bld\.global((?:\.\w+)*)")


def global_loads(object_file: Path, sm: int, tools: Path) -> dict[str, int]:
    """Bits of the widest load from global memory, by kernel, in an object for that architecture."""
    pattern, option, bits = (PTX, "-ptx", _ptx_bits) if sm < 75 else (SASS, "-sass", _sass_bits)
    environment = {**os.environ, "PATH": "%s:%s" % (tools, os.environ["PATH"])}
    command = [str(tools / "cuobjdump"), option, str(object_file)]
    try:
        run = subprocess.run(command, capture_output=True, text=True, env=environment)
    except FileNotFoundError:
        raise Unknown("no %s (scripts/toolchains.sh)" % command[0]) from None
    if run.returncode and "does not contain device code" in run.stderr:
        return {}  # of clang for a source that only declares its kernels
    if run.returncode:
        raise Unknown("cuobjdump: %s" % run.stderr.strip())
    widest: dict[str, int] = {}
    for kernel, load in pattern.findall(run.stdout):
        if kernel:
            current = kernel
            widest[current] = 0
        else:
            widest[current] = max(widest[current], bits(load))
    return widest


def _sass_bits(suffixes: str) -> int:
    """Of LDG.E's suffixes, such as .128.CONSTANT or .U16: bits that a thread loads."""
    found = re.search(r"\.[US]?(8|16|64|128|256)\b", suffixes)
    return int(found.group(1)) if found else 32


def _ptx_bits(suffixes: str) -> int:
    """Of ld.global's suffixes, such as .nc.v4.u32."""
    found = re.search(r"(?:\.v(\d))?\.[a-z](\d+)$", suffixes)
    return int(found.group(1) or 1) * int(found.group(2)) if found else 0


def launches() -> dict[str, dict[str, Launch]]:
    """By kernel and phase ("decode", "prefill"): its largest launch of launches.cpp."""
    cuda = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda") / "include"
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "launches")
        command = [
            "g++", "-std=c++17", "-O0", "-rdynamic", "-I", str(ROOT / "plugins"), "-isystem",
            str(cuda), "-Wl,--unresolved-symbols=ignore-all", str(ROOT / "scripts/launches.cpp"),
            "-ldl", "-o", program,
        ]  # fmt: skip
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise Unknown("scripts/launches.cpp does not compile: %s" % run.stderr.splitlines()[0])
        run = subprocess.run([program], capture_output=True, text=True)
        if run.returncode:
            raise Unknown("a launch of scripts/launches.cpp is refused")
    found: dict[str, dict[str, Launch]] = {}
    for line in run.stdout.splitlines():
        phase, symbol, threads, shared = line.split("\t")
        launch = Launch(int(threads), int(shared))
        of_symbol = found.setdefault(symbol, {})
        before = of_symbol.get(phase, launch)
        of_symbol[phase] = max(before, launch, key=lambda one: (one.shared, one.threads))
    return found


def readable(symbols: Iterable[str]) -> dict[str, str]:
    """Kernels' names without namespaces and parameters, by symbol."""
    symbols = list(symbols)
    if not shutil.which("c++filt"):
        raise Unknown("not installed: c++filt (binutils)")
    text = subprocess.run(
        ["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True
    ).stdout
    names = {}
    for symbol, name in zip(symbols, text.splitlines()):
        name = re.sub(r"^void |edgepool::(\w+::(detail::)?)?|gpu::", "", name[: name.rindex("(")])
        name = re.sub(r"\((bool|Pass)\)", r"\1 ", name).replace(" >", ">")
        names[symbol] = name.replace("signed char", "int8").replace("__half", "half")
    return names


# ---- the tables ----
def tables(
    compiled: Sequence[Kernel],
    launched: Mapping[str, Mapping[str, Launch]],
    compilers: Iterable[str],
) -> str:
    """Markdown: for each operator, a row for each kernel and a column for each architecture."""
    names = readable({k.symbol for k in compiled})
    sms = sorted({k.sm for k in compiled})
    spilling = sum(1 for k in compiled if k.spills)
    lines = [
        "%s. %d kernels for %d architectures; %s spill%s."
        % (
            "; ".join(compilers),
            len({k.symbol for k in compiled}),
            len(sms),
            spilling or "none",
            "s" if spilling in (0, 1) else "",
        ),
    ]
    for operator in sorted({k.operator for k in compiled}):
        rows: dict[str, list[Kernel]] = {}
        for kernel in compiled:
            if kernel.operator == operator:
                rows.setdefault(names[kernel.symbol], []).append(kernel)
        lines += ["", "### %s" % operator, ""]
        headings = ["kernel", "threads", "shared, KiB", "load", *("sm_%d" % sm for sm in sms)]
        lines += [_row(headings), _row([":--", *["--:"] * (len(headings) - 1)])]
        for name in sorted(rows):
            phases = launched.get(rows[name][0].symbol)
            if not phases:
                raise Unknown("scripts/launches.cpp launches no %s" % name)
            lines.append(_row(_cells_of(name, rows[name], list(phases.values()), sms)))
    return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    return "| %s |" % " | ".join(cells)


def _each(values: Sequence[str]) -> str:
    """Of decode and prefill, or one for both if they are the same."""
    return " / ".join(dict.fromkeys(values))


def _cells_of(
    name: str, of_name: Sequence[Kernel], phases: Sequence[Launch], sms: Sequence[int]
) -> list[str]:
    static = max(kernel.static_shared for kernel in of_name)
    cells = {kernel.sm: _cell(kernel, phases) for kernel in of_name}
    return [
        "`%s`" % name,
        _each([str(launch.threads) for launch in phases]),
        _each(["%.1f" % ((launch.shared + static) / 1024) for launch in phases]),
        str(min(kernel.load for kernel in of_name)),
        *(cells.get(sm, NEITHER) for sm in sms),
    ]


def _cell(kernel: Kernel, phases: Sequence[Launch]) -> str:
    shares = [
        occupancy(kernel.sm, kernel.registers, p.threads, p.shared + kernel.static_shared)
        for p in phases
    ]
    text = "%d: %s" % (kernel.registers, _each(["%.0f %%" % (100 * share) for share in shares]))
    return text + " **%d spilled**" % kernel.spills if kernel.spills else text


def replaced(document: str, text: str) -> str:
    """The document with other tables between the markers."""
    before, _, after = _split(document)
    return "%s%s\n\n%s\n\n%s%s" % (before, BEGIN, text, END, after)


def same_compilers(document: str, text: str) -> bool:
    """Whether the document's tables come from those compilers that these do."""
    versions = _first_line(text).split(". ")[0].split("; ")
    return set(versions) <= set(_first_line(_split(document)[1]).split(". ")[0].split("; "))


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0]


def differences(document: str, text: str, whole: bool) -> list[str]:
    """How the document's tables differ from these, a line each. Those of a part of the kernels or
    architectures are compared in what they have."""
    was, now = _cells(_split(document)[1]), _cells(text)
    found = [
        "docs/kernels.md says %s of %s, %s, not %s" % (was.get(key, "nothing"), *key, now[key])
        for key in now
        if was.get(key) != now[key] and (whole or key[1] != "load")
    ]
    if whole:
        gone = [key for key in was if key not in now]
        found += ["docs/kernels.md has %s, %s, which is no more" % key for key in gone]
    return found


def _split(document: str) -> tuple[str, str, str]:
    if document.count(BEGIN) != 1 or document.count(END) != 1:
        raise Unknown("docs/kernels.md has no place for the tables: %s" % BEGIN)
    before, rest = document.split(BEGIN)
    text, after = rest.split(END)
    return before, text, after


def _cells(text: str) -> dict[tuple[str, str], str]:
    """Cells by kernel and column heading."""
    cells: dict[tuple[str, str], str] = {}
    heading: list[str] = []
    for line in text.splitlines():
        if not line.startswith("| "):
            continue
        row = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if row[0] == "kernel":
            heading = row
        elif row[0] != ":--":
            cells.update({(row[0], h): c for h, c in zip(heading[1:], row[1:]) if c != NEITHER})
    return cells
