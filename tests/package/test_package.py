"""`edgepool package`: everything that a board needs, and nothing that it does not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from edgepool import bundle as bundles
from edgepool import resources
from edgepool.bundle import GRAPHS, Bundle
from edgepool.cli.main import main
from edgepool.docker_args import build_args
from edgepool.engine import prepare
from edgepool.engine.graphs import graph_of
from edgepool.errors import MissingRequirement
from edgepool.exporter.export import Options, export
from edgepool.onnxfile import external_locations
from edgepool.package import contents
from edgepool.package.extract import extract
from edgepool.package.wheel import write_wheel
from edgepool.progress import silent
from edgepool.quantize.calibrate import Options as Calibration
from edgepool.quantize.calibrate import calibrate
from edgepool.quantize.quantize import Options as Quantization
from edgepool.quantize.quantize import quantize_bundle
from edgepool.quantize.variants import add_fp16
from edgepool.targets import find_target
from tests.engine import sysroots
from tests.environments import python_with
from tests.exporter.conftest import exported
from tests.exporter.models import SPARSE, config, write_checkpoint
from tests.quantize.conftest import LOOSE, token_file

from .conftest import JETSONS

ROOT = Path(__file__).resolve().parents[2]
PROMPT = ("--prompt", "Once upon a time", "--max-new-tokens", "16", "--json")


def edgepool(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, away from the checkout's folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "edgepool", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment)


def tokens_of(bundle: Path, cwd: Path) -> list[int]:
    result = edgepool("run", bundle, *PROMPT, cwd=cwd)
    assert result.returncode == 0, result.stderr
    tokens: list[int] = json.loads(result.stdout)["token_ids"]
    return tokens


@pytest.mark.parametrize("target", JETSONS)
def test_from_the_package_alone(bundle: Path, target: str, tmp_path: Path) -> None:
    """Packed, checked, unpacked where a path has a space; the original gone; the same tokens."""
    original = tmp_path / "original"
    shutil.copytree(bundle, original)
    expected = tokens_of(original, tmp_path)
    assert len(set(expected)) > 4
    written = edgepool("package", original, "--target", target, "-o", "p.tar", cwd=tmp_path)
    assert written.returncode == 0, written.stderr
    assert max(map(len, written.stdout.splitlines())) <= 100
    shutil.rmtree(original)

    checked = edgepool("package", "--verify", "p.tar", cwd=tmp_path)
    assert (checked.returncode, checked.stdout) == (0, "intact\n")
    assert "trusted" not in checked.stderr
    place = tmp_path / "on the board" / "orin"
    unpacked = edgepool("package", "--extract", "p.tar", place, cwd=tmp_path)
    assert unpacked.returncode == 0, unpacked.stderr
    os.unlink(tmp_path / "p.tar")
    assert tokens_of(place / "bundle", tmp_path) == expected

    delivered = Bundle.open(place / "bundle")
    delivered.verify()
    assert list(delivered.manifest["variants"]) == [target]
    graph_of(delivered, find_target(target), "fp32", "tensorrt")  # ready for the target's TensorRT
    assert delivered.reference() == Bundle.open(bundle).reference()


def test_the_weights_are_there_once(bundle: Path, tmp_path: Path) -> None:
    listing = contents.package(
        Bundle.open(bundle), find_target("jetson-agx-orin"), tmp_path / "p.tar"
    )
    weights = (bundle / "variants/jetson-agx-orin/model.onnx").stat().st_size
    parts = {part: size for part, _, size in contents.parts(listing)}
    assert weights < parts["weights and graphs"] < 1.05 * weights
    assert sum(parts.values()) == listing.content_bytes


def test_weights_beside_the_graphs_are_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of more than 1.5 GB, imitated: its weights are in model.onnx.data."""
    monkeypatch.setattr("edgepool.exporter.weights.EXTERNAL_OVER", 1)
    write_checkpoint(tmp_path / "model.pt", config(**SPARSE))
    target = find_target("jetson-agx-orin")
    bundle = export(tmp_path / "model.pt", Options(tmp_path / "edgepool-bundle", [target.name]))
    listing = contents.package(bundle, target, tmp_path / "p.tar")
    sizes = {m.name: m.bytes for m in listing.members}
    data = "bundle/variants/jetson-agx-orin/model.onnx.data"
    assert [name for name in sizes if name.endswith(".data")] == [data]
    expected = tokens_of(bundle.path, tmp_path)
    extract(tmp_path / "p.tar", tmp_path / "out")
    shutil.rmtree(bundle.path)
    assert tokens_of(tmp_path / "out" / "bundle", tmp_path) == expected


