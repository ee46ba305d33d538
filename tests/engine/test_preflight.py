"""Preflight: each rule sees what breaks it and nothing else; our own exports are clean."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgepool import bundle
from edgepool.cli.main import main
from edgepool.engine.preflight import Report, check
from edgepool.engine.preflight.read import read_model
from edgepool.engine.preflight.rules import ERROR, rules
from edgepool.errors import BadInput
from edgepool.resources import resource
from edgepool.targets import find_target, load_targets

from .conftest import TARGETS
from .preflight_cases import CASES, ORIN, PLUGIN, XAVIER, Case, graph, qdq

ROOT = Path(__file__).resolve().parents[2]


def saved(text: str, folder: Path) -> Path:
    path = folder / "model.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    return path


def found(report: Report) -> set[str]:
    return {finding.rule for finding in report.findings}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_a_rule_sees_what_breaks_it_and_nothing_else(case: Case, tmp_path: Path) -> None:
    broken = saved(graph(case.broken, case.opset, case.functions), tmp_path)
    assert found(check(broken, find_target(case.target), **case.options)) == {case.rule}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_a_rule_lets_the_remedy_pass(case: Case, tmp_path: Path) -> None:
    functions = case.functions if case.good_functions is None else case.good_functions
    good = saved(graph(case.good, case.opset, functions), tmp_path)
    target = find_target(case.good_target or case.target)
    assert found(check(good, target, **case.good_options)) == set()


def test_functions_told_apart_by_their_overload(tmp_path: Path) -> None:
    """ONNX's textual form has no overloads."""
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "xy")
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("other", 1)]

    def model(names: tuple[str, str], overloads: tuple[str, str]) -> Path:
        functions = [
            helper.make_function(
                "other", name, ["x"], ["y"], [helper.make_node(op, ["x"], ["y"])], imports[:1],
                overload=overload,
            )
            for name, overload, op in zip(names, overloads, ("Relu", "Neg"))
        ]  # fmt: skip
        nodes = [
            helper.make_node(names[0], ["x"], ["a"], domain="other", overload=overloads[0]),
            helper.make_node(names[1], ["a"], ["y"], domain="other", overload=overloads[1]),
        ]
        main_graph = helper.make_graph(nodes, "g", [x], [y])
        path = tmp_path / "model.onnx"
        made = helper.make_model(main_graph, functions=functions, opset_imports=imports)
        onnx.save(made, path)
        return path

    assert found(check(model(("F", "F"), ("a", "b")), find_target(ORIN))) == {"EP054"}
    assert found(check(model(("F", "G"), ("", "")), find_target(ORIN))) == set()


def test_every_rule_has_a_case() -> None:
    assert {case.rule for case in CASES} | {"EP054"} == set(rules())


def test_the_page_lists_every_rule() -> None:
    page = (ROOT / "docs" / "preflight.md").read_text()
    rows = re.findall(r"^\| (EP\d+) \| (\w+) \| ([^|]+) \|", page, re.MULTILINE)
    listed = [(rule, severity, title.strip()) for rule, severity, title in rows]
    assert listed == [(rule.id, rule.severity, rule.title) for rule in rules().values()]


# ------------------------------------------------------------------------- where it looks


def test_nodes_in_branches_and_functions_are_found(tmp_path: Path) -> None:
    text = """
        <ir_version: 9, opset_import: ["" : 20, "other" : 1]>
        g (float[2] x, bool c) => (float[2] y) {
          a = If (c) <then_branch = one () => (float[2] r) { r = other.Work (x) },
                      else_branch = two () => (float[2] s) { s = Bernoulli (x) }>
          y = Relu (a)
        }
        <domain: "other", opset_import: ["" : 20]>
        Work (v) => (w) { w = Bernoulli (v) }
    """
    report = check(saved(text, tmp_path), find_target(ORIN))
    places = sorted(finding.where for finding in report.findings)
    assert places == [
        "s (Bernoulli, else_branch of If)",
        "w (Bernoulli, function other::Work)",
    ]


def test_a_constant_is_followed_into_a_function(tmp_path: Path) -> None:
    text = """
        <ir_version: 9, opset_import: ["" : 20, "other" : 1]>
        g (float[2,9000] x) => (float[2,4000] y) <int64[1] k = {4000}> { y = other.Best (x, k) }
        <domain: "other", opset_import: ["" : 20]>
        Best (v, n) => (w) { m = Identity (n) w, i = TopK (v, m) }
    """
    report = check(saved(text, tmp_path), find_target(ORIN))
    assert [finding.rule for finding in report.findings] == ["EP031"]
    assert "K is 4000" in report.findings[0].what


