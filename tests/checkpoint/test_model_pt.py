"""model.pt: what is written is what is read, and every other file is refused by name."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgepool.checkpoint import LazyTensor, byte_tokenizer, load, random_weights, save
from edgepool.config import IndexConfig, ModelConfig, RopeScaling, weight_shapes
from edgepool.errors import BadInput

CONFIG = ModelConfig(
    vocab_size=272,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_context=64,
    qkv_bias=True,
    layer_types=("full", "sparse"),
    rope_layers=(True, False),
    rope_scaling=RopeScaling("yarn", 4.0, 16),
    index=IndexConfig(top_k=32),
    eos_token_ids=(258,),
    chat_template="{{ messages }} é",
)


def tensors(config: ModelConfig = CONFIG, seed: int = 0) -> dict[str, torch.Tensor]:
    return {name: weight.read() for name, weight in random_weights(config, seed).items()}


def record(**changes: object) -> dict[str, object]:
    """What torch.save is given, with keys replaced (None: taken out)."""
    whole = {
        "format": "edgepool",
        "version": 1,
        "config": CONFIG.to_dict(),
        "state_dict": tensors(),
        "tokenizer": byte_tokenizer(),
    }
    whole.update(changes)
    return {key: value for key, value in whole.items() if value is not None}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "model.pt"
    save(path, CONFIG, tensors(), byte_tokenizer())
    return path.read_bytes()


def refused(path: Path) -> str:
    with pytest.raises(BadInput) as caught:
        load(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


# ------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_round_trip(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = {name: tensor.to(dtype) for name, tensor in tensors().items()}
    path = tmp_path / "modèle.pt"
    save(path, CONFIG, weights, byte_tokenizer())
    checkpoint = load(path)
    assert checkpoint.config == CONFIG
    assert checkpoint.tokenizer == byte_tokenizer()
    assert list(checkpoint.weights) == list(weight_shapes(CONFIG))
    for name, tensor in weights.items():
        assert checkpoint.weights[name].dtype == dtype
        assert torch.equal(checkpoint.weights[name], tensor)
    assert checkpoint.source == hashlib.sha256(path.read_bytes()).hexdigest()


def test_no_tokenizer(tmp_path: Path) -> None:
    save(tmp_path / "model.pt", CONFIG, tensors(), None)
    assert load(tmp_path / "model.pt").tokenizer is None


def test_file_is_what_torch_saves(tmp_path: Path, good: bytes) -> None:
    plain = io.BytesIO()
    torch.save(record(), plain)
    ours = torch.load(io.BytesIO(good), weights_only=True)
    theirs = torch.load(io.BytesIO(plain.getvalue()), weights_only=True)
    assert ours.keys() == theirs.keys()
    states = ours.pop("state_dict"), theirs.pop("state_dict")
    assert ours == theirs
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
    (tmp_path / "plain.pt").write_bytes(plain.getvalue())
    assert load(tmp_path / "plain.pt").config == CONFIG


def test_archive_is_a_sound_zip(good: bytes) -> None:
    assert zipfile.ZipFile(io.BytesIO(good)).testzip() is None


def test_texts_that_look_like_parts_of_a_zip_file(tmp_path: Path) -> None:
    """A central directory's entry for a tensor, in the middle of the chat template."""
    entry = "PK\x01\x02" + "\0" * 24 + "\x08" + "\0" * 17 + "a/data/0"
    c = dataclasses.replace(CONFIG, chat_template=entry * 3 + "PK\x05\x06PK\x06\x07PK\x07\x08")
    save(tmp_path / "model.pt", c, tensors(), None)
    assert zipfile.ZipFile(tmp_path / "model.pt").testzip() is None
    assert load(tmp_path / "model.pt").config == c


def test_equal_input_gives_equal_bytes(tmp_path: Path, good: bytes) -> None:
    backwards = dict(reversed(tensors().items()))
    save(tmp_path / "other name.pt", CONFIG, backwards, byte_tokenizer())
    assert (tmp_path / "other name.pt").read_bytes() == good


