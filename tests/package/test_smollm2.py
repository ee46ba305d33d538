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
PEAK = 200 << 20  # bytes of memory; the weights have 513 MiB
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def bundle(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    import_checkpoint(smollm2_gguf, folder / "model.pt")
    export(folder / "model.pt", Options(folder / "edgepool-bundle", JETSONS))
    (folder / "model.pt").unlink()
    return folder / "edgepool-bundle"


# The peak is asked of the kernel: Python's ru_maxrss of a child starts at the parent's size.
COMMAND = """
import re, sys
from pathlib import Path
from edgepool.cli.main import main
code = main([*sys.argv[1:], "--json"])
peak = re.search("VmHWM:(.*) kB", Path("/proc/self/status").read_text()).group(1)
print(peak, file=sys.stderr)
sys.exit(code)
"""


def edgepool(*arguments: object, cwd: Path) -> tuple[dict, float, int]:
    """The command's JSON, its seconds, and the most bytes of memory it had."""
    started = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", COMMAND, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    peak = int(result.stderr.split()[-1]) * 1024
    return json.loads(result.stdout), time.monotonic() - started, peak


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