@pytest.mark.parametrize("dtype", "f4 f8 f2 i1 u1 i2 i4 i8 u4 u8 ?".split())
@pytest.mark.parametrize("raw", [True, False])
def test_constants_read_back_as_numpy_helper_reads_them(
    dtype: str, raw: bool, tmp_path: Path
) -> None:
    given = np.array([0, 1, 3, 117], dtype)
    if dtype in ("f4", "f8", "f2", "i1", "i2", "i4", "i8"):
        given[1] = -1
    kind = helper.np_dtype_to_tensor_dtype(given.dtype)
    values = given.tobytes() if raw else given
    tensor = helper.make_tensor("w", kind, [2, 2], values, raw=raw)
    value = helper.make_tensor_value_info("y", kind, [2, 2])
    node = helper.make_node("Identity", ["w"], ["y"], name="n")
    model = helper.make_model(helper.make_graph([node], "g", [], [value], [tensor]))
    onnx.save(model, tmp_path / "m.onnx")
    read = read_model(tmp_path / "m.onnx").main.initializers["w"]
    assert read.dims == (2, 2)
    expected = numpy_helper.to_array(onnx.load(tmp_path / "m.onnx").graph.initializer[0])
    np.testing.assert_array_equal(read.values(), expected.ravel())


def test_constants_of_other_files_are_read_and_confined(tmp_path: Path) -> None:
    text = graph("g (float[2] x) => (float[2] y) <int64[1] k = {1}> { y = Relu (x) }", 17)
    model = onnx.parser.parse_model(text)
    tensor = numpy_helper.from_array(np.array([1 << 40, 7], np.int64), "big")
    model.graph.initializer.append(tensor)
    folder = tmp_path / "folder"
    folder.mkdir()
    onnx.save(
        model, folder / "m.onnx", save_as_external_data=True, location="w.data", size_threshold=0
    )
    report = check(folder / "m.onnx", find_target(XAVIER))
    assert found(report) == {"EP021"}
    assert "1099511627776" in report.findings[0].what

    stolen = onnx.load(folder / "m.onnx", load_external_data=False)
    for entry in stolen.graph.initializer[-1].external_data:
        entry.value = "../secret" if entry.key == "location" else entry.value
    (folder / "m.onnx").write_bytes(stolen.SerializeToString())
    with pytest.raises(BadInput, match="leads out of the folder"):
        check(folder / "m.onnx", find_target(XAVIER))


@pytest.mark.parametrize("seed", range(20))
def test_damaged_files_are_refused_or_read_but_never_crash(seed: int, tmp_path: Path) -> None:
    """Flipped, cut and doubled bytes: BadInput or a report."""
    case = CASES[seed % len(CASES)]
    data = bytearray(saved(graph(case.broken, case.opset, case.functions), tmp_path).read_bytes())
    random = np.random.default_rng(seed)
    for _ in range(40):
        copy = bytearray(data)
        for position in random.integers(0, len(copy), 3):
            copy[position] = random.integers(0, 256)
        (tmp_path / "d.onnx").write_bytes(copy[: random.integers(1, len(copy) + 1)])
        try:
            check(tmp_path / "d.onnx", find_target(case.target))
        except BadInput as error:
            assert "\n" not in str(error)


# --------------------------------------------------------------------------- our own files


@pytest.mark.parametrize("target", TARGETS)
def test_our_exports_are_clean(tiny: Path, target: str) -> None:
    report = check(tiny, find_target(target))
    assert report.findings == []


def test_a_bundles_int8_graph_is_checked_too(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(tiny, folder)
    variant = folder / "variants" / XAVIER
    saved(graph(qdq("x, s, z", zero="int8 z = {3}"), 17), tmp_path).replace(
        variant / "model.int8.onnx"
    )
    bundle.write_manifest(folder, json.loads((folder / bundle.MANIFEST).read_text()))
    report = check(folder, find_target(XAVIER))
    assert report.graphs == [variant / "model.onnx", variant / "model.int8.onnx"]
    assert [(f.rule, Path(f.graph).name) for f in report.findings] == [("EP011", "model.int8.onnx")]
    assert main(["check", str(folder), "--target", XAVIER]) == 1
    assert "model.int8.onnx: y (QuantizeLinear)" in capsys.readouterr().out


def test_a_bundle_without_the_target(tiny: Path) -> None:
    with pytest.raises(BadInput, match="no variant for l4"):
        check(tiny, find_target("l4"))


def test_the_portable_graph_is_not_for_xavier(tiny: Path) -> None:
    report = check(tiny / "model.onnx", find_target("jetson-agx-xavier"))
    assert {"EP002", "EP004", "EP005", "EP053"} <= found(report)
    errors = [finding.severity == ERROR for finding in report.findings]
    assert errors == sorted(errors, reverse=True)


def test_a_planted_second_reader_of_a_state(tiny: Path, tmp_path: Path) -> None:
    bundle_model = onnx.load(tiny / "variants" / ORIN / "model.onnx")
    bundle_model.graph.node.append(helper.make_node("Identity", ["k_pool.0"], ["stolen"]))
    onnx.save(bundle_model, tmp_path / "m.onnx")
    report = check(tmp_path / "m.onnx", find_target(ORIN))
    assert [(f.rule, f.where) for f in report.findings] == [("EP060", "k_pool.0")]


# -------------------------------------------------------------------------- TensorRT-RTX


RTX_BUILD = """
import sys
import tensorrt_rtx_bindings as trt
logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
builder = trt.Builder(logger)
network = builder.create_network(0)
if not trt.OnnxParser(network, logger).parse_from_file(sys.argv[1]):
    sys.exit(7)
config = builder.create_builder_config()
config.num_compute_capabilities = 1
config.set_compute_capability(trt.ComputeCapability.SM89, 0)
profile = builder.create_optimization_profile()
for tensor in map(network.get_input, range(network.num_inputs)):
    if -1 in tuple(tensor.shape):
        profile.set_shape(tensor.name, *[tuple(2 if n < 0 else n for n in tensor.shape)] * 3)
config.add_optimization_profile(profile)
sys.exit(0 if builder.build_serialized_network(network, config) else 8)
"""


def rtx_refuses(path: Path) -> bool:
    """Whether TensorRT-RTX does not parse a file or builds no engine from it (no GPU needed)."""
    command = [sys.executable, "-c", RTX_BUILD, str(path)]
    result = subprocess.run(command, capture_output=True)
    assert result.returncode in (0, 7, 8), result.stderr
    return result.returncode != 0


# Errors that are TensorRT's and not only those of an old version or a document.
REFUSED = "EP001 EP006 EP007 EP008 EP011 EP014 EP016 EP025 EP031 EP041".split()


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.rule in REFUSED], ids=lambda case: case.rule
)
def test_tensorrt_rtx_refuses_what_we_refuse(case: Case, tmp_path: Path) -> None:
    """The same code of the same vendor as an oracle."""
    pytest.importorskip("tensorrt_rtx_bindings")
    target = find_target("rtx-4090")
    text = graph(case.broken.replace("Mish", "Bernoulli"), case.opset, case.functions)
    broken = saved(text, tmp_path)
    assert case.rule in found(check(broken, target))
    assert rtx_refuses(broken)
    good = saved(graph(case.good, case.opset, case.functions), tmp_path)
    assert case.rule not in found(check(good, target))
    assert not rtx_refuses(good)