def test_views_are_written_as_their_values(tmp_path: Path) -> None:
    weights = tensors()
    name = "layers.0.q_proj.weight"
    expected = weights[name].clone()
    weights[name] = weights[name].t().contiguous().t()
    save(tmp_path / "model.pt", CONFIG, weights, None)
    assert torch.equal(load(tmp_path / "model.pt").weights[name], expected)


def test_one_tensor_in_memory_at_a_time(tmp_path: Path) -> None:
    alive, most = 0, 0

    class Counted(torch.Tensor):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def lazy(tensor: torch.Tensor) -> LazyTensor:
        def read() -> torch.Tensor:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)
            return tensor.clone().as_subclass(Counted)

        return LazyTensor(tuple(tensor.shape), tensor.dtype, read)

    weights = {name: lazy(tensor) for name, tensor in tensors().items()}
    save(tmp_path / "model.pt", CONFIG, weights, None)
    assert most <= 2  # the next is read before the last is dropped
    assert load(tmp_path / "model.pt").weights.keys() == weights.keys()


def test_progress(tmp_path: Path) -> None:
    seen = []
    save(tmp_path / "model.pt", CONFIG, tensors(), None, report=lambda *step: seen.append(step))
    count = len(weight_shapes(CONFIG))
    assert seen == [("writing tensors", i + 1, count) for i in range(count)]


# ------------------------------------------------------------------------------- bad files


class Canary:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return os.system, (f"touch {self.path}",)


def test_pickled_objects_are_refused_and_not_executed(tmp_path: Path) -> None:
    path, touched = tmp_path / "model.pt", tmp_path / "touched"
    for value in (torch.nn.Linear(2, 2), Canary(touched), record(config=Canary(touched))):
        torch.save(value, path)
        assert "never executed" in refused(path)
    assert not touched.exists()
    torch.save(Canary(touched), path, _use_new_zipfile_serialization=False)
    assert "not a model.pt" in refused(path)
    assert not touched.exists()


