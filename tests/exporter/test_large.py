"""A model of 1.5 billion parameters, from folder to bundle, within 1.3 times its size and 1 GB."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.test_memory import write_folder

# The peak is asked of the kernel: Python's ru_maxrss of a child starts at the parent's size.
RUN = """
import re, sys
from edgepool.cli.main import main
code = main(sys.argv[1:])
peak = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())
print(peak.group(1), file=sys.stderr)
sys.exit(code)
"""


def edgepool(folder: Path, *arguments: str) -> tuple[dict, int]:
    """(what --json printed, peak resident bytes) of a command run in `folder`."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r})\n{RUN}"]
    result = subprocess.run(
        [*command, *arguments, "--json"], cwd=folder, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout), int(result.stderr.split()[-1]) * 1024


@pytest.mark.slow
def test_a_large_model_stays_within_its_memory(tmp_path: Path) -> None:
    size = write_folder(tmp_path / "source")
    limit = 1.3 * size + 1e9
    _, peak = edgepool(tmp_path, "import", "source", "-o", "model.pt")
    assert peak < limit
    record, peak = edgepool(tmp_path, "export", "model.pt", "--dtype", "fp16")
    assert peak < limit
    outcome = record["parity"]["model.onnx"]
    assert outcome["by_layer"]
    assert outcome["steps"] == 28
    assert outcome["selections"] > 1000
    assert (tmp_path / "edgepool-bundle" / "model.onnx.data").stat().st_size >= size
    record, peak = edgepool(tmp_path, "inspect", "edgepool-bundle")
    assert peak < 1e9
    assert record["graphs"]["model.onnx"]["external"] == ["model.onnx.data"]
    _, peak = edgepool(tmp_path, "verify", "edgepool-bundle", "--against", "model.pt")
    assert peak < limit
