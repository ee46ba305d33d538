"""What `build-engine` makes of a bundle before it builds: variants and INT8 graphs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest

from edgepool.bundle import GRAPHS, Bundle, write_manifest
from edgepool.cli.main import main
from edgepool.engine import gpu, prepare
from edgepool.engine.graphs import graph_of
from edgepool.engine.preflight import check
from edgepool.engine.prepare import complete
from edgepool.package.contents import package
from edgepool.package.extract import extract
from edgepool.progress import silent
from edgepool.quantize import gate
from edgepool.quantize.calibrate import Options as Calibration
from edgepool.quantize.calibrate import calibrate
from edgepool.quantize.quantize import quantize_bundle
from edgepool.targets import find_target
from tests.exporter.conftest import exported
from tests.exporter.models import SPARSE, config
from tests.test_board_side import EXTRAS

from .machines import full_disk

ORIN, XAVIER = "jetson-agx-orin", "jetson-agx-xavier"
INT8 = GRAPHS["int8"]

pytestmark = pytest.mark.skipif(gpu.find() is not None, reason="these tests need no GPU here")


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle as `edgepool export model.pt` leaves it."""
    return exported(tmp_path_factory, "plain", config(**SPARSE), ()) / "edgepool-bundle"


@pytest.fixture(scope="module", autouse=True)
def lenient() -> Iterator[None]:
    """Random weights predict nothing, so that their top-1 agreement is noise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate.Limits, "passed_by", lambda self, c: c.perplexity_increase < 50)
        yield


@pytest.fixture(scope="module")
def prepared(plain: Path, lenient: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same after INT8 was asked for on both boards, one after the other, and FP16 on one."""
    path = Path(shutil.copytree(plain, tmp_path_factory.mktemp("prepared") / "edgepool-bundle"))
    for target in (XAVIER, ORIN):
        assert main(["build-engine", str(path), "--int8", "--target", target]) == 3
    assert main(["build-engine", str(path), "--fp16", "--target", XAVIER]) == 3
    return path


@pytest.fixture
def bundle(plain: Path, tmp_path: Path) -> Path:
    """A copy of `plain` to change."""
    return Path(shutil.copytree(plain, tmp_path / "edgepool-bundle"))


