"""A plugin library that is only opened, as Triton's TensorRT backend and trtexec 8.5 do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgepool.ops.registry import DOMAIN, operators
from tests.plugins import toolchain
from tests.plugins.conformance import build

OPEN = """
import ctypes, sys
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
ctypes.CDLL(sys.argv[2])
ctypes.CDLL(None).fflush(None)
"""


@pytest.fixture(scope="module")
def registry() -> Path:
    source = Path(__file__).with_name("registry.cpp")
    command = [*build.flags(toolchain.tool("g++")), "-shared", source]
    return toolchain.compile_once("registry.so", command, [source])


@pytest.mark.parametrize(
    ("interface", "asked", "registers"), [(2, None, True), (3, None, False), (3, "1", True)]
)
def test_what_a_library_registers_when_it_is_opened(
    registry: Path, interface: int, asked: str | None, registers: bool
) -> None:
    """IPluginV3's creators only if asked: who calls getCreators has them already."""
    library = build.plugin_library("plain", interface)
    environment = {k: v for k, v in os.environ.items() if k != "EDGEPOOL_REGISTER_PLUGINS"}
    if asked:
        environment["EDGEPOOL_REGISTER_PLUGINS"] = asked
    command = [sys.executable, "-c", OPEN, registry, library]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    expected = [f"{DOMAIN}::{name}" for name in sorted(operators())] if registers else []
    assert sorted(result.stdout.split()) == expected
