"""A model that was never quantised: random FP32 weights, outliers planted in activations."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

import pytest
import torch

from edgepool.bundle import Bundle
from edgepool.checkpoint import byte_tokenizer, save
from edgepool.config import IndexConfig
from edgepool.exporter.export import Options as Export
from edgepool.exporter.export import export
from edgepool.quantize.calibrate import Options as Calibration
from edgepool.quantize.calibrate import calibrate
from edgepool.quantize.gate import Limits
from edgepool.quantize.quantize import Options, quantize_bundle
from edgepool.quantize.rotation import Basis
from edgepool.quantize.smooth import Smoothing
from edgepool.quantize.source import Source
from tests.exporter.models import config, weights

WITNESS = dict(
    hidden_size=96,
    intermediate_size=192,
    num_heads=6,
    layer_types=("sparse",) * 3,
    index=IndexConfig(top_k=32),
)
LARGER, SMALLER = 60.0, 1 / 30  # a planted channel, and the weights that read it
DATA = Calibration(samples=8, length=384)
ANYTHING = Limits(perplexity=1e9, agreement=0)


def with_outliers(plain: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    """Two outlier channels in the input of every linear layer; those that read them are small."""
    w = {name: x.clone() for name, x in plain.items()}
    for i in range(layers):
        for norm, readers in (
            ("attn_norm", ("q_proj", "k_proj", "v_proj")),
            ("mlp_norm", ("gate_proj", "up_proj")),
        ):
            w[f"layers.{i}.{norm}.weight"][[5, 17]] *= LARGER
            for reader in readers:
                w[f"layers.{i}.{reader}.weight"][:, [5, 17]] *= SMALLER
        w[f"layers.{i}.up_proj.weight"][[9, 40]] *= LARGER
        w[f"layers.{i}.down_proj.weight"][:, [9, 40]] *= SMALLER
    return w


@pytest.fixture(scope="module")
def witness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibrated on text of its own, which it predicts as well as anything can."""
    folder = tmp_path_factory.mktemp("witness")
    c = config(**WITNESS)
    save(
        folder / "model.pt",
        c,
        with_outliers(weights(c, scale=3.0), c.num_layers),
        byte_tokenizer(),
    )
    bundle = export(folder / "model.pt", Export(folder / "edgepool-bundle", ()))
    calibrate(bundle.path, DATA)
    return bundle.path


def gate_of(witness: Path, folder: Path, limits: Limits, again: bool = False) -> dict:
    path = Path(shutil.copytree(witness, folder / "edgepool-bundle"))
    if again:
        calibrate(path, DATA)
    return dict(quantize_bundle(path, Options(limits=limits)).manifest["quantization"])


def test_the_default_passes_the_default_gate(witness: Path, tmp_path: Path) -> None:
    made = gate_of(witness, tmp_path, Limits())
    assert made["int8_multiply_adds"] == 1
    assert made["kv_dtype"] == "int8"
    assert made["gate"]["perplexity_fp32"] < 0.8 * Bundle.open(witness).config.vocab_size


@pytest.mark.parametrize(
    ("without", "worse"), [("halves", 1.4), ("smoothing", 1.5), ("rotation", 1.2)]
)
def test_it_needs_what_is_done_about_outliers(
    witness: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str, worse: float
) -> None:
    kl = gate_of(witness, tmp_path / "with", ANYTHING)["gate"]["kl"]

    def halved(self: Source, float_inputs: Collection[str] = ()) -> tuple[str, ...]:
        return ()

    if without == "halves":
        monkeypatch.setattr(Source, "halved", halved)
    elif without == "rotation":
        monkeypatch.setattr(Basis, "turned", lambda self, x: x.astype("float32"))
        monkeypatch.setattr(Basis, "back", Basis.turned)
    else:
        monkeypatch.setattr("edgepool.quantize.source.smoothing", lambda *_: Smoothing())
    made = gate_of(witness, tmp_path / "without", ANYTHING, again=without == "rotation")
    assert made["gate"]["kl"] > worse * kl
