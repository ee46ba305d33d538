"""The code that runs on a Jetson: valid Python 3.8 (JetPack 5), and importable without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = "board cli engine kvpool package runtime serve".split()

# What `pip install edgepool` brings no extra for: these may be imported inside functions only.
EXTRAS = "torch onnx onnx_ir onnxscript safetensors gguf polygraphy transformers tensorrt pycuda"

IMPORT_ALL = """
import importlib, sys
for name in {blocked!r}.split():
    sys.modules[name] = None  # makes `import name` raise ModuleNotFoundError
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def board_side_files() -> list[Path]:
    package = ROOT / "edgepool"
    files = sorted(package.glob("*.py"))
    for name in PACKAGES:
        files += sorted((package / name).rglob("*.py"))
    return files


def vermin(paths: list[Path], *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        str(Path(sys.executable).with_name("vermin")),
        "-t=3.8-",
        "--no-tips",
        "--violations",
    ]
    return subprocess.run([*command, *options, *map(str, paths)], capture_output=True, text=True)


def test_python_3_8() -> None:
    result = vermin([*board_side_files(), ROOT / "jetson" / "entrypoint"])
    assert result.returncode == 0, result.stdout


def test_python_3_8_annotations_of_commands() -> None:
    """typer evaluates the annotations of a command, so `list[str]` there fails on the board."""
    commands = sorted((ROOT / "edgepool" / "cli").glob("*.py"))
    result = vermin(commands, "--eval-annotations", "--feature", "union-types")
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("source", "needs"),
    [
        ("match 1:\n    case _:\n        pass\n", "3.10"),
        ("'a'.removeprefix('b')\n", "3.9"),
        ("from typing import Annotated\n", "3.9"),
    ],
)
def test_the_check_sees_newer_python(source: str, needs: str, tmp_path: Path) -> None:
    (tmp_path / "newer.py").write_text(source)
    result = vermin([tmp_path / "newer.py"])
    assert result.returncode != 0
    assert needs in result.stdout


def test_imports_without_extras() -> None:
    modules = []
    for path in board_side_files():
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    script = IMPORT_ALL.format(blocked=EXTRAS)
    result = subprocess.run(
        [sys.executable, "-c", script, *modules], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
