"""The Triton model repository: its configuration is Triton's own protobuf, and fits the graph.

There is no Triton here. An imitation keeps the state of sequences as config.pbtxt says and runs the
repository's model; the README's client has to get from it what a session gives.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from edgepool.bundle import Bundle
from edgepool.cli.main import main
from edgepool.engine import store, trust
from edgepool.engine.graphs import weights_digest
from edgepool.files import sha256
from edgepool.package import triton
from edgepool.runtime.source import open_source
from edgepool.targets import find_target
from tests.environments import python_with

# Its own environment: it holds back protobuf, which onnx wants newer.
TRITON = "tritonclient[grpc]==2.73.0"
PARSE = """
import json, sys
from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2
config = text_format.Parse(open(sys.argv[1]).read(), model_config_pb2.ModelConfig())
print(json.dumps(json_format.MessageToDict(config, preserving_proto_field_name=True)))
"""
NUMPY = {"TYPE_FP32": np.float32, "TYPE_FP16": np.float16, "TYPE_INT8": np.int8}
ONNX = {"TYPE_FP32": 1, "TYPE_INT8": 3, "TYPE_INT32": 6, "TYPE_FP16": 10}


def parsed(repository: Path) -> dict[str, Any]:
    """config.pbtxt as Triton's own protobuf reads it."""
    command = [python_with(TRITON), "-c", PARSE, repository / "edgepool" / "config.pbtxt"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    config: dict[str, Any] = json.loads(result.stdout)
    return config


def sizes(dims: list[str]) -> list[int]:
    return [int(size) for size in dims]  # int64 are strings in JSON


@pytest.fixture(scope="module")
def repository(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("triton") / "models with a space"
    written = triton.write_repository(Bundle.open(bundle), folder, kv_tokens=500)
    assert written.model.file is not None
    return folder


@pytest.fixture(scope="module")
def config(repository: Path) -> dict[str, Any]:
    return parsed(repository)


class Tensor:
    def __init__(self, name: str, shape: tuple[int, ...], kind: str) -> None:
        assert kind == "INT32"
        self.name, self.shape = name, shape

    def set_data_from_numpy(self, array: np.ndarray) -> None:
        assert array.dtype == np.int32
        assert array.shape == self.shape
        self.array = array


class Answer:
    def __init__(self, outputs: dict[str, np.ndarray]) -> None:
        self.outputs = outputs

    def as_numpy(self, name: str) -> np.ndarray:
        return self.outputs[name]


class ImitatedTriton:
    """Does with state what the documentation of Triton's implicit state says."""

    def __init__(self, repository: Path, config: dict[str, Any]) -> None:
        self.config = config
        self.batching = config["sequence_batching"]
        folder = repository / config["name"] / "1"
        self.session = ort.InferenceSession(str(folder / "model.onnx"))
        self.states: dict[int, dict[str, np.ndarray]] = {}

    def infer(
        self, model: str, inputs: list[Tensor], sequence_id: int, sequence_start: bool,
        sequence_end: bool,
    ) -> Answer:  # fmt: skip
        assert model == self.config["name"]
        if sequence_start:
            self.states[sequence_id] = {
                state["input_name"]: np.zeros(
                    sizes(state["initial_state"][0]["dims"]), NUMPY[state["data_type"]]
                )
                for state in self.batching["state"]
                if state["initial_state"][0]["zero_data"]
            }
        state = self.states.pop(sequence_id)
        for wanted, given in zip(self.config["input"], inputs):
            assert wanted["name"] == given.name
            assert fits(given.shape, sizes(wanted["dims"]))
        feed = {**{tensor.name: tensor.array for tensor in inputs}, **state}
        names = [value.name for value in self.session.get_outputs()]
        outputs = dict(zip(names, self.session.run(names, feed)))
        if not sequence_end:
            self.states[sequence_id] = {
                pair["input_name"]: outputs[pair["output_name"]] for pair in self.batching["state"]
            }
        (logits,) = self.config["output"]
        assert fits(outputs["logits"].shape, sizes(logits["dims"]))
        return Answer({"logits": outputs["logits"]})


def fits(shape: tuple[int, ...], dims: list[int]) -> bool:
    return len(shape) == len(dims) and all(d in (-1, s) for s, d in zip(shape, dims))


def test_the_client_of_the_readme_gets_what_a_session_gives(
    bundle: Path, repository: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sequences at once, prompts longer than a chunk, on the imitation."""
    (code,) = re.findall(r"```python\n(.*?)```", (repository / "README.md").read_text(), re.DOTALL)
    stand_in = types.ModuleType("tritonclient.grpc")
    stand_in.InferInput = Tensor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tritonclient", types.ModuleType("tritonclient"))
    monkeypatch.setitem(sys.modules, "tritonclient.grpc", stand_in)
    client: dict[str, Any] = {"__name__": "client"}
    exec(compile(code, "README.md", "exec"), client)
    server = ImitatedTriton(repository, config)
    source = open_source(bundle)
    text = (
        "It is a truth universally acknowledged, that a single man in possession of a good fortune"
    )
    for sequence, prompt in ((1, "Once upon"), (2, text * 4)):
        ids = source.encode(prompt)
        session = source.open_session(500)
        logits = session.feed([ids])[0, 0]
        expected = []
        for _ in range(6):
            expected.append(int(logits.argmax()))
            logits = session.feed([expected[-1:]])[0, 0]
        assert client["generate"](server, ids, 6, sequence) == expected
        assert len(set(expected)) > 2
    assert len(ids) > client["CHUNK"]
    assert not server.states


@pytest.mark.parametrize("target", [None, "jetson-agx-xavier", "jetson-agx-orin", "h100"])
def test_state_and_inputs_are_those_of_the_graph(
    bundle: Path, target: str | None, tmp_path: Path
) -> None:
    profile = None if target is None else find_target(target)
    written = triton.write_repository(Bundle.open(bundle), tmp_path / "r", profile)
    config = parsed(tmp_path / "r")
    variant = bundle / "variants" / str(target) / "model.onnx"
    graph = onnx.load(variant if variant.exists() else bundle / "model.onnx").graph
    given = {value.name: value.type.tensor_type for value in (*graph.input, *graph.output)}
    states = config["sequence_batching"]["state"]
    named = {tensor["name"]: tensor for tensor in (*config["input"], *config["output"])}
    for state in states:
        assert state["use_same_buffer_for_input_output"] is True
        (initial,) = state["initial_state"]
        assert initial["zero_data"] is True
        assert (initial["data_type"], initial["dims"]) == (state["data_type"], state["dims"])
        named[state["input_name"]] = named[state["output_name"]] = state
    assert set(named) == set(given)
    for name, tensor in named.items():
        dims = [d.dim_value or -1 for d in given[name].shape.dim]
        assert len(dims) == len(tensor["dims"]), name
        assert all(mine in (-1, d) for mine, d in zip(dims, sizes(tensor["dims"]))), name
        assert ONNX[tensor["data_type"]] == given[name].elem_type, name
    assert all(size > 0 for state in states for size in sizes(state["dims"]))
    total = sum(
        np.dtype(NUMPY[state["data_type"]]).itemsize * int(np.prod(sizes(state["dims"])))
        for state in states
    )
    assert written.state_bytes == total
    assert config.get("max_batch_size", 0) == 0
    plan = target is not None
    assert config["platform"] == ("tensorrt_plan" if plan else "onnxruntime_onnx")
    (group,) = config["instance_group"]
    assert group.get("profile") == (["0", "1"] if plan else None)


@pytest.fixture
def with_engine(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the bundle with an engine for an Orin, for 1,000 tokens, that nobody has built."""
    monkeypatch.setenv("EDGEPOOL_CACHE", str(tmp_path / "cache"))
    copy = Path(shutil.copytree(bundle, tmp_path / "edgepool-bundle"))
    opened = Bundle.open(copy)
    place = copy / "engines" / "jetson-agx-orin-fp32"
    place.mkdir(parents=True)
    (place / "engine").write_bytes(b"serialised")
    key = {
        "precision": "fp32",
        "runtime": "TensorRT 10.3.0.30",
        "weights": weights_digest(opened, opened.manifest["variants"]["jetson-agx-orin"]["model"]),
        "profiles": {"batch": 1, "input_len": 64, "kv_tokens": 1000},
    }
    record = {
        "version": store.VERSION,
        "key": key,
        "sha256": sha256(place / "engine"),
        "bytes": 10,
        "target": "jetson-agx-orin",
    }
    (place / "engine.json").write_text(json.dumps(record))
    return copy


def write(bundle: Path, folder: Path) -> triton.Repository:
    return triton.write_repository(Bundle.open(bundle), folder, find_target("jetson-agx-orin"))


def test_an_engine_is_copied_with_its_limits(with_engine: Path, tmp_path: Path) -> None:
    """The engine that this user built for the target, whose pools the configuration then has."""
    engine = with_engine / "engines" / "jetson-agx-orin-fp32" / "engine"
    trust.remember(sha256(engine))
    assert write(with_engine, tmp_path / "r").model.kv_tokens == 1000
    plan = tmp_path / "r" / "edgepool" / "1" / "model.plan"
    assert plan.read_bytes() == b"serialised"
    states = parsed(tmp_path / "r")["sequence_batching"]["state"]
    pool = next(s for s in states if s["input_name"].startswith("k_pool."))
    page = Bundle.open(with_engine).config.page_size
    assert sizes(pool["dims"])[0] == 1 + -(-1000 // page)
    assert "CHUNK, ENDS = %d, 64," % page in (tmp_path / "r" / "README.md").read_text()


@pytest.mark.parametrize("fault", ["of somebody else", "changed", "of other weights"])
def test_an_engine_that_is_not_ones_own_is_left_alone(
    with_engine: Path, tmp_path: Path, fault: str
) -> None:
    """Triton would run it. The README says how to build one."""
    place = with_engine / "engines" / "jetson-agx-orin-fp32"
    if fault != "of somebody else":
        trust.remember(sha256(place / "engine"))
    if fault == "changed":
        (place / "engine").write_bytes(b"serialisee")
    if fault == "of other weights":
        record = json.loads((place / "engine.json").read_text())
        record["key"]["weights"] = "0" * 64
        (place / "engine.json").write_text(json.dumps(record))
    assert write(with_engine, tmp_path / "r").model.file is None
    assert "It is not there yet" in (tmp_path / "r" / "README.md").read_text()
    assert not list((tmp_path / "r" / "edgepool" / "1").iterdir())


def test_the_state_of_an_fp16_engine(bundle: Path) -> None:
    """`build-engine --fp16` keeps the pages of an FP32 bundle in FP16."""
    fp32, fp16 = (triton.states_of(Bundle.open(bundle), p, 3) for p in ("fp32", "fp16"))
    pages = [(a.data_type, b.data_type) for a, b in zip(fp32, fp16) if a.bytes != b.bytes]
    assert pages and set(pages) == {("TYPE_FP32", "TYPE_FP16")}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target", "rtx-4090"], "rtx-4090 runs no engine with plugins"),
        (["--max-kv-tokens", "0"], "--max-kv-tokens 0: choose 1 to"),
        (["--output", "p.tar"], "--output and --plugin-library belong to --target alone"),
        (["--verify", "p.tar"], "choose one of"),
    ],
)
def test_wrong_usage(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    arguments: list[str], said: str,
) -> None:  # fmt: skip
    assert main(["package", str(bundle), "--triton", str(tmp_path / "r"), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_command(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "r")
    assert main(["package", str(bundle), "--triton", folder, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["complete"] is True
    assert main(["package", str(bundle), "--triton", folder]) == 2
    assert "the folder is not empty" in capsys.readouterr().err