def test_other_files(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    assert "no such file" in refused(path)
    path.mkdir()
    assert "folder" in refused(path)
    path.rmdir()
    path.write_bytes(b"")
    assert "empty" in refused(path)
    path.write_bytes(b"GGUF" + bytes(100))
    assert "truncated or another kind" in refused(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "hello")
    assert "damaged" in refused(path)
    path.write_bytes(bytes(512) + path.read_bytes())  # as a tar holds a zip file
    assert "truncated or another kind" in refused(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("module/constants.pkl", b"")
    assert "TorchScript" in refused(path)
    torch.save(tensors(), path)
    assert "not an edgepool checkpoint" in refused(path)
    torch.save([1, 2], path)
    assert "not an edgepool checkpoint" in refused(path)


def nested(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**tensors(), "norm.weight": tensor}


WITHOUT = {n: t for n, t in tensors().items() if n not in ("norm.weight", "lm_head.weight")}
FAULTS = {
    "format": (dict(format="other"), "unknown format 'other'"),
    "version": (dict(version=2), "version 2"),
    "no version": (dict(version=None), "version None"),
    "key": (dict(extra=1), "unknown key 'extra'"),
    "no config": (dict(config=None), "'config' is missing"),
    "no weights": (dict(state_dict=None), "'state_dict' is missing"),
    "weights": (dict(state_dict=[1]), "not a dictionary"),
    "object": (dict(state_dict={**tensors(), "norm.weight": 3}), "'norm.weight'"),
    "sparse": (dict(state_dict=nested(torch.ones(16).to_sparse())), "'norm.weight'"),
    "meta": (dict(state_dict=nested(torch.ones(16, device="meta"))), "'norm.weight'"),
    "missing": (dict(state_dict=WITHOUT), "'lm_head.weight' (and 1 more) is missing"),
    "extra": (dict(state_dict={**tensors(), "x": torch.ones(1)}), "'x' belongs to no layer"),
    "shape": (dict(state_dict=nested(torch.ones(17))), "'norm.weight' has shape [17]"),
    "rank": (dict(state_dict=nested(torch.ones(16, 1))), "'norm.weight' has shape [16, 1]"),
    "nan": (dict(state_dict=nested(torch.full((16,), float("nan")))), "'norm.weight' holds NaN"),
    "inf": (dict(state_dict=nested(torch.full((16,), float("-inf")))), "'norm.weight' holds NaN"),
    "repeated": (dict(state_dict=nested(torch.ones(1).expand(16))), "'norm.weight' repeats"),
    "dtype": (dict(state_dict=nested(torch.ones(16, dtype=torch.float64))), "is float64"),
    "int": (dict(state_dict=nested(torch.ones(16, dtype=torch.int8))), "is int8"),
    "tokenizer": (dict(tokenizer="{"), "tokenizer cannot be read"),
    "tokenizer json": (dict(tokenizer='{"model": 3}'), "tokenizer cannot be read"),
    "tokenizer type": (dict(tokenizer=3), "'tokenizer' is not the text"),
    "config key": (
        dict(config={**CONFIG.to_dict(), "num_layer": 2}),
        "unknown key 'num_layer' (did you mean 'num_layers'?)",
    ),
    "config value": (dict(config={**CONFIG.to_dict(), "page_size": 6}), "config.page_size: 6"),
    "config infinite": (
        dict(config={**CONFIG.to_dict(), "rms_norm_eps": float("inf")}),
        "config.rms_norm_eps: inf",
    ),
    "config huge": (dict(config={**CONFIG.to_dict(), "window": 1 << 40}), "config.window: 1099"),
    "config unused": (
        dict(config={**CONFIG.to_dict(), "layer_types": [], "index": {"share": [0]}}),
        "config.index.share: (0,)",
    ),
    "tied": (
        dict(config={**CONFIG.to_dict(), "tie_embeddings": True}),
        "'lm_head.weight' belongs to no layer",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(tmp_path: Path, fault: str) -> None:
    changes, expected = FAULTS[fault]
    whole = record(**changes)
    if fault == "tokenizer type":
        whole["tokenizer"] = 3
    torch.save(whole, tmp_path / "model.pt")
    assert expected in refused(tmp_path / "model.pt")


def test_tokenizer_of_another_model(tmp_path: Path) -> None:
    small = ModelConfig.from_dict({**CONFIG.to_dict(), "vocab_size": 260})
    with pytest.raises(BadInput, match="ids up to 271.*ends at 259"):
        save(tmp_path / "model.pt", small, tensors(small), byte_tokenizer())
    assert not list(tmp_path.iterdir())


def test_values_can_be_left_unchecked(tmp_path: Path) -> None:
    torch.save(record(state_dict=nested(torch.full((16,), float("nan")))), tmp_path / "model.pt")
    assert load(tmp_path / "model.pt", check_values=False).config == CONFIG


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_truncation_is_refused(
    good: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("cut") / "model.pt"
    path.write_bytes(good[: data.draw(st.integers(0, len(good) - 1))])
    refused(path)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damage_is_refused_or_harmless(
    good: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any byte of the pickle or the zip directory changed: one clear line, or a valid model."""
    damaged = bytearray(good)
    tail = len(good) - 4000
    position = data.draw(st.integers(0, 6000) | st.integers(tail, len(good) - 1))
    damaged[position] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("damaged") / "model.pt"
    path.write_bytes(bytes(damaged))
    try:
        checkpoint = load(path)
    except BadInput as error:
        assert "\n" not in str(error)
    else:
        assert checkpoint.weights.keys() == weight_shapes(checkpoint.config).keys()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.floats(allow_nan=True) | st.text("a1"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_configuration_value(data: st.DataObject) -> None:
    """Whatever stands in a configuration: BadInput, or a record that says the same when written."""
    config = copy.deepcopy(CONFIG.to_dict())
    table = data.draw(st.sampled_from([config, config["index"], config["rope_scaling"]]))
    table[data.draw(st.sampled_from(sorted(table)))] = data.draw(JSON)
    try:
        parsed = ModelConfig.from_dict(config)
        weight_shapes(parsed)
    except BadInput:
        return
    assert ModelConfig.from_dict(json.loads(json.dumps(parsed.to_dict()))) == parsed


# ------------------------------------------------------------------------------- writing


def failing_save(path: Path, weights: dict[str, object], match: str) -> None:
    with pytest.raises(BadInput, match=match) as caught:
        save(path, CONFIG, weights, None)
    assert "\n" not in str(caught.value)


def test_faulty_weights_leave_the_old_file(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(good)
    failing_save(path, nested(torch.full((16,), float("nan"))), "'norm.weight' holds NaN")
    failing_save(path, nested(torch.ones(3)), "has shape")
    failing_save(path, WITHOUT, "is missing")
    assert path.read_bytes() == good
    assert list(tmp_path.iterdir()) == [path]


def test_unwritable_places(tmp_path: Path) -> None:
    failing_save(tmp_path / "nowhere" / "model.pt", tensors(), "No such file or directory")
    (tmp_path / "file").write_text("")
    failing_save(tmp_path / "file" / "model.pt", tensors(), "Not a directory")
    failing_save(tmp_path, tensors(), "is a folder")


@pytest.mark.parametrize("mode", [0o555, 0o000])
def test_folder_without_permission(mode: int) -> None:
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(mode)
        if user == 0:  # nothing is closed to root
            os.seteuid(65534)
        try:
            failing_save(folder / "model.pt", tensors(), "cannot be written: Permission denied")
        finally:
            os.seteuid(user)
            folder.chmod(0o700)
        assert not list(folder.iterdir())


def run_save(folder: Path) -> subprocess.Popen[str]:
    """A process that saves model.pt in `folder`, a tensor every 20 ms."""
    script = f"""
        import sys, time
        sys.path.insert(0, {str(Path(__file__).parents[2])!r})
        from edgepool.checkpoint import LazyTensor, save
        from tests.checkpoint.test_model_pt import CONFIG, tensors
        def slow(tensor):
            def read():
                time.sleep(0.02)
                print("read", flush=True)
                return tensor
            return LazyTensor(tuple(tensor.shape), tensor.dtype, read)
        weights = {{name: slow(tensor) for name, tensor in tensors(seed=1).items()}}
        save({str(folder / "model.pt")!r}, CONFIG, weights, None)
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    )


def test_full_disk(tmp_path: Path, good: bytes) -> None:
    """The kernel refuses the write half-way (a limit on file size stands in for the disk)."""
    path = tmp_path / "model.pt"
    path.write_bytes(good)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, limits[1]))
    try:
        failing_save(path, tensors(), "model.pt: no space left to write it")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == good
    assert list(tmp_path.iterdir()) == [path]


def test_killed_while_writing(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(good)
    process = run_save(tmp_path)
    for _ in range(10):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(0.05)
    assert path.read_bytes() == good
    assert load(path).config == CONFIG
    assert len(list(tmp_path.iterdir())) == 2
    save(path, CONFIG, tensors(), None)  # what the killed process left goes
    assert list(tmp_path.iterdir()) == [path]


def test_interrupted_while_writing(tmp_path: Path, good: bytes) -> None:
    def interrupt() -> torch.Tensor:
        raise KeyboardInterrupt

    path = tmp_path / "model.pt"
    path.write_bytes(good)
    weights = {**tensors(), "norm.weight": LazyTensor((16,), torch.float32, interrupt)}
    with pytest.raises(KeyboardInterrupt):
        save(path, CONFIG, weights, None)
    assert path.read_bytes() == good
    assert list(tmp_path.iterdir()) == [path]
