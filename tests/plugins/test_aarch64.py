"""The plugins on aarch64: what scripts/cross_aarch64.sh makes, loaded and run under qemu-user.

Needs clang-19, the aarch64 binutils, qemu-user, and what `scripts/toolchains.sh --aarch64` fetches.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.plugins import toolchain
from tests.plugins.conformance import build
from tests.plugins.conformance.host import DATA_TYPES, fields_of
from tests.plugins.conformance.operations import OPERATIONS, Arrays, Operation
from tests.plugins.test_device_compilers import fetched

CASES = 60  # of each operator and interface
INTERFACES = {3: "getCreators", 2: "getPluginCreators"}
BUILT = toolchain.ROOT / "build" / "aarch64"
Case = tuple[Operation, Any, Arrays, int]  # the last is the architecture to imitate


def cross_compiled(*targets: str) -> str:
    """What scripts/cross_aarch64.sh says of them."""
    for tool in ("clang++-19", "aarch64-linux-gnu-objdump", "qemu-aarch64"):
        toolchain.tool(tool)
    fetched("aarch64")
    command = ["bash", "scripts/cross_aarch64.sh", "--no-tests", *targets]
    run = subprocess.run(command, cwd=toolchain.ROOT, capture_output=True, text=True)
    if run.returncode:
        pytest.fail(run.stdout + run.stderr, pytrace=False)
    return run.stdout


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("board", "interface", "glibc"), [("xavier", 2, "2.31"), ("orin", 3, "2.35")]
)
def test_library_for_a_board(board: str, interface: int, glibc: str) -> None:
    """It needs no newer glibc than the board's, and loads and lists every operator."""
    said = cross_compiled(board)
    assert "of glibc " + glibc in said
    for name in OPERATIONS:
        assert "edgepool::%s version 1, IPluginV%d" % (name, interface) in said


def words(*values: int) -> bytes:
    return np.array(values, "<i8").tobytes()


def text(value: bytes) -> bytes:
    return words(len(value)) + value


def tensor(array: np.ndarray) -> bytes:
    return words(DATA_TYPES[array.dtype], array.ndim, *array.shape, array.nbytes)


def recorded(case: Case) -> bytes:
    """A case as tests/plugins/conformance/replay.cpp reads it."""
    operation, parameters, data, sm = case
    fields = fields_of(operation.attributes(parameters))
    outputs = operation.like(parameters, data)
    parts = [words(sm), text(operation.name.encode()), words(len(fields))]
    for field in fields:
        assert field.name and field.data is not None
        parts += [text(field.name.encode()), words(field.type, field.length), text(field.data)]
    parts.append(words(len(data), len(outputs)))
    parts += [tensor(a) + text(a.tobytes()) for a in data.values()]
    parts += [tensor(a) + words(i) for a, i in zip(outputs.values(), operation.aliases())]
    return b"".join(parts)


def random_cases(operation: Operation) -> list[Case]:
    """The same in every run."""
    found: list[Case] = []

    @seed(1)
    @settings(
        max_examples=CASES, phases=[Phase.generate], database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(parameters=operation.cases, sm=st.sampled_from((72, 80)))
    def draw(parameters: Any, sm: int) -> None:
        found.append((operation, parameters, operation.tensors(parameters), sm))

    draw()
    return found


def replayed(command: list[str], library: Path, interface: int, cases: list[Case]) -> list[Arrays]:
    """The outputs of the cases, by the library's plugins."""
    with_folder = library.with_suffix(".cases"), library.with_suffix(".results")
    with_folder[0].write_bytes(words(len(cases)) + b"".join(map(recorded, cases)))
    command = [*command, str(library), INTERFACES[interface], *map(str, with_folder)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert run.returncode == 0, run.stderr
    rest = with_folder[1].read_bytes()
    results = []
    for operation, parameters, data, _ in cases:
        outputs = operation.like(parameters, data)
        for name, array in outputs.items():
            outputs[name] = np.frombuffer(rest[: array.nbytes], array.dtype).reshape(array.shape)
            rest = rest[array.nbytes :]
        results.append(outputs)
    assert not rest
    return results


def check(run: Callable[[list[Case]], list[Arrays]]) -> None:
    """Random cases of every operator, against the PyTorch definitions."""
    cases = [case for operation in OPERATIONS.values() for case in random_cases(operation)]
    assert len(cases) >= len(OPERATIONS) * CASES // 2
    for (operation, parameters, data, _), got in zip(cases, run(cases)):
        operation.check(parameters, data, got, operation.define(parameters, data))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("interface", INTERFACES)
def test_conformance_under_qemu(interface: int) -> None:
    cross_compiled("emulated")
    sysroot = fetched("aarch64") / "sysroot"
    command = ["qemu-aarch64", "-L", str(sysroot), str(BUILT / "replay")]
    library = BUILT / ("emulated-v%d.so" % interface)
    check(lambda cases: replayed(command, library, interface, cases))


@pytest.mark.slow
@pytest.mark.parametrize("interface", INTERFACES)
def test_replay_agrees_here(interface: int) -> None:
    """The same program and cases on this machine's processor."""
    source = Path(build.__file__).with_name("replay.cpp")
    compiler = toolchain.tool("g++")
    command = [*build.flags(compiler), "-rdynamic", source, "-ldl"]
    program = toolchain.compile_once("replay", command, toolchain.with_includes(source))
    library = build.plugin_library("plain", interface)
    check(lambda cases: replayed([str(program)], library, interface, cases))
