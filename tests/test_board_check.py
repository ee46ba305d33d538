"""scripts/board_check.sh, rehearsed here; its report on what an Orin would print."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from edgepool.cli.main import main
from edgepool.exporter.export import Options, export
from tests.engine import sysroots
from tests.exporter.models import SPARSE, config, write_checkpoint

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts"
STEPS = ("doctor", "plugins", "kernels", "check", "build", "bench", "run")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("board check")
    write_checkpoint(folder / "model.pt", config(**SPARSE))
    export(folder / "model.pt", Options(folder / "edgepool-bundle"))
    return folder / "edgepool-bundle"


def rows(text: str) -> list[list[str]]:
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [line for line in lines if line[0] not in ("step", "claim", "---")]


def report(log: Path, backend: str = "trt") -> tuple[int, str]:
    command = [sys.executable, SCRIPTS / "board_report.py", log, backend]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode in (0, 1, 3), result.stderr
    return result.returncode, result.stdout


@pytest.fixture(scope="module")
def rehearsal(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the script wrote here, with ONNX Runtime in the engine's place."""
    log = tmp_path_factory.mktemp("log")
    environment = {**os.environ, "BACKEND": "ort", "LOG": str(log), "PYTHON": sys.executable}
    result = subprocess.run(
        [SCRIPTS / "board_check.sh", bundle], env=environment, capture_output=True, text=True
    )
    (log / "stdout").write_text(result.stdout)
    (log / "code").write_text(str(result.returncode))
    return log


def test_a_rehearsal_runs_every_step_and_claims_nothing(rehearsal: Path) -> None:
    text = (rehearsal / "stdout").read_text()
    outcomes = {name: (outcome, found) for name, outcome, _, found in rows(text)}
    assert tuple(outcomes) == STEPS
    for name in ("check", "build", "bench", "run"):
        assert outcomes[name][0] == "passed", outcomes
    assert "best tokens are PyTorch's" in outcomes["check"][1]
    assert "decode" in outcomes["bench"][1]
    assert "shows nothing of a GPU" in text
    assert "claim" not in text


def test_without_a_gpu_it_says_what_lacks(rehearsal: Path) -> None:
    """The steps that need one are `not run`, each with its error, and so is the whole."""
    lines = (rehearsal / "steps").read_text().splitlines()
    kept = [line for line in lines if line.split()[0] in ("doctor", "plugins", "kernels")]
    if any(line.split()[1] == "0" for line in kept[:2]):
        pytest.skip("there is a GPU here")
    (rehearsal / "steps").write_text("\n".join(kept) + "\n")
    code, text = report(rehearsal)
    (rehearsal / "steps").write_text("\n".join(lines) + "\n")
    assert code == 3
    assert [line[1] for line in rows(text)[:3]] == ["not run"] * 3
    assert any("no GPU here to build the plugins for" in line[-1] for line in rows(text))


def orin(folder: Path, rehearsal: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A log as on an AGX Orin: doctor's of an imitated one, the others in the rehearsal's form."""
    root = sysroots.make(folder / "orin", sysroots.ORIN)
    assert main(["doctor", "--sysroot", str(root), "--json"]) == 0
    (folder / "doctor.out").write_text(capsys.readouterr().out)
    record = {"tensorrt": "10.3.0", "cuda": "12.6", "library": "x"}
    (folder / "plugins.out").write_text(json.dumps(record))
    (folder / "kernels.out").write_text("....\n====== 11 passed in 301.20s ======\n")
    for name in ("check", "build", "bench", "run"):
        (folder / (name + ".out")).write_bytes((rehearsal / (name + ".out")).read_bytes())
    for name in STEPS:
        (folder / (name + ".err")).write_text("")
    (folder / "steps").write_text("".join("%s 0 5\n" % name for name in STEPS))
    return folder


def test_rows_are_filled_in(
    rehearsal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = report(orin(tmp_path, rehearsal, capsys))
    assert code == 0
    steps, filled = rows(text)[: len(STEPS)], rows(text)[len(STEPS) :]
    assert [step[1] for step in steps] == ["passed"] * len(STEPS)
    assert "AGX Orin" in steps[0][-1] and "TensorRT 10.3" in steps[0][-1]
    page = (ROOT / "docs" / "verification.md").read_text()
    named = [line for line in page.splitlines() if "board_check.sh` (" in line]
    assert [row[0] for row in filled] == [line.strip("| ").split(" | ")[0] for line in named]
    assert all(row[1] == "passed" and row[2] for row in filled)
    assert any("11 passed" in row[2] for row in filled)
    assert any("TensorRT 10.3.0 with CUDA 12.6" in row[2] for row in filled)


def test_a_step_that_fails_fails_its_rows(
    rehearsal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = orin(tmp_path, rehearsal, capsys)
    (log / "steps").write_text((log / "steps").read_text().replace("check 0", "check 1"))
    (log / "check.err").write_text("note\nerror: does not give | what PyTorch gave\n")
    code, text = report(log)
    assert code == 1
    failed = [row for row in rows(text) if row[1] == "failed"]
    assert len(failed) >= 2
    assert all("does not give / what PyTorch gave" in row[-1] for row in failed)


def test_every_step_that_the_page_names_exists() -> None:
    page = (ROOT / "docs" / "verification.md").read_text()
    named = set(re.findall(r"`scripts/board_check\.sh` \((\w+)\)", page))
    assert named and named <= set(STEPS)


def test_no_python_is_one_line(tmp_path: Path) -> None:
    result = subprocess.run(
        [SCRIPTS / "board_check.sh"], capture_output=True, text=True,
        env={**os.environ, "PYTHON": str(tmp_path / "none"), "LOG": str(tmp_path / "log")},
    )  # fmt: skip
    assert result.returncode == 3
    assert result.stderr.count("\n") == 1
