"""`edgepool export`, from the checkpoint to the proved bundle."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from edgepool.bundle import Bundle
from edgepool.checkpoint import load
from edgepool.cli.main import main
from edgepool.errors import GateFailed
from edgepool.exporter import by_layer, prove, weights
from edgepool.exporter.export import Options, export
from edgepool.exporter.lower import parser_operators
from edgepool.model import Cache, Model

from .conftest import TARGETS
from .models import FULL, LEARNED, SPARSE, config, write_checkpoint


def graph_of(path: Path) -> onnx.GraphProto:
    return onnx.load(path, load_external_data=False).graph


# ---------------------------------------------------------------------------- what is written


def test_the_bundle_holds_what_its_manifest_says(mixed: Path) -> None:
    bundle = Bundle.open(mixed / "edgepool-bundle")
    bundle.verify()
    checkpoint = load(mixed / "model.pt")
    assert bundle.config == checkpoint.config
    assert bundle.manifest["source_digest"] == checkpoint.source
    assert bundle.tokenizer_path is not None
    assert bundle.tokenizer_path.read_text() == checkpoint.tokenizer
    assert set(bundle.manifest["variants"]) == set(TARGETS)
    assert bundle.variant_path("cpu") == bundle.model_path


def test_parity_was_measured_on_every_graph(mixed: Path, sparse: Path) -> None:
    parity = Bundle.open(mixed / "edgepool-bundle").manifest["parity"]
    graphs = ["model.onnx", *(f"variants/{t}/model.onnx" for t in TARGETS if t != "cpu")]
    assert set(parity) == set(graphs)
    for outcome in parity.values():  # INT8 pages: layer by layer
        assert outcome["by_layer"]
        assert outcome["steps"] == 6
        assert outcome["max_layer_difference"] <= 1e-4
        assert outcome["stored"] > 100_000
        assert outcome["selections"] > 50
    drift = parity["model.onnx"]["drift"]
    assert drift["steps"] > 32
    assert drift["max_logit_difference"] < 0.5

    parity = Bundle.open(sparse / "edgepool-bundle").manifest["parity"]
    for outcome in parity.values():
        assert not outcome["by_layer"]
        assert outcome["max_logit_difference"] <= 1e-3
        assert outcome["greedy_differences"] == 0
        assert outcome["selections"] > 500
    assert (
        parity["model.onnx"]["steps"]
        > 32
        > parity["variants/jetson-agx-xavier/model.onnx"]["steps"]
    )


@pytest.mark.parametrize("kind", ["mixed", "sparse"])
def test_the_recorded_reference_is_what_the_model_gives_alone(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """One sequence at a time, the prompt in one piece: nothing of parity's schedule is left."""
    folder = request.getfixturevalue(kind)
    bundle = Bundle.open(folder / "edgepool-bundle")
    model = Model.from_checkpoint(load(folder / "model.pt"))
    prompts = bundle.reference()["prompts"]
    assert len({len(prompt["ids"]) for prompt in prompts}) == 3
    for prompt in prompts:
        cache = Cache.allocate(model, 1, len(prompt["ids"]) + 40)
        logits = cache.step([prompt["ids"]])[0, -1]
        greedy = []
        for top in prompt["top"]:
            ids, values = zip(*top)
            np.testing.assert_allclose(values, logits[list(ids)], atol=1e-4)
            greedy.append(int(logits.argmax()))
            logits = cache.step([greedy[-1:]])[0, -1]
        assert greedy[: len(prompt["greedy"])] == prompt["greedy"]
        assert len(prompt["greedy"]) == 32
        assert len(prompt["layers"]) == bundle.config.num_layers
        assert [layer["k"] is None for layer in prompt["layers"]] == [
            donor != i for i, donor in enumerate(bundle.config.kv_donor)
        ]


