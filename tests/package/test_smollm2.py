"""The package of a real model, SmolLM2, for every Jetson: sizes, times and memory are printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edgepool.checkpoint import import_checkpoint
from edgepool.exporter.export import Options, export

from .conftest import JETSONS

ROOT = Path(__file__).resolve().parents[2]
RUN = ("--prompt", "The capital of France is", "--max-new-tokens", "8")
PEAK = 400 << 20  # bytes of memory; the weights have 513 MiB
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def bundle(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    import_checkpoint(smollm2_gguf, folder / "model.pt")
    export(folder / "model.pt", Options(folder / "edgepool-bundle", JETSONS))
    (folder / "model.pt").unlink()
    return folder / "edgepool-bundle"


def edgepool(*arguments: object, cwd: Path) -> tuple[dict, float, int]:
    """The command's JSON, its seconds, and the most bytes of memory it had."""
    command = [sys.executable, "-m", "edgepool", *map(str, arguments), "--json"]
    started = time.monotonic()
    with subprocess.Popen(
        command, cwd=cwd, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as child:
        assert child.stdout is not None
        out = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    return json.loads(out), time.monotonic() - started, usage.ru_maxrss * 1024


def test_for_every_jetson(bundle: Path, tmp_path: Path) -> None:
    place = tmp_path / "on a board" / "smollm2"
    expected = edgepool("run", bundle, *RUN, cwd=tmp_path)[0]["token_ids"]
    for target in JETSONS:
        package = tmp_path / ("%s.tar" % target)
        written, *packing = edgepool(
            "package", bundle, "--target", target, "-o", package, cwd=tmp_path
        )
        checked, *verifying = edgepool("package", "--verify", package, cwd=tmp_path)
        assert checked["intact"] is True
        unpacked, *extracting = edgepool(
            "package", "--extract", package, place / target, cwd=tmp_path
        )
        package.unlink()
        for _, peak in (packing, verifying, extracting):
            assert peak < PEAK
        print(target, "%.1f MiB" % (written["bytes"] / (1 << 20)), written["parts"])
        for name, (seconds, peak) in dict(
            package=packing, verify=verifying, extract=extracting
        ).items():
            print("  %s: %.1f s, %.0f MiB" % (name, seconds, peak / (1 << 20)))
    moved = bundle.rename(bundle.with_name("gone"))
    try:
        for target in JETSONS:
            text = edgepool("run", place / target / "bundle", *RUN, cwd=tmp_path)[0]
            assert text["token_ids"] == expected
    finally:
        moved.rename(bundle)
