"""`edgepool calibrate`: ranges against PyTorch's, what is stored, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from edgepool.bundle import Bundle, write_manifest
from edgepool.cli.main import main
from edgepool.config import ModelConfig
from edgepool.errors import BadInput, GateFailed
from edgepool.model import Cache, Model
from edgepool.quantize import record
from edgepool.quantize.calibrate import Options, calibrate

from .conftest import token_file
from .reference import rotated_model


def torch_inputs(model: Model, sequences: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """The largest |input| of each channel of every nn.Linear, by module."""
    seen: dict[str, torch.Tensor] = {}

    def watch(name: str) -> None:
        def hook(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            largest = args[0].abs().flatten(0, -2).amax(0)
            seen[name] = torch.maximum(largest, seen.get(name, largest))

        model.get_submodule(name).register_forward_pre_hook(hook)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            watch(name)
    for sequence in sequences:
        cache = Cache.allocate(model, 1, len(sequence))
        cache.step([sequence.tolist()])
    return seen


@pytest.mark.parametrize("name", ["sparse_bundle", "learned_bundle"])
def test_ranges_are_those_of_pytorch(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    original: Path = request.getfixturevalue(name)
    bundle = Path(shutil.copytree(original, tmp_path / "edgepool-bundle"))
    tokens = token_file(tmp_path / "a.npz")
    result = calibrate(bundle, Options([tokens], samples=3, length=100))
    ids = np.load(tokens)["input_ids"]
    sequences = [ids[:100], ids[100:200], ids[200:600]]
    expected = torch_inputs(rotated_model(Bundle.open(bundle)), sequences)
    for linear, tensor in result.tensors.items():
        if linear in expected:  # a tied head is no module
            np.testing.assert_allclose(
                tensor.channels, expected[linear].numpy(), rtol=2e-3, atol=1e-4
            )
    assert len(set(expected) & set(result.tensors)) >= 4 * Bundle.open(bundle).config.num_layers
    assert "lm_head" in result.tensors


def test_it_is_stored_in_the_bundle_with_what_it_was_made_from(bundle: Path) -> None:
    before = {f: Bundle.open(bundle).manifest["files"][f] for f in ("model.onnx", "tokenizer.json")}
    tokens = token_file(bundle.parent / "a.npz")
    result = calibrate(bundle, Options([tokens], samples=4, length=64))
    opened = Bundle.open(bundle)
    opened.verify()
    assert {f: opened.manifest["files"][f] for f in before} == before
    stored = record.read(opened.file(record.NAME), opened)
    assert (
        stored.data
        == result.data
        == {
            "kind": "npz",
            "files": ["a.npz"],
            "samples": 4,
            "tokens": 3 * 64 + 256,
            "longest": 256,
            "digest": result.data["digest"],
        }
    )
    assert stored.digest == result.digest
    again = calibrate(bundle, Options([tokens], samples=4, length=64))
    assert again.digest == result.digest
    other = calibrate(bundle, Options([tokens], samples=4, length=65))
    assert other.data["digest"] != result.data["digest"]


def test_without_data_the_model_writes_it(bundle: Path) -> None:
    result = calibrate(bundle, Options(samples=3, length=40))
    assert result.data["kind"] == "sampled from the model"
    assert result.data["samples"] == 3
    assert result.data["longest"] == 160
    assert len(result.held_out) == 4 * 40
    assert calibrate(bundle, Options(samples=3, length=40)).digest == result.digest


@pytest.mark.parametrize("method", ["entropy", "percentile"])
def test_other_methods_clip(bundle: Path, method: str) -> None:
    tokens = token_file(bundle.parent / "a.npz")
    result = calibrate(bundle, Options([tokens], samples=2, length=64, method=method))
    assert result.method == method
    for tensor in result.tensors.values():
        assert tensor.threshold is not None
        assert tensor.threshold > 0


def test_a_node_that_gives_nan_is_named(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = token_file(bundle.parent / "a.npz")
    break_weight(bundle, "layers.1.up_proj.weight")
    before = sorted(path.name for path in bundle.iterdir())
    with pytest.raises(GateFailed, match=r"node 'layers\.1\.up_proj/MatMul' gives NaN"):
        calibrate(bundle, Options([tokens], samples=2, length=64))
    assert sorted(path.name for path in bundle.iterdir()) == before
    assert main(["calibrate", str(bundle), "--data", str(tokens), "--length", "64"]) == 1
    assert capsys.readouterr().err.count("\n") <= 2


def break_weight(path: Path, name: str) -> None:
    """Put a NaN into a weight, and make the manifest say that this is the file."""
    model = onnx.load(path / "model.onnx")
    tensor = next(t for t in model.graph.initializer if t.name == name)
    values = onnx.numpy_helper.to_array(tensor).copy()
    values[0, 0] = np.nan
    tensor.CopyFrom(onnx.numpy_helper.from_array(values, name))
    onnx.save(model, path / "model.onnx")
    manifest = json.loads((path / "manifest.json").read_text())
    write_manifest(path, manifest)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(method="median"), "method 'median'"),
        (Options(samples=0), "--samples 0"),
        (Options(length=0), "--length 0"),
        (Options([Path("none.txt")]), "none.txt: no such file"),
    ],
)
def test_bad_options(bundle: Path, options: Options, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        calibrate(bundle, options)


def test_a_calibration_of_another_model_is_refused(bundle: Path, learned_bundle: Path) -> None:
    calibrate(bundle, Options(samples=2, length=32))
    other = Bundle.open(learned_bundle)
    with pytest.raises(BadInput, match="made for another model"):
        record.read(bundle / record.NAME, other)


@pytest.mark.parametrize("damage", ["cut", "range", "nothing"])
def test_a_damaged_calibration_is_refused(bundle: Path, damage: str) -> None:
    calibrate(bundle, Options(samples=2, length=32))
    path = bundle / record.NAME
    text = path.read_text()
    path.unlink()
    if damage == "cut":
        path.write_text(text[: len(text) // 2])
    elif damage == "range":
        data = json.loads(text)
        data["tensors"]["lm_head"]["channels"][3] = -1.0
        path.write_text(json.dumps(data))
    with pytest.raises(BadInput, match="damaged|no such file"):
        record.read(path, _opened(bundle))


def test_a_calibration_before_rotation_is_refused(bundle: Path) -> None:
    calibrate(bundle, Options(samples=2, length=32))
    path = bundle / record.NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2}))
    with pytest.raises(BadInput, match="version 2 of a calibration, .*run `edgepool calibrate`"):
        record.read(path, _opened(bundle))


def _opened(path: Path) -> Bundle:
    manifest = json.loads((path / "manifest.json").read_text())
    return Bundle(path, manifest, ModelConfig.from_dict(manifest["config"]))


def test_the_command_prints_json(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", str(bundle), "--samples", "2", "--length", "32", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["data"]["samples"] == 2
    assert printed["tensors"]["layers.0.q_proj"]["highest"] > 0
