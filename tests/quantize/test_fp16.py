"""The FP16 gate: rounding everywhere but in norms, overflow found by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from edgepool.bundle import Bundle
from edgepool.checkpoint import load
from edgepool.cli.main import main
from edgepool.model import Cache, Model
from edgepool.quantize import fp16

IDS = np.random.default_rng(6).integers(0, 272, 300).astype(np.int32)


@pytest.fixture
def model(sparse_bundle: Path) -> Model:
    return fp16.reference_model(Bundle.open(sparse_bundle))


def test_the_model_is_the_one_that_was_exported(sparse_bundle: Path, model: Model) -> None:
    original = Model.from_checkpoint(load(sparse_bundle.parent / "model.pt"))
    for (name, mine), (_, theirs) in zip(model.named_parameters(), original.named_parameters()):
        assert torch.equal(mine, theirs), name


def test_every_result_is_a_half_precision_number(model: Model) -> None:
    mode, seen = fp16.Rounding(), []
    for path, module in model.named_modules():
        if not list(module.children()):
            module.register_forward_hook(lambda _, args, out, path=path: seen.append((path, out)))
    cache = Cache.allocate(model, 1, 64)
    with torch.no_grad(), mode.following(model), mode:
        cache.step([IDS[:64].tolist()])
    assert len(seen) > 8 * model.config.num_layers
    for path, out in seen:
        if not path.endswith(("norm", "rotation")):  # rounded after this hook
            assert torch.equal(out, out.half().float()), path
    assert not mode.overflows


def test_angles_of_positions_are_not_rounded(model: Model) -> None:
    """FP16 rounds position 2,049 to 2,048, and an angle of 1,000 to halves; cosines to 2^-12."""
    position = torch.arange(8192, dtype=torch.int32)[None]
    exact = model.rotation(position)
    mode = fp16.Rounding()
    with mode.following(model), mode:
        rounded = model.rotation(position)
    for mine, theirs in zip(exact, rounded):
        assert torch.equal(theirs, theirs.half().float())
        assert float((mine - theirs).abs().max()) <= 2**-12


def test_fp16_costs_little_but_something(model: Model) -> None:
    outcome = fp16.judge(model, IDS)
    assert not outcome.overflows
    assert outcome.comparison.predicted == len(IDS) - 1
    assert abs(outcome.comparison.perplexity_increase) < 1
    assert all(1e-5 < layer.relative < 0.005 for layer in outcome.comparison.layers.values())


def test_a_planted_activation_of_70000_is_found(sparse_bundle: Path, model: Model) -> None:
    weight = model.layers[1].down_proj.weight
    seen: list[torch.Tensor] = []
    hook = model.layers[1].down_proj.register_forward_hook(
        lambda m, a, out: seen.append(out[..., 5])
    )
    Cache.allocate(model, 1, len(IDS)).step([IDS.tolist()])
    hook.remove()
    with torch.no_grad():
        weight[5] *= 70_000 / seen[0].abs().max()
    outcome = fp16.judge(model, IDS)
    assert next(iter(outcome.overflows)) == "layers.1.down_proj/MatMul"
    # PyTorch in float16 gives 0.1 % less than 70,000, too.
    assert outcome.overflows["layers.1.down_proj/MatMul"] == pytest.approx(70_000, rel=2e-3)
    graph = onnx.load(sparse_bundle / "model.onnx").graph
    assert set(outcome.overflows) <= {node.name for node in graph.node}
    assert np.isfinite(outcome.comparison.perplexities).all()
    with torch.no_grad():
        weight[5] *= 65_000 / 70_000
    assert not fp16.judge(model, IDS).overflows


def test_the_command_judges_and_writes_nothing(
    sparse_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path.name for path in sparse_bundle.rglob("*"))
    np.savez(tmp_path / "ids.npz", input_ids=IDS)
    data = ["--data", str(tmp_path / "ids.npz")]
    assert main(["quantize", str(sparse_bundle), "--fp16", "--json", *data]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["gate"]["tokens"] == len(IDS)
    assert printed["overflows"] == {}
    assert main(["quantize", str(sparse_bundle), "--fp16"]) == 2
    assert "name one with --data" in capsys.readouterr().err
    assert sorted(path.name for path in sparse_bundle.rglob("*")) == before
