"""Opening bundles: what is checked before anything runs. The graph is the hand-made one."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from edgepool.bundle import FORMAT, VERSION, write_manifest
from edgepool.checkpoint import byte_tokenizer, load
from edgepool.cli.main import main
from edgepool.errors import BadInput
from edgepool.runtime.generate import generate
from edgepool.runtime.source import open_source

from .fakes import byte_level_json, config
from .models import TEMPLATE, write_checkpoint
from .tiny_graph import embedding, write_tiny_graph

CONFIG = config(num_layers=1, layer_types=("full",), chat_template=TEMPLATE)


def write_bundle(path: Path, tokenizer: str | None = None, **manifest: object) -> Path:
    path.mkdir()
    write_tiny_graph(CONFIG, path / "model.onnx")
    (path / "tokenizer.json").write_text(tokenizer or byte_tokenizer(), encoding="utf-8")
    record = {
        "format": FORMAT,
        "version": VERSION,
        "edgepool": "0.1",
        "config": CONFIG.to_dict(),
        "source_digest": "0" * 64,
        "opset": 20,
        "dtype": "fp32",
        "functions": "auto",
        "variants": {},
        "quantization": None,
        "reference": None,
        "parity": None,
    }
    write_manifest(path, {**record, **manifest})
    return path


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "edgepool-bundle")


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_runs_a_bundle(bundle: Path) -> None:
    source = open_source(bundle)
    session = source.open_session(60)
    result = generate(session, source.tokenizer, source.encode("abc"), max_new_tokens=3)
    assert result.token_ids == [319, 319, 319]  # the graph's logits grow with the token's number
    assert result.text == ""  # an id beyond the tokenizer's pads the vocabulary


def test_the_default_bundle(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(bundle.parent)
    assert main(["run", "--prompt", "abc", "--max-new-tokens", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == [319, 319]


@pytest.mark.parametrize("name", ["model.onnx", "tokenizer.json"])
@pytest.mark.parametrize("where", [0, 0.5, -1])
def test_a_flipped_byte_is_refused(
    bundle: Path, name: str, where: float, capsys: pytest.CaptureFixture[str]
) -> None:
    size = (bundle / name).stat().st_size
    flip(bundle / name, int(where * size) if where > 0 else int(where))
    assert main(["run", str(bundle), "--prompt", "abc"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert name in captured.err
    assert "sha256" in captured.err


def test_a_graph_for_another_target_is_not_read(bundle: Path) -> None:
    """Its digest is checked when it is used; hashing every variant would slow down every start."""
    other = bundle / "variants" / "jetson-agx-orin" / "model.onnx"
    other.parent.mkdir(parents=True)
    write_tiny_graph(CONFIG, other)
    write_manifest(bundle, json.loads((bundle / "manifest.json").read_text()))
    flip(other, other.read_bytes().index(embedding(CONFIG).tobytes()))
    open_source(bundle)


def test_external_data_is_checked(bundle: Path) -> None:
    graph = bundle / "model.onnx"
    model = onnx.load(graph)
    where = {"location": "model.onnx.data", "size_threshold": 0}
    onnx.save(model, graph, save_as_external_data=True, **where)
    write_manifest(bundle, json.loads((bundle / "manifest.json").read_text()))
    flip(bundle / "model.onnx.data", 0)
    with pytest.raises(BadInput, match=r"model.onnx.data.*sha256"):
        open_source(bundle)


def test_a_bundle_without_tokenizer(bundle: Path) -> None:
    (bundle / "tokenizer.json").unlink()
    write_manifest(bundle, json.loads((bundle / "manifest.json").read_text()))
    with pytest.raises(BadInput, match="no tokenizer"):
        open_source(bundle)


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [("{}", "not a tokenizer.json"), ("[", "not a tokenizer.json")],
)
def test_a_damaged_tokenizer(tmp_path: Path, tokenizer: str, message: str) -> None:
    with pytest.raises(BadInput, match=message) as failure:
        open_source(write_bundle(tmp_path / "bundle", tokenizer))
    assert "\n" not in str(failure.value)


def test_a_tokenizer_of_another_vocabulary(tmp_path: Path) -> None:
    small = config(num_layers=1, layer_types=("full",), vocab_size=300)
    bundle = write_bundle(tmp_path / "bundle", byte_level_json(), config=small.to_dict())
    with pytest.raises(BadInput, match="312 tokens do not fit the model's vocabulary of 300"):
        open_source(bundle)


def test_torch_runs_the_model_that_the_bundle_came_from(tmp_path: Path) -> None:
    model_pt = write_checkpoint(tmp_path / "model.pt")
    bundle = write_bundle(tmp_path / "bundle", source_digest=load(model_pt).source)
    source = open_source(bundle, backend="torch")
    assert source.config.num_layers == 2  # the checkpoint's, not the hand-made graph's
    assert source.open_session(16).cache_bytes > 0


def test_torch_keeps_to_the_context_of_the_bundle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_pt = write_checkpoint(tmp_path / "model.pt")
    shorter = {**CONFIG.to_dict(), "max_context": 20}
    bundle = write_bundle(tmp_path / "bundle", source_digest=load(model_pt).source, config=shorter)
    assert open_source(model_pt).config.max_context == 128
    assert open_source(bundle, backend="torch").config.max_context == 20
    for backend in ("ort", "torch"):
        assert main(["run", str(bundle), "--backend", backend, "--prompt", "x" * 21]) == 2
        assert "has 21 tokens, but the context has room for 20" in capsys.readouterr().err


def test_torch_refuses_another_model(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle", source_digest="0" * 64)
    with pytest.raises(BadInput, match="PyTorch needs the model.pt"):
        open_source(bundle, backend="torch")
    write_checkpoint(tmp_path / "model.pt")
    with pytest.raises(BadInput, match="not the model that the bundle was exported from"):
        open_source(bundle, backend="torch")