def test_what_the_target_lacks_is_made_first(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of a bundle in INT8 and FP16 without variants: the target's graphs in all three."""
    plain = exported(tmp_path_factory, "plain", config(**SPARSE), ()) / "edgepool-bundle"
    path = Path(shutil.copytree(plain, tmp_path / "edgepool-bundle"))
    calibrate(path, Calibration([token_file(tmp_path / "ids.npz")], samples=2, length=100))
    quantize_bundle(path, Quantization(limits=LOOSE))
    add_fp16(path)
    target = find_target("jetson-agx-xavier")
    package = str(tmp_path / "p.tar")
    assert main(["package", str(path), "--target", target.name, "-o", package]) == 0
    assert "no variant for jetson-agx-xavier yet" in capsys.readouterr().err
    extract(Path(package), tmp_path / "out")
    delivered = Bundle.open(tmp_path / "out" / "bundle")
    monkeypatch.setattr(prepare, "TOOLS", ("no_such_package",))  # as on the board
    for precision in ("fp32", "int8", "fp16"):
        prepare.complete(delivered, target, precision, "tensorrt", silent, lambda line: None)
        assert graph_of(delivered, target, precision, "tensorrt").weight_bytes
    folder = "variants/%s/" % target.name
    graphs = {name for name in delivered.manifest["files"] if name.endswith(".onnx")}
    assert graphs == {"model.onnx", *(folder + name for name in GRAPHS.values())}


STEP = """
import sys
import numpy as np
import onnxruntime as ort
session = ort.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
types = {"tensor(float)": np.float32, "tensor(int32)": np.int32}
feed = {}
for value in session.get_inputs():
    sizes = {"batch": 1, "seq": 8, "rows": 1, "logical_pages": 1, "pages": 2}
    feed[value.name] = np.zeros([sizes.get(d, d) for d in value.shape], types[value.type])
feed["input_ids"][0] = np.arange(40, 48)
feed["page_table"][:] = 1
feed["new_len"][:] = 8
feed["logit_rows"][:] = 7
(logits,) = session.run(["logits"], feed)
print(" ".join("%.7g" % x for x in logits.ravel()))
"""


def test_the_onnxruntime_of_jetpack_5_reads_the_shared_weights(
    bundle: Path, tmp_path: Path
) -> None:
    contents.package(Bundle.open(bundle), find_target("jetson-agx-xavier"), tmp_path / "p.tar")
    extract(tmp_path / "p.tar", tmp_path / "out")
    model = tmp_path / "out" / "bundle" / "model.onnx"
    assert external_locations(str(model)) == {"variants/jetson-agx-xavier/model.onnx"}
    old = python_with("onnxruntime==1.19.2", "numpy<2")
    found = []
    for python, graph in ((old, model), (Path(sys.executable), bundle / "model.onnx")):
        run = subprocess.run(
            [python, "-c", STEP, graph], capture_output=True, text=True, check=True
        )
        found.append([float(x) for x in run.stdout.split()])
    assert found[0] == pytest.approx(found[1], abs=1e-4)
    assert max(found[0]) - min(found[0]) > 0.1


def test_weights_that_differ_are_kept(bundle: Path, tmp_path: Path) -> None:
    """A variant whose weights are others, as after an edit, shares nothing."""
    copy = tmp_path / "edgepool-bundle"
    shutil.copytree(bundle, copy)
    variant = copy / "variants/jetson-agx-orin/model.onnx"
    content = bytearray(variant.read_bytes())
    content[len(content) // 2] ^= 1
    variant.write_bytes(content)
    bundles.write_manifest(copy, Bundle.open(bundle).manifest)
    listing = contents.package(
        Bundle.open(copy), find_target("jetson-agx-orin"), tmp_path / "p.tar"
    )
    model = next(m for m in listing.members if m.name == "bundle/model.onnx")
    assert model.bytes == (bundle / "model.onnx").stat().st_size


def test_the_same_inputs_give_the_same_bytes(bundle: Path, tmp_path: Path) -> None:
    target = find_target("jetson-agx-xavier")
    shutil.copytree(bundle, tmp_path / "copy")
    contents.package(Bundle.open(bundle), target, tmp_path / "a.tar")
    contents.package(Bundle.open(tmp_path / "copy"), target, tmp_path / "b.tar")
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()


def test_it_is_a_build_context(bundle: Path, tmp_path: Path) -> None:
    """What Dockerfile.jetson copies is there, what has to be executable so, and the arguments."""
    target = find_target("jetson-agx-xavier")
    contents.package(Bundle.open(bundle), target, tmp_path / "p.tar")
    out = tmp_path / "out"
    extract(tmp_path / "p.tar", out)
    for path in (ROOT / "jetson").rglob("*"):
        delivered = out / path.relative_to(ROOT)
        if path.is_file() and "__pycache__" not in path.parts:
            assert delivered.read_bytes() == path.read_bytes()
            program = path.read_bytes().startswith(b"#!")
            assert os.access(delivered, os.X_OK) == program
    for name in ("Dockerfile.jetson", ".dockerignore"):
        assert (out / name).read_bytes() == (ROOT / name).read_bytes()
    for line in (out / "Dockerfile.jetson").read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            *sources, _ = line.split()[1:]
            assert all(list(out.glob(source)) for source in sources if source != "."), line
    words = (out / "docker-args").read_text().split()
    assert words[::2] == ["--build-arg"] * len(build_args(target))
    assert dict(word.split("=", 1) for word in words[1::2]) == build_args(target)
    (wheel,) = (out / "wheel").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    for name in ("plugins/index_pool/kernel.cuh", "export/targets/l4.toml", "Dockerfile.jetson"):
        assert "edgepool/_data/" + name in names


def test_the_wheel_reproduces_itself(tmp_path: Path) -> None:
    """Installed by pip, it makes the same wheel again that the checkout made."""
    wheel = write_wheel(tmp_path)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, "--target", tmp_path / "site", wheel], check=True)
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import pathlib, edgepool.package.wheel as w;"
        "print(w.write_wheel(pathlib.Path(sys.argv[2])), w.__file__)"
    )
    (tmp_path / "again").mkdir()
    command = [sys.executable, "-I", "-c", script, tmp_path / "site", tmp_path / "again"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert str(tmp_path / "site") in result.stdout
    assert (tmp_path / "again" / wheel.name).read_bytes() == wheel.read_bytes()


def test_a_checkout_that_changed_since_it_was_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel would ask pip for other packages than this code needs."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    monkeypatch.setattr(resources, "checkout", lambda: tmp_path)
    text = (tmp_path / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(text.replace('"rich>=13"', '"rich>=14"'))
    with pytest.raises(MissingRequirement, match="pyproject.toml has other dependencies"):
        write_wheel(tmp_path)


def test_json(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = str(tmp_path / "p.tar")
    assert main(["package", str(bundle), "--target", JETSONS[0], "-o", package, "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["bytes"] == Path(package).stat().st_size
    assert {part["part"] for part in written["parts"]} >= {"weights and graphs", "container"}
    assert main(["package", "--verify", package, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {**written, "intact": True}
    out = str(tmp_path / "out")
    assert main(["package", "--extract", package, out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {**written, "folder": out}


def test_a_bundle_in_fp16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own graph is the FP16 one: nothing is calibrated, and the way to INT8 is another."""
    model = write_checkpoint(tmp_path / "model.pt", config(**SPARSE))
    bundle = export(model, Options(tmp_path / "bundle", dtype="fp16"))
    package = str(tmp_path / "p.tar")
    assert main(["package", str(bundle.path), "--target", "jetson-agx-orin", "-o", package]) == 0
    error = capsys.readouterr().err
    assert "note: no INT8 graph in it: INT8 is made from an FP32 bundle" in error
    assert "calibrat" not in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "choose one of --target, --triton, --verify and --extract"),
        (["--extract", "p.tar", "--verify", "p.tar"], "choose one of"),
        (["--verify", "p.tar", "--target", "l4"], "a package says itself what it is for"),
        (["--target", "jetson-agx-orion"], "(did you mean 'jetson-agx-orin'?)"),
        (["--verify", "p.tar", "-o", "q.tar"], "--output and --plugin-library belong to --target"),
        (["b", "--verify", "p.tar"], "--verify takes the file and nothing else"),
        (["--verify", "missing.tar"], "cannot be read: No such file"),
        (["--extract", "missing.tar"], "cannot be read: No such file"),
        (["missing", "--target", "jetson-agx-orin"], "no such bundle"),
    ],
)
def test_wrong_usage_is_one_line(
    arguments: list[str], said: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["package", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_damaged_package_fails(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "p.tar"
    contents.package(Bundle.open(bundle), find_target(JETSONS[0]), package)
    with package.open("r+b") as file:
        file.seek(-200_000, os.SEEK_END)
        file.write(b"\xff\x00\xff")
    for arguments in (["--verify", str(package)], ["--extract", str(package), str(tmp_path / "o")]):
        assert main(["package", *arguments]) == 1
        assert "p.tar: damaged in wheel/" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_a_damaged_bundle_is_not_packed(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "edgepool-bundle"
    shutil.copytree(bundle, copy)
    reference = copy / "reference.json"
    reference.write_bytes(reference.read_bytes()[:-1] + b" ")
    package = tmp_path / "p.tar"
    assert main(["package", str(copy), "--target", JETSONS[0], "-o", str(package)]) == 2
    assert "reference.json: its sha256 is not the one in the manifest" in capsys.readouterr().err
    assert not package.exists()


def test_other_targets(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["package", str(bundle), "--target", "h100"]) == 2
    assert "h100 is no Jetson" in capsys.readouterr().err


RIGHT = sysroots.plugin_library("10.3.0", 87)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (sysroots.plugin_library("10.3.0", 87, emulated=True), "it runs on the CPU, for tests"),
        (sysroots.plugin_library("10.3.0", 87, version="0.0.9"), "it is of edgepool 0.0.9"),
        (sysroots.plugin_library("10.14.1", 87), "it is for TensorRT 10.14.1, the target has 10.3"),
        (sysroots.plugin_library("8.5.2", 87), "it is for TensorRT 8.5.2, the target has 10.3"),
        (sysroots.plugin_library("10.3.0", 87, 62), "it is for x86_64, a Jetson is aarch64"),
        (sysroots.plugin_library("10.3.0", 72), "it has no code for sm_87"),
        (RIGHT[:200], "not a library of edgepool's plugins"),
    ],
)
def test_a_plugin_library_that_the_image_build_would_refuse(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, said: str
) -> None:
    (tmp_path / "cross.so").write_bytes(content)
    package = str(tmp_path / "p.tar")
    arguments = ["package", str(bundle), "--target", "jetson-agx-orin", "-o", package]
    assert main([*arguments, "--plugin-library", str(tmp_path / "cross.so")]) == 2
    assert said in capsys.readouterr().err
    assert not Path(package).exists()


def test_a_plugin_library_is_offered_as_a_file(bundle: Path, tmp_path: Path) -> None:
    """Beside the wheel, for the image build: not where edgepool would load it from."""
    (tmp_path / "cross.so").write_bytes(RIGHT)
    target = find_target("jetson-agx-orin")
    contents.package(Bundle.open(bundle), target, tmp_path / "p.tar", tmp_path / "cross.so")
    out = tmp_path / "out"
    extract(tmp_path / "p.tar", out)
    libraries = [p for p in out.rglob("*") if p.is_file() and p.read_bytes() == RIGHT]
    assert libraries == [out / "plugins" / "libedgepool_plugins.so"]
    arguments = (out / "docker-args").read_text()
    assert "--build-arg PLUGINS=plugins/libedgepool_plugins.so" in arguments