def test_opset_and_operators_of_every_variant(mixed: Path) -> None:
    bundle = Bundle.open(mixed / "edgepool-bundle")
    versions = {"jetson-agx-xavier": (17, 8), "jetson-agx-orin": (20, 9), "rtx-4090": (20, 9)}
    for target, (opset, ir_version) in versions.items():
        model = onnx.load(bundle.variant_path(target))
        assert {x.domain: x.version for x in model.opset_import} == {"": opset, "edgepool": 1}
        assert model.ir_version == ir_version
        nodes = [node for node in model.graph.node if node.domain == "edgepool"]
        assert len(nodes) == 9  # 5 writers, 1 reader, 1 pool, 2 selections
        if target == "rtx-4090":
            assert model.functions
            assert not any(n.op_type == "If" for f in model.functions for n in f.node)
            continue
        assert not model.functions
        names = {"IndexPool", "IndexPoolSelect", "SharedKVAttention", "SharedKVRead"}
        assert {node.op_type for node in nodes} == names
        for node in nodes:
            attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            assert attributes["plugin_version"] == b"1"
            assert attributes["plugin_namespace"] == b"edgepool"
            assert all(node.input)
    xavier = onnx.load(bundle.variant_path("jetson-agx-xavier"))
    standard = {node.op_type for node in xavier.graph.node if not node.domain}
    assert standard <= set(parser_operators("tensorrt-8.5"))
    for node in xavier.graph.node:
        names = {a.name for a in node.attribute}
        assert not names & {"num_outputs", "start", "end", "noop_with_empty_axes", "saturate"}
        assert not (node.op_type == "ReduceMean" and len(node.input) > 1)


def test_state_is_consumed_once_and_inputs_are_named(mixed: Path) -> None:
    graph = graph_of(mixed / "edgepool-bundle" / "model.onnx")
    inputs = {
        x.name: [d.dim_param or d.dim_value for d in x.type.tensor_type.shape.dim]
        for x in graph.input
    }
    assert inputs["input_ids"] == ["batch", "seq"]
    assert inputs["page_table"] == ["batch", "logical_pages"]
    assert inputs["logit_rows"] == ["batch", "rows"]
    assert inputs["index_pool.2"] == [2, "pages", 4, 16]
    assert inputs["k_scale.3"] == ["pages", 2, 16]
    read = [name for node in graph.node for name in node.input]
    for name in list(inputs)[5:]:
        assert read.count(name) == 1, name


def test_weights_are_stored_as_they_are_read(mixed: Path) -> None:
    """Linear weights are [in, out] operands of MatMul; no node transposes a weight."""
    graph = graph_of(mixed / "edgepool-bundle" / "model.onnx")
    checkpoint = load(mixed / "model.pt")
    stored = {tensor.name: tensor for tensor in graph.initializer}
    assert set(checkpoint.weights) <= set(stored)
    assert not [node for node in graph.node if node.op_type == "Transpose"]
    for name, tensor in checkpoint.weights.items():
        mine = onnx.numpy_helper.to_array(stored[name])
        linear = name.endswith(("proj.weight", "lm_head.weight"))
        theirs = tensor.numpy().T if linear else tensor.numpy()
        np.testing.assert_array_equal(mine, theirs)


def test_names_say_where_a_node_comes_from(mixed: Path) -> None:
    path = mixed / "edgepool-bundle" / "model.onnx"
    graph = graph_of(path)
    names = [node.name for node in graph.node]
    assert len(set(names)) == len(names)
    assert "layers.3.q_proj/MatMul" in names
    values = {name for node in graph.node for name in node.output}
    assert {f"hidden.{i}" for i in range(6)} <= values
    assert "layers.2/IndexPoolSelect.selected" in values
    for text in (os.getcwd(), str(Path(torch.__file__).parent), "site-packages"):
        assert text.encode() not in path.read_bytes()


