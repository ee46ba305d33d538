"""The entrypoint with ONNX Runtime: the way to prove the container on a machine with no GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
import typer.main

from edgepool import bundle as bundles
from edgepool.cli.entrypoint import app, main
from edgepool.cli.main import main as edgepool
from tests.environments import python_3_8, python_with

ROOT = Path(__file__).resolve().parents[2]
ORT = ["--backend", "ort"]


def test_check_shows_every_step(exported: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(exported), *ORT]) == 0
    table = capfd.readouterr().out
    for name in ("system", "Python", "memory", "bundle", "room", "parity"):
        assert re.search(rf"^{name} +ok ", table, re.M), table
    assert main(["check", str(exported), *ORT, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["ok"]
    assert all(line["state"] == "ok" for line in found["lines"])
    assert not {"GPU", "TensorRT", "plugin library"} & {line["name"] for line in found["lines"]}


def test_run_writes_what_edgepool_run_writes(
    exported: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["--prompt", "Once upon", "--max-new-tokens", "12"]
    assert main(["run", str(exported), *ORT, *words]) == 0
    mine = capfd.readouterr().out
    assert edgepool(["run", str(exported), *words]) == 0
    assert mine == capfd.readouterr().out != "\n"
    assert main(["run", str(exported), *ORT, *words, "--chat", "--json"]) == 0
    chat = json.loads(capfd.readouterr().out)
    assert chat["completion_tokens"] == 12 or chat["finish_reason"] == "stop"


def test_bench_measures_where_there_is_room(
    exported: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(exported), *ORT, "--context", "700", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert [speed["context"] for speed in found["speeds"]] == [512]
    assert all(speed["decode_tokens_per_s"] > 0 for speed in found["speeds"])
    assert found["memory"]["cache"] == found["cache_bytes"] > 0
    assert main(["bench", str(exported), *ORT, "--batch", "2"]) == 0
    printed = capfd.readouterr()
    assert "FP32 for 2 x 2048 tokens" in printed.out
    assert re.search(r"^cache: .*\nmachine: .*\nprocess: ", printed.err, re.M)


def test_the_file_itself_runs(exported: Path) -> None:
    """`jetson/entrypoint` as the container starts it, on a bundle that cannot be written."""
    before = {path: path.stat().st_mtime_ns for path in exported.rglob("*")}
    process = subprocess.run(
        [
            sys.executable,
            str(ROOT / "jetson" / "entrypoint"),
            "build",
            str(exported),
            *ORT,
            "--json",
        ],
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout)["parity"]["agreement"] == 1
    assert {path: path.stat().st_mtime_ns for path in exported.rglob("*")} == before


def test_on_the_python_of_jetpack_5(exported: Path) -> None:
    """With the packages of its image, to the version."""
    interpreter = python_3_8()
    if interpreter is None:
        pytest.skip("this machine has no Python 3.8")
    pinned = str(ROOT / "jetson" / "requirements-jp5.txt")
    process = subprocess.run(
        [str(python_with("--no-deps", "-r", pinned, interpreter=interpreter)),
         str(ROOT / "jetson" / "entrypoint"), "check", str(exported), *ORT, "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    lines = {line["name"]: line["found"] for line in json.loads(process.stdout)["lines"]}
    assert lines["Python"].startswith("3.8")
    assert lines["parity"].startswith("100.0 %")


def test_a_bundle_in_the_folder_is_found(bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["build", str(bundle.parent), *ORT]) == 0
    (bundle.parent / "second").mkdir()
    (bundle.parent / "second" / "manifest.json").write_text("{}")
    assert main(["build", str(bundle.parent), *ORT]) == 2
    assert "it holds 2 bundles: name one of bundle, second" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run"], 2, "`run` needs --prompt"),
        (["check", "--prompt", "x"], 2, "--prompt is for `run`"),
        (["rum", "--prompt", "x"], 2, "did you mean 'run'"),
        (["build", "--backend", "ortt"], 2, "did you mean 'ort'"),
        (["build", *ORT, "--precision", "int8"], 2, "no graph in INT8"),
        (["build", *ORT, "--context", "0"], 2, "choose 1 to 2048"),
        (["build", *ORT, "--context", "2049"], 2, "choose 1 to 2048"),
        (["build", *ORT, "--batch", "0"], 2, "--batch 0"),
        (["build", *ORT, "--context", "20"], 2, "take a longer context"),
        (["run", *ORT, "--batch", "2", "--prompt", "x"], 2, "`run` writes one text"),
        (["serve"], 3, "`serve` comes with edgepool 0.2"),
    ],
)
def test_bad_usage(
    exported: Path,
    arguments: list[str],
    code: int,
    words: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    job, *rest = arguments
    assert main([job, str(exported), *rest]) == code
    errors = [x for x in capfd.readouterr().err.splitlines() if x.startswith("error:")]
    assert len(errors) == 1
    assert words in errors[0]


def test_no_bundle(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "nothing"), *ORT]) == 2
    printed = capfd.readouterr()
    assert "no such bundle" in printed.err
    assert re.search(r"^bundle +wrong", printed.out, re.M)
    assert main(["check", str(tmp_path), *ORT]) == 2


def test_a_flipped_byte_is_named(bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = bytearray((bundle / "model.onnx").read_bytes())
    data[len(data) // 2] ^= 1
    (bundle / "model.onnx").write_bytes(data)
    assert main(["run", str(bundle), *ORT, "--prompt", "x"]) == 2
    assert "model.onnx: its sha256 is not the one in the manifest" in capfd.readouterr().err


def test_other_weights_than_pytorchs_do_not_pass(
    bundle: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The checksums are right, the numbers are not."""
    model = onnx.load(bundle / "model.onnx")
    weights = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    weights.raw_data = weights.raw_data[4096:] + weights.raw_data[:4096]
    onnx.save(model, bundle / "model.onnx")
    bundles.write_manifest(bundle, json.loads((bundle / "manifest.json").read_text()))
    assert main(["run", str(bundle), *ORT, "--prompt", "x"]) == 1
    printed = capfd.readouterr()
    assert "does not give what PyTorch gave" in printed.err
    assert printed.out == ""


def test_the_page_lists_every_option() -> None:
    page = (ROOT / "docs" / "board.md").read_text()
    options = set(re.findall(r"^\* `(--[a-z-]+)", page, re.M))
    parameters = typer.main.get_command(app).params
    assert options == {p.opts[0] for p in parameters if p.opts[0].startswith("--")} - {"--help"}