def test_tensorrt_rtx_takes_an_operator_by_its_name_alone(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx_bindings")
    body = "g (float[2] x) => (float[2] y) { y = other.Relu (x) }"
    path = saved(graph(body, 20), tmp_path)
    assert not rtx_refuses(path)  # it knows no other.Relu: this is Relu
    assert "EP050" in found(check(path, find_target("rtx-4090")))


def test_the_list_of_tensorrt_rtx_is_what_its_parser_says() -> None:
    trt = pytest.importorskip("tensorrt_rtx_bindings")
    if not trt.__version__.startswith("1.7"):
        # Another version knows other operators, which is no fault of the list.
        pytest.skip("the list is that of 1.7")
    logger = trt.Logger(trt.Logger.ERROR)
    parser = trt.OnnxParser(trt.Builder(logger).create_network(0), logger)
    listed = operator_list("tensorrt-rtx-1.7")
    names = {s.name for s in onnx.defs.get_all_schemas_with_history() if s.domain == ""} | listed
    assert {name for name in names if parser.supports_operator(name)} == listed


def operator_list(name: str) -> set[str]:
    lines = resource("export", "operators", name + ".txt").read_text().splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def test_operator_lists_only_grow() -> None:
    versions = [operator_list("tensorrt-" + v) for v in ("8.5", "10.3", "10.6", "10.15")]
    for older, newer in zip(versions, versions[1:]):
        assert older < newer
    for target in load_targets().values():
        assert target.kind == "cpu" or target.operators, target.name


# ------------------------------------------------------------------------------ the command


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = "g (float[2] x) => (float[2] y) { y = edgepool.IndexPool (x) }"
    path = saved(graph(body, 20), tmp_path)
    assert main(["check", str(path), "--target", ORIN]) == 0
    printed = capsys.readouterr()
    assert "EP057 warning" in printed.out
    assert "1 warning" in printed.err
    assert max(map(len, printed.out.splitlines())) <= 100

    assert main(["check", str(path), "--target", ORIN, "--fail-on", "warning"]) == 1
    assert "error: " in capsys.readouterr().err
    assert main(["check", str(path), "--target", ORIN, "--format", "json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["errors"], record["warnings"]) == (0, 1)
    assert record["findings"][0]["rule"] == "EP057"


def test_the_page_escapes_what_the_model_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = f"g (float[2] x) => (float[2] y) {{ y = edgepool.Twice <{PLUGIN}> (x) }}"
    model = onnx.parser.parse_model(graph(body, 20))
    model.graph.node[0].name = "<script>alert(1)</script>"
    onnx.save(model, tmp_path / "m.onnx")
    assert main(["check", str(tmp_path / "m.onnx"), "--target", ORIN, "--format", "html"]) == 1
    page = capsys.readouterr().out
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "EP051" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.onnx", "--target", ORIN], "no such file or folder"),
        ([__file__, "--target", ORIN], "not an ONNX"),
        ([__file__, "--target", "jetson-orin"], "did you mean"),
        ([__file__, "--target", ORIN, "--format", "htm"], "did you mean 'html'"),
        ([__file__, "--target", ORIN, "--fail-on", "info"], "--fail-on"),
        ([__file__], "--target"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