def test_equal_input_gives_equal_bytes(sparse: Path, tmp_path: Path) -> None:
    export(sparse / "model.pt", Options(tmp_path / "again", ("jetson-agx-xavier",)))
    first = sparse / "edgepool-bundle"
    names = sorted(str(p.relative_to(first)) for p in first.rglob("*") if p.is_file())
    assert len(names) == 5
    for name in names:
        assert (first / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_a_tied_table_is_stored_once(sparse: Path) -> None:
    path = sparse / "edgepool-bundle" / "model.onnx"
    readers = [n for n in graph_of(path).node if "embed.weight" in n.input]
    assert sorted(node.op_type for node in readers) == ["Gather", "Gemm"]
    size = sum(x.numel() * 4 for x in load(sparse / "model.pt").weights.values())
    assert path.stat().st_size < size + 400_000


def test_a_newer_opset(tmp_path: Path) -> None:
    """A target whose profile has an older one than model.onnx gets a graph of its own."""
    path = write_checkpoint(tmp_path / "model.pt", config(**FULL))
    bundle = export(path, Options(tmp_path / "b", ("cpu",), opset=22))
    assert onnx.load(bundle.model_path).opset_import[0].version == 22
    assert bundle.manifest["variants"]["cpu"]["opset"] == 20
    assert onnx.load(bundle.variant_path("cpu")).opset_import[0].version == 20


def test_half_precision(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model.pt", config(**SPARSE))
    bundle = export(path, Options(tmp_path / "b", ("jetson-agx-xavier",), dtype="fp16"))
    graph = graph_of(bundle.model_path)
    half = onnx.TensorProto.FLOAT16
    types = {x.name: x.type.tensor_type.elem_type for x in (*graph.input, *graph.output)}
    assert types["k_pool.0"] == types["tail.1_out"] == half
    assert types["logits"] == onnx.TensorProto.FLOAT
    assert {t.name: t.data_type for t in graph.initializer}["layers.0.q_proj.weight"] == half
    inner = {v.name: v.type.tensor_type.elem_type for v in graph.value_info}
    assert inner["layers.0.attn_norm/ReduceMean"] == onnx.TensorProto.FLOAT
    parity = bundle.manifest["parity"]
    assert "float16" not in parity["variants/jetson-agx-xavier/model.onnx"]
    computed = parity["model.onnx"]["float16"]  # by PyTorch, in float16
    assert computed["steps"] == parity["model.onnx"]["steps"] > 32
    assert 0 < computed["max_logit_difference"] <= 0.25
    assert computed["choices"] > 100


def test_external_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that do not fit into the file: beside it, each where a page begins."""
    monkeypatch.setattr(weights, "EXTERNAL_OVER", 1000)
    path = write_checkpoint(tmp_path / "model.pt", config(**SPARSE))
    bundle = export(path, Options(tmp_path / "b", ("jetson-agx-orin",)))
    bundle.verify()
    models = (bundle.model_path, bundle.variant_path("jetson-agx-orin"))
    assert len({weights.data_of(model).read_bytes() for model in models}) == 1
    for model in models:
        external = [t for t in graph_of(model).initializer if t.external_data]
        assert len(external) == len(load(path).weights)
        for tensor in external:
            entries = {x.key: x.value for x in tensor.external_data}
            assert entries["location"] == "model.onnx.data"
            assert int(entries["offset"]) % 4096 == 0
        loaded = onnx.load(model)
        embed = next(t for t in loaded.graph.initializer if t.name == "embed.weight")
        expected = load(path).weights["embed.weight"].numpy()
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(embed), expected)


@pytest.mark.parametrize("kind", ["mixed", "sparse"])
@pytest.mark.parametrize("context", [1, 5, 21])
def test_a_tiny_context(
    context: int, kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = request.getfixturevalue(kind)
    shutil.copy(folder / "edgepool-bundle" / "model.onnx", tmp_path)
    checkpoint = load(folder / "model.pt")
    c = dataclasses.replace(checkpoint.config, max_context=context)
    outcomes = prove.prove(tmp_path, checkpoint, c, {}, "fp32", lambda *_: None)
    assert outcomes["model.onnx"]["choices"] == 0


def test_a_large_model_is_proved_layer_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prove, "WHOLE_MODEL_BYTES", 0)
    path = write_checkpoint(tmp_path / "model.pt", config(**LEARNED))
    bundle = export(path, Options(tmp_path / "b", ("jetson-agx-xavier",)))
    for outcome in bundle.manifest["parity"].values():
        assert outcome["by_layer"]
        assert outcome["steps"] == 3
    assert len(bundle.reference()["prompts"][0]["ids"]) == by_layer.SHORT


# ------------------------------------------------------------------------------ what is refused


def run(*arguments: object) -> int:
    return main([str(x) for x in arguments])


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_checkpoint(tmp_path / "model.pt", config(**FULL))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--max-context", "513"], "the model's context is 512"),
        (["--max-context", "0"], "the model's context is 512"),
        (["--target", "jetson-agx-orim"], "did you mean 'jetson-agx-orin'"),
        (["--dtype", "fp8"], "dtype 'fp8'"),
        (["--opset", "17"], "jetson-agx-xavier"),
        (["-o", "/proc/bundle"], "/proc/bundle: cannot be written"),
        (["-o", "model.pt"], "not a folder"),
        (["-o", "model.pt/bundle"], "cannot be written"),
        (["-o", "."], "not empty and not a bundle"),
    ],
)
def test_bad_options(
    options: list[str], says: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("export", checkpoint, *options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert says in line
    assert list(checkpoint.parent.iterdir()) == [checkpoint]


def test_a_weight_beyond_half_precision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from edgepool.checkpoint import save

    from .models import weights as random

    c = config(**SPARSE)
    large = random(c)
    large["layers.1.up_proj.weight"][3, 3] = 1e6
    save(tmp_path / "model.pt", c, large, None)
    assert run("export", tmp_path / "model.pt", "-o", tmp_path / "b", "--dtype", "fp16") == 2
    assert "'layers.1.up_proj.weight' has values beyond float16" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("where", ["layers.1.k_proj.weight", "norm.weight", "embed.weight"])
@pytest.mark.parametrize("large", [False, True])
def test_a_weight_that_is_off_by_a_percent(
    where: str, large: bool, sparse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways of proving have to notice."""
    if large:
        monkeypatch.setattr(prove, "WHOLE_MODEL_BYTES", 0)
    checkpoint = load(sparse / "model.pt")
    off = {**checkpoint.weights, where: checkpoint.weights[where] * 1.01}
    other = dataclasses.replace(checkpoint, weights=off)
    shutil.copy(sparse / "edgepool-bundle" / "model.onnx", tmp_path)
    with pytest.raises(GateFailed, match="not equal to PyTorch"):
        prove.prove(tmp_path, other, checkpoint.config, {}, "fp32", lambda *_: None)


def test_a_bundle_that_fails_parity_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read = weights.Weight.read

    def off(self: weights.Weight) -> memoryview:
        data = memoryview(bytearray(read(self)))
        if self.name == "layers.1.k_proj.weight":
            np.frombuffer(data, np.float32)[:] *= 1.01
        return data

    monkeypatch.setattr(weights.Weight, "read", off)
    path = write_checkpoint(tmp_path / "model.pt", config(**FULL))
    assert run("export", path, "-o", tmp_path / "b") == 1
    assert "model.onnx: not equal to PyTorch" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
from edgepool.cli.main import main
sys.exit(main(["export", "model.pt"]))
"""


def test_a_full_disk(tmp_path: Path) -> None:
    """A limit on the size of files stands for it: writing fails in the middle of the weights."""
    path = write_checkpoint(tmp_path / "model.pt", config(**FULL, intermediate_size=600))
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert "no space left" in last
    assert list(tmp_path.iterdir()) == [path]


def test_a_killed_export_leaves_the_old_bundle(mixed: Path, tmp_path: Path) -> None:
    shutil.copytree(mixed / "edgepool-bundle", tmp_path / "edgepool-bundle")
    path = write_checkpoint(tmp_path / "model.pt", config(**FULL))
    before = {p: p.read_bytes() for p in (tmp_path / "edgepool-bundle").rglob("*") if p.is_file()}
    process = subprocess.Popen(
        [sys.executable, "-m", "edgepool", "export", "model.pt"],
        cwd=tmp_path,
        stderr=(tmp_path.parent / "killed.log").open("w"),
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    deadline = time.monotonic() + 240
    while not list(tmp_path.glob(".edgepool-bundle.*.tmp/model.onnx")):
        assert process.poll() is None, (tmp_path.parent / "killed.log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert {p: p.read_bytes() for p in before} == before
    Bundle.open(tmp_path / "edgepool-bundle").verify()
    assert list(tmp_path.glob(".edgepool-bundle.*.tmp"))
    export(path, Options(tmp_path / "edgepool-bundle"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["edgepool-bundle", "model.pt"]
    assert Bundle.open(tmp_path / "edgepool-bundle").config == config(**FULL)


def test_the_command_as_typed(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`edgepool export model.pt` with nothing else, and --json."""
    assert run("export", "model.pt", "--max-context", "300", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["parity"]["model.onnx"]["greedy_differences"] == 0
    assert Bundle.open("edgepool-bundle").config.max_context == 300
    assert run("export", "model.pt") == 0
    assert "model.onnx equals PyTorch" in capsys.readouterr().err
    assert Bundle.open("edgepool-bundle").config.max_context == 512
