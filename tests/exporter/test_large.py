"""What import, export and the rest cost in time and memory: a 1.5B model, and SmolLM2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.test_memory import write_folder

# The peak is asked of the kernel: Python's ru_maxrss of a child starts at the parent's size.
RUN = """
import re, sys, time
from edgepool.cli.main import main
code = main(sys.argv[1:])
peak = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())
print(peak.group(1), time.process_time(), file=sys.stderr)
sys.exit(code)
"""


def edgepool(folder: Path, *arguments: str) -> tuple[dict, int, float]:
    """(what --json printed, peak resident bytes, processor seconds) of a command in `folder`."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r})\n{RUN}"]
    result = subprocess.run(
        [*command, *arguments, "--json"], cwd=folder, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    peak, seconds = result.stderr.split()[-2:]
    peak_bytes = int(peak) * 1024
    print(f"{arguments[0]}: peak {peak_bytes / 1e9:.2f} GB, {float(seconds):.0f} s of processor")
    return json.loads(result.stdout), peak_bytes, float(seconds)


@pytest.mark.slow
def test_a_large_model_stays_within_its_memory(tmp_path: Path) -> None:
    size = write_folder(tmp_path / "source")
    limit = 1.3 * size + 1e9
    print(f"stored {size / 1e9:.2f} GB, limit {limit / 1e9:.2f} GB")
    _, peak, _ = edgepool(tmp_path, "import", "source", "-o", "model.pt")
    assert peak < limit
    record, peak, _ = edgepool(tmp_path, "export", "model.pt", "--dtype", "fp16")
    assert peak < limit
    outcome = record["parity"]["model.onnx"]
    assert outcome["by_layer"]
    assert outcome["steps"] == 28
    assert outcome["choices"] > 100
    assert outcome["float16"]["max_layer_difference"] <= 1e-2
    assert (tmp_path / "edgepool-bundle" / "model.onnx.data").stat().st_size >= size
    record, peak, _ = edgepool(tmp_path, "inspect", "edgepool-bundle")
    assert peak < 1e9
    assert record["graphs"]["model.onnx"]["external"] == ["model.onnx.data"]
    _, peak, _ = edgepool(tmp_path, "verify", "edgepool-bundle", "--against", "model.pt")
    assert peak < limit


@pytest.mark.slow
def test_smollm2_in_three_minutes_of_two_cores(smollm2_gguf: Path, tmp_path: Path) -> None:
    edgepool(tmp_path, "import", str(smollm2_gguf), "-o", "model.pt")
    record, peak, seconds = edgepool(tmp_path, "export", "model.pt")
    print(record["parity"]["model.onnx"])
    assert peak < 4e9
    assert seconds < 2 * 180
    assert record["parity"]["model.onnx"]["max_logit_difference"] <= 1e-3
