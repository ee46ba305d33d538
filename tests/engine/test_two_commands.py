"""The two commands of the README, typed as they stand there in one folder, with no GPU."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
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
    return subprocess.run(
        [sys.executable, "-m", *line.split()],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
    )


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "EDGEPOOL_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT)}


def start(folder: Path, line: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *line.split()],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in which the first command has been typed."""
    assert edgepool(tmp_path, "edgepool init edgepool-tiny -o model.pt --seed 1").returncode == 0
    assert edgepool(tmp_path, "edgepool export model.pt").returncode == 0
    return tmp_path


def test_they_end_with_an_engine(folder: Path) -> None:
    done = edgepool(folder, "edgepool build-engine --int8")
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    said = [line for line in lines if not line.split(":")[-1].strip()[:1].isdigit()]
    assert said[0].startswith("no calibration yet: calibrating on text that the model writes")
    assert any(line.startswith("INT8 costs ") for line in lines)
    assert "tensorrt-rtx, portable bodies, no plugins: int8, built by TensorRT-RTX" in done.stderr
    steps = ("sampling from the model", "measuring ranges", "comparing with FP32", "building the")
    for step in steps:
        assert any(line.startswith(step) and line.endswith(" s") for line in lines), step
    Bundle.open(folder / "edgepool-bundle").verify()
    record = store.read(folder / "edgepool-bundle" / "engines", "rtx-int8")
    assert record is not None
    assert record["form"] == "tensorrt-rtx, portable bodies, no plugins"
    assert record["layer_types"]["int8"] > 100
    again = edgepool(folder, "edgepool build-engine --int8 --json")
    assert json.loads(again.stdout)["reused"]
    assert "model.int8.onnx is there already: INT8 costs" in again.stderr


def test_two_at_once_calibrate_and_build_once(folder: Path) -> None:
    processes = [start(folder, "edgepool build-engine --int8 --json") for _ in range(2)]
    records = [json.loads(process.communicate()[0]) for process in processes]
    assert sorted(record["reused"] for record in records) == [False, True]
    assert records[0]["sha256"] == records[1]["sha256"]


def test_killed_at_any_moment_it_leaves_a_whole_bundle(folder: Path) -> None:
    for seed in range(6):
        process = start(folder, "edgepool build-engine --int8")
        time.sleep(random.Random(seed).uniform(1, 25))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        Bundle.open(folder / "edgepool-bundle").verify()
    assert edgepool(folder, "edgepool build-engine --int8").returncode == 0
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["cache", "edgepool-bundle", "model.pt"]