def test_variants_are_those_that_export_and_quantize_write(
    prepared: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    folder = exported(tmp_path_factory, "quantize-sparse", config(**SPARSE), (ORIN, XAVIER))
    other = Path(shutil.copytree(folder / "edgepool-bundle", tmp_path / "b"))
    expected = quantize_bundle(other)
    found = Bundle.open(prepared)
    found.verify()
    for target in (ORIN, XAVIER):
        for name in ("model.onnx", INT8):
            place = f"variants/{target}/{name}"
            assert found.manifest["files"][place] == expected.manifest["files"][place], place
        parity = found.manifest["parity"][f"variants/{target}/model.onnx"]
        assert parity["tokens"] > 0
    assert found.manifest["variants"] == {
        name: expected.manifest["variants"][name] for name in (XAVIER, ORIN)
    }
    assert found.manifest["quantization"] == expected.manifest["quantization"]


@pytest.mark.parametrize("precision", ["int8", "fp16"])
def test_angles_of_positions_stay_fp32_where_tensorrt_may_choose(
    prepared: Path, precision: str
) -> None:
    """FP16 rounds position 2,049 to 2,048, and an angle of 1,000 to halves."""
    kept = graph_of(Bundle.open(prepared), find_target(XAVIER), precision, "tensorrt").float_nodes
    path = prepared / "variants" / XAVIER / GRAPHS[precision]
    graph = onnx.load(path, load_external_data=False).graph
    made_by = {name: node for node in graph.node for name in node.output}

    def angle(node: onnx.NodeProto) -> Iterator[str]:
        yield node.name
        if node.op_type != "Cast":  # before it, positions are integers
            for name in node.input:
                if name in made_by:
                    yield from angle(made_by[name])

    turns = [node for node in graph.node if node.op_type in ("Cos", "Sin")]
    assert {node.op_type for node in turns} == {"Cos", "Sin"}
    wanted = {name for node in turns for name in angle(node)}
    assert len(wanted) >= 4
    assert wanted <= set(kept)


def test_a_second_time_nothing_is_made(prepared: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = (prepared / "manifest.json").read_bytes()
    assert main(["build-engine", str(prepared), "--int8", "--target", XAVIER]) == 3
    printed = capfd.readouterr().err
    assert f"variants/{XAVIER}/{INT8} is there already: INT8 costs" in printed
    assert printed.splitlines()[-1].endswith(
        f"run `edgepool build-engine edgepool-bundle --int8 --target {XAVIER}`"
    )
    assert (prepared / "manifest.json").read_bytes() == before


def test_it_says_what_it_calibrates_on(bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    calibrate(bundle, Calibration(samples=2, length=32))
    made = (bundle / "calibration.json").read_bytes()
    assert main(["build-engine", str(bundle), "--int8", "--target", XAVIER]) == 3
    assert "calibrating" not in capfd.readouterr().err
    assert (bundle / "calibration.json").read_bytes() == made


@pytest.mark.parametrize("target", [[], ["--target", ORIN]])
def test_a_gate_that_fails_builds_nothing(
    bundle: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    target: list[str],
) -> None:
    monkeypatch.setattr(gate.Limits, "passed_by", lambda self, comparison: False)
    assert main(["build-engine", str(bundle), "--int8", *target]) == 1
    printed = capfd.readouterr().err
    assert "calibrating on text that the model writes itself" in printed
    error = printed.splitlines()[-1]
    assert error.startswith("error: INT8 costs ")
    assert "most is lost in layers." in error
    assert error.endswith(f"(`edgepool quantize {bundle} --auto`); no engine was built")
    left = Bundle.open(bundle)
    assert left.manifest["quantization"] is None
    assert not list(bundle.rglob(INT8))
    assert [path.name for path in bundle.glob("engines/*")] == [".lock"]
    assert "calibration.json" in left.manifest["files"]  # `--auto` goes on from here


def test_a_full_disk_leaves_the_bundle_as_it_was(
    bundle: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = {p: p.read_bytes() for p in bundle.rglob("*") if p.is_file()}
    with full_disk(60_000):
        assert main(["build-engine", str(bundle), "--int8", "--target", ORIN]) == 2
    assert "no space left to write it" in capfd.readouterr().err.splitlines()[-1]
    after = {p: p.read_bytes() for p in bundle.rglob("*") if p.is_file() and p.name != ".lock"}
    assert after == before


def test_int8_of_another_calibration_is_refused(
    prepared: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copytree(prepared, tmp_path / "edgepool-bundle"))
    calibrate(path, Calibration(samples=2, length=32))
    before = (path / "manifest.json").read_bytes()
    assert main(["build-engine", str(path), "--int8"]) == 2
    assert "was not made from this calibration.json: run `edgepool quantize" in (
        capfd.readouterr().err
    )
    assert (path / "manifest.json").read_bytes() == before
    quantize_bundle(path)
    assert main(["build-engine", str(path), "--int8", "--target", ORIN]) == 3


def test_a_calibration_of_another_model_is_refused(
    prepared: Path, bundle: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    record = json.loads((prepared / "calibration.json").read_text())
    (bundle / "calibration.json").write_text(json.dumps({**record, "model": "0" * 64}))
    write_manifest(bundle, Bundle.open(bundle).manifest)
    assert main(["build-engine", str(bundle), "--int8"]) == 2
    assert "calibration.json: made for another model" in capfd.readouterr().err
    assert not list(bundle.rglob(INT8))


def test_a_half_precision_bundle_is_told_what_to_do(
    bundle: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_manifest(bundle, {**Bundle.open(bundle).manifest, "dtype": "fp16"})
    assert main(["build-engine", str(bundle), "--int8"]) == 2
    assert "export with --dtype fp32" in capfd.readouterr().err


@pytest.mark.parametrize("target", ["h100", "b200"])
def test_a_gpu_that_rtx_lacks_is_refused_before_anything_is_made(
    bundle: Path, target: str, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorrt_rtx_bindings")
    before = (bundle / "manifest.json").read_bytes()
    assert (
        main(["build-engine", str(bundle), "--int8", "--target", target, "--runtime", "rtx"]) == 2
    )
    assert "has no compute capability" in capfd.readouterr().err
    assert (bundle / "manifest.json").read_bytes() == before


def test_run_takes_the_int8_graph_when_asked_to(
    prepared: Path, plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copytree(prepared, tmp_path / "edgepool-bundle"))
    command = ["run", str(path), "--prompt", "Once upon", "--max-new-tokens", "4", "--json"]
    ran = []
    for option in ([], ["--int8"]):
        assert main([*command, *option]) == 0
        ran.append(json.loads(capsys.readouterr().out))
    assert [record["ran"] for record in ran] == ["model.onnx", INT8]
    assert ran[1]["cache_bytes"] < 0.5 * ran[0]["cache_bytes"]  # INT8 pages
    assert main([*command[:-1], "--int8"]) == 0
    assert capsys.readouterr().err.startswith(f"{INT8}: prompt 9 tokens")
    data = bytearray((path / INT8).read_bytes())
    data[len(data) // 2] ^= 1
    (path / INT8).write_bytes(data)
    assert main(command) == 0
    assert main([*command, "--int8"]) == 2
    assert f"{INT8}: its sha256" in capsys.readouterr().err
    for options, words in (
        ([str(plain), "--int8"], f"it has no {INT8}: `edgepool quantize` makes one"),
        ([str(path), "--int8", "--backend", "trt"], "trt takes the fastest engine"),
    ):
        assert main(["run", "--prompt", "x", *options]) == 2
        assert words in capsys.readouterr().err


def test_norms_and_islands_are_named_for_a_tensorrt_that_may_choose(prepared: Path) -> None:
    bundle, target = Bundle.open(prepared), find_target(XAVIER)
    int8, half = (graph_of(bundle, target, p, "tensorrt").float_nodes for p in ("int8", "fp16"))
    norms = {"layers.0.attn_norm/Pow", "layers.1.mlp_norm/Mul", "norm/Sqrt"}
    assert norms <= set(int8)
    assert not any("proj" in name for name in int8)
    assert {"layers.0.attn_norm/Pow", "norm/Sqrt"} <= set(half)
    assert not any(name.endswith(("MatMul", "Gemm")) for name in half)
    assert graph_of(bundle, target, "fp32", "tensorrt").float_nodes == ()


def test_engines_are_no_files_of_the_manifest(bundle: Path) -> None:
    engine = bundle / "engines" / "rtx-fp32" / "engine"
    engine.parent.mkdir(parents=True)
    engine.write_bytes(b"one")
    assert main(["build-engine", str(bundle), "--int8", "--target", ORIN]) == 3
    assert engine.read_bytes() == b"one"  # it was taken along
    engine.write_bytes(b"another")
    Bundle.open(bundle).verify()
    shutil.rmtree(bundle / "engines")
    Bundle.open(bundle).verify()


def test_check_looks_at_every_graph_of_the_target(prepared: Path) -> None:
    report = check(prepared, find_target(XAVIER))
    assert {path.name for path in report.graphs} == set(GRAPHS.values())
    assert report.findings == []


def test_a_package_holds_the_graphs_that_were_made(prepared: Path, tmp_path: Path) -> None:
    listing = package(Bundle.open(prepared), find_target(XAVIER), tmp_path / "p.tar")
    names = {member.name for member in listing.members}
    assert {f"bundle/variants/{XAVIER}/{name}" for name in GRAPHS.values()} <= names
    extract(tmp_path / "p.tar", tmp_path / "board")
    unpacked = Bundle.open(tmp_path / "board" / "bundle")
    for precision in GRAPHS:
        complete(unpacked, find_target(XAVIER), precision, "tensorrt", silent, print)
        graph_of(unpacked, find_target(XAVIER), precision, "tensorrt")


# ------------------------------------------------------------------------------------ boards


def test_a_board_is_told_what_to_type_on_the_pc(
    bundle: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "TOOLS", ("no_such_torch",))
    for name in (None, ORIN):
        target = [] if name is None else ["--target", name]
        assert main(["build-engine", str(bundle), "--int8", *target]) == 3
        command = " ".join(["edgepool build-engine edgepool-bundle --int8", *target])
        assert f"on the PC that exported it, run `{command}`" in capfd.readouterr().err


READ = """
import sys
for name in {blocked!r}.split():
    sys.modules[name] = None
from edgepool.bundle import Bundle
from edgepool.engine.graphs import graph_of
from edgepool.engine.preflight import check
from edgepool.engine.prepare import complete
from edgepool.progress import silent
from edgepool.targets import find_target

bundle, target = Bundle.open(sys.argv[1]), find_target(sys.argv[2])
for precision in sys.argv[3:]:
    complete(bundle, target, precision, "tensorrt", silent, print)
    graph = graph_of(bundle, target, precision, "tensorrt")
    print(graph.weights_path.name, graph.inputs["input_ids"], graph.weight_bytes)
"""


def test_a_board_reads_a_prepared_variant_without_the_extras(prepared: Path) -> None:
    script = READ.format(blocked=EXTRAS.replace("tensorrt ", ""))
    result = subprocess.run(
        [sys.executable, "-c", script, str(prepared), XAVIER, "fp32", "int8", "fp16"],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("model.")]
    assert [line.split()[0] for line in lines] == ["model.onnx", INT8, GRAPHS["fp16"]]
    assert all("['batch', 'seq']" in line for line in lines)
