"""`--dtype fp16` is judged in float16 arithmetic, which ONNX Runtime's CPU does not compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from edgepool.checkpoint import Checkpoint, byte_tokenizer, load, save
from edgepool.cli.main import main
from edgepool.errors import GateFailed
from edgepool.exporter import half, parity, prove
from edgepool.exporter.export import Options, export
from edgepool.exporter.schedule import plan
from edgepool.model import Model

from .models import MIXED, SPARSE, config, weights, write_checkpoint

NEURON = 3


def largest_of_up_proj(checkpoint: Checkpoint) -> float:
    """The largest |output| of layer 1's up_proj at NEURON over parity's steps, in float32."""
    model = Model.from_checkpoint(checkpoint)
    seen = []

    def hook(_: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        seen.append(float(output[..., NEURON].abs().max()))

    model.layers[1].up_proj.register_forward_hook(hook)
    steps = plan(checkpoint.config, prove.text_tokens(checkpoint))
    for _ in parity.reference_steps(model, steps):
        pass
    return max(seen)


def with_activation(path: Path, value: float) -> Path:
    """A model.pt in whose layer 1 one output of up_proj reaches `value`; what it gives stays."""
    c = config(**SPARSE)
    write_checkpoint(path, c)
    planted = weights(c)
    factor = value / largest_of_up_proj(load(path))
    planted["layers.1.up_proj.weight"][NEURON] *= factor
    planted["layers.1.down_proj.weight"][:, NEURON] /= factor
    save(path, c, planted, byte_tokenizer())
    return path


@pytest.mark.parametrize("large", [False, True])
def test_an_activation_of_70000_is_named_by_its_layer(
    large: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if large:
        monkeypatch.setattr(prove, "WHOLE_MODEL_BYTES", 0)
    value = 140_000 if large else 70_000  # large models run other, shorter steps
    path = with_activation(tmp_path / "model.pt", value)
    assert main(["export", str(path), "-o", str(tmp_path / "b"), "--dtype", "fp16"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: layers.1.up_proj: its output is beyond float16")
    assert "export with --dtype fp32" in last
    assert list(tmp_path.iterdir()) == [path]


def test_pages_of_int8(tmp_path: Path) -> None:
    """Judged one layer at a time, with readers, biases and norms."""
    path = write_checkpoint(tmp_path / "model.pt", config(**MIXED))
    bundle = export(path, Options(tmp_path / "b", dtype="fp16"))
    outcome = bundle.manifest["parity"]["model.onnx"]["float16"]
    assert outcome["by_layer"]
    assert outcome["steps"] == bundle.config.num_layers
    assert outcome["tokens"] == bundle.manifest["parity"]["model.onnx"]["tokens"] > 100
    assert 0 < outcome["max_layer_difference_rounded"] <= 5e-2


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1, bias=False, dtype=torch.float16)
        nn.init.constant_(self.inner.weight, 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_padding_does_not_count() -> None:
    module = Doubled()
    x = torch.tensor([[[1.0], [40_000.0]]], dtype=torch.float16)
    with half.finite(module, "model.", torch.tensor([[True, False]]).numpy()):
        module(x)
    named = pytest.raises(GateFailed, match=r"model.inner: its output is beyond float16")
    with named, half.finite(module, "model.", torch.tensor([[True, True]]).numpy()):
        module(x)
    assert module(x)[0, 1].isinf()  # the hooks are gone


def test_an_error_beyond_the_limit_is_one_of_float16() -> None:
    outcome = parity.Outcome.of("fp16")
    half.require(outcome)
    outcome.max_logit_difference = 0.3
    with pytest.raises(GateFailed, match=r"in float16, a logit differs by 0.3 .*fp32"):
        half.require(outcome)
