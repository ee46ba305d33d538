"""The two commands of the README, typed as they stand there in one folder, with no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgepool.bundle import Bundle
from edgepool.engine import gpu, store

ROOT = Path(__file__).resolve().parents[2]

pytest.importorskip(
    "tensorrt_rtx_bindings", reason="tensorrt-rtx is not installed: pip install 'edgepool[rtx]'"
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(gpu.find() is not None, reason="these tests need no GPU here"),
]


def edgepool(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    cache = {"EDGEPOOL_CACHE": str(folder / "cache")}
    return subprocess.run(
        [sys.executable, "-m", *line.split()],
        cwd=folder,
        env={**os.environ, **cache, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_they_end_with_an_engine(tmp_path: Path) -> None:
    assert edgepool(tmp_path, "edgepool init edgepool-tiny -o model.pt --seed 1").returncode == 0
    assert edgepool(tmp_path, "edgepool export model.pt").returncode == 0
    done = edgepool(tmp_path, "edgepool build-engine --int8")
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    said = [line for line in lines if not line.split(":")[-1].strip()[:1].isdigit()]
    assert said[0].startswith("no calibration yet: calibrating on text that the model writes")
    assert any(line.startswith("INT8 costs ") for line in lines)
    assert "tensorrt-rtx, portable bodies, no plugins: int8, built by TensorRT-RTX" in done.stderr
    steps = ("sampling from the model", "measuring ranges", "comparing with FP32", "building the")
    for step in steps:
        assert any(line.startswith(step) and line.endswith(" s") for line in lines), step
    Bundle.open(tmp_path / "edgepool-bundle").verify()
    record = store.read(tmp_path / "edgepool-bundle" / "engines", "rtx-int8")
    assert record is not None
    assert record["form"] == "tensorrt-rtx, portable bodies, no plugins"
    assert record["layer_types"]["int8"] > 100
    again = edgepool(tmp_path, "edgepool build-engine --int8 --json")
    assert json.loads(again.stdout)["reused"]
    assert "model.int8.onnx is there already: INT8 costs" in again.stderr
