"""The accuracy gate: its numbers against numpy, its decisions, its report."""

from __future__ import annotations

import html.parser
import shutil
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepool.bundle import Bundle
from edgepool.cli.main import main
from edgepool.errors import BadInput, GateFailed
from edgepool.quantize import gate
from edgepool.quantize.calibrate import Options as Calibration
from edgepool.quantize.calibrate import calibrate
from edgepool.quantize.compare import Comparison, LayerError
from edgepool.quantize.quantize import NAME, Options, quantize_bundle
from edgepool.quantize.rounding import rounded_weights
from edgepool.quantize.sensitivity import Sensitivity, sensitivities
from edgepool.quantize.source import Source, prepare

from .conftest import LOOSE, token_file


@pytest.fixture(scope="module")
def calibrated(sparse_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrated")
    bundle = Path(shutil.copytree(sparse_bundle, folder / "edgepool-bundle"))
    calibrate(bundle, Calibration([token_file(folder / "a.npz")], samples=3, length=100))
    return bundle


@pytest.fixture(scope="module")
def source(calibrated: Path) -> Source:
    return prepare(Bundle.open(calibrated), alpha=None, kv=True)


@pytest.fixture(scope="module")
def measured(source: Source, tmp_path_factory: pytest.TempPathFactory) -> list[Sensitivity]:
    return sensitivities(source, rounded_weights(source, tmp_path_factory.mktemp("rounded")))


# ------------------------------------------------------------------------------------ numbers


@given(st.integers(2, 12), st.integers(2, 9), st.integers(0, 2**32 - 1))
def test_numbers_are_those_of_torch(tokens: int, vocabulary: int, seed: int) -> None:
    import torch

    source = np.random.default_rng(seed)
    a, b = (source.standard_normal((tokens, vocabulary)).astype(np.float32) * 3 for _ in range(2))
    following = source.integers(0, vocabulary, tokens - 1)
    result = Comparison()
    result.add(a[: tokens // 2], b[: tokens // 2], following[: tokens // 2])
    result.add(a[tokens // 2 :], b[tokens // 2 :], following[tokens // 2 :])
    p, q = (torch.from_numpy(x).double().log_softmax(-1) for x in (a, b))
    target = torch.from_numpy(following)
    for mine, log in zip(result.perplexities, (p, q)):
        expected = torch.nn.functional.nll_loss(log[:-1], target).exp()
        assert mine == pytest.approx(float(expected), rel=1e-4)
    kl = torch.nn.functional.kl_div(q, p, log_target=True, reduction="batchmean")
    assert result.kl == pytest.approx(float(kl), rel=1e-3, abs=1e-5)
    same = (a.argmax(-1) == b.argmax(-1)).mean()
    assert result.agreement == pytest.approx(100 * float(same))
    ratio = result.perplexities[1] / result.perplexities[0]
    assert result.perplexity_increase == pytest.approx(100 * (ratio - 1), rel=1e-3, abs=1e-6)
    lost = (p[:-1] - q[:-1]).gather(1, target[:, None])
    error = float(lost.std(correction=0)) / len(target) ** 0.5
    assert result.perplexity_error == pytest.approx(100 * error, rel=1e-3, abs=1e-3)


@given(st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_layer_errors_add_up(parts: int, seed: int) -> None:
    source = np.random.default_rng(seed)
    pairs = source.standard_normal((parts, 2, 3, 4))
    error = LayerError()
    for a, b in pairs:
        error.add(a, b)
    a, b = pairs[:, 0].reshape(-1), pairs[:, 1].reshape(-1)
    assert error.relative == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a))
    cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    assert error.cosine == pytest.approx(cosine)


# ---------------------------------------------------------------------------------- decisions


def scripted(source: Source, needed: Collection[str]) -> tuple[gate.Judge, list[set[str]]]:
    """A judge that passes once every group of `needed` is float."""
    asked: list[set[str]] = []

    def judge(names: Collection[str]) -> Comparison:
        asked.append(set(names))
        bad = len(set(needed) - set(names))
        return Comparison(predicted=1, positions=100, candidate_nll=0.1 * bad, agreed=100 - bad)

    return judge, asked


@pytest.mark.parametrize("needed", [0, 1, 2, 3, 5, 7])
def test_auto_leaves_the_fewest_that_pass(
    source: Source, measured: list[Sensitivity], needed: int
) -> None:
    ranked = sorted(measured, key=lambda s: -s.inputs)
    worst = [s.group for s in ranked[:needed]]
    judge, asked = scripted(source, worst)
    verdict = gate.decide(source, (), True, gate.Limits(), measured, judge)
    assert list(verdict.float_inputs) == worst
    assert asked[-1] == set(worst)  # the graph that was written last
    assert len(verdict.curve) <= 2 + 2 * np.log2(len(source.groups))
    assert verdict.curve[0]["int8_multiply_adds"] == 1


def test_auto_gives_up_when_even_float_inputs_fail(
    source: Source, measured: list[Sensitivity]
) -> None:
    judge, asked = scripted(source, ["something else"])
    with pytest.raises(GateFailed, match=r"INT8 costs \+10\.52 % perplexity"):
        gate.decide(source, (), True, gate.Limits(), measured, judge)
    assert len(asked[-1]) == len(source.groups)


def test_sensitivity_is_what_int8_inputs_do_to_the_output(
    source: Source, measured: list[Sensitivity]
) -> None:
    assert [s.group for s in measured] == [group.name for group in source.groups]
    for s in measured:
        if s.group in source.halved():
            assert 0 < s.inputs < 1e-4
        else:
            assert 1e-4 < s.inputs < 0.2
        assert 1e-4 < s.weights < 0.1


def test_a_failure_names_the_layers_and_leaves_the_bundle(
    calibrated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (calibrated / "manifest.json").read_bytes()
    arguments = ["quantize", str(calibrated), "--max-perplexity", "-50"]
    assert main(arguments) == 1
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: INT8 costs")
    assert "most is lost in layers." in message
    assert (calibrated / "manifest.json").read_bytes() == before
    assert not (calibrated / NAME).exists()


# ------------------------------------------------------------------------------------- report


class Page(html.parser.HTMLParser):
    """Counts tags, and collects every attribute that could load something."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_report_is_in_the_bundle(calibrated: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(calibrated, tmp_path / "edgepool-bundle"))
    bundle = quantize_bundle(path, Options(limits=LOOSE, tokens=200))
    bundle.verify()
    report = gate.read_report(path)
    recorded = bundle.manifest["quantization"]
    assert report["gate"] == recorded["gate"]
    assert recorded["gate"]["tokens"] == 200
    groups = report["groups"]
    assert len(groups) == 4 * bundle.config.num_layers + 1
    assert {n for n, g in groups.items() if not g["int8_inputs"]} == set(recorded["float_inputs"])
    assert len(report["layers"]) == bundle.config.num_layers
    page = Page()
    page.feed((path / gate.PAGE).read_text())
    assert page.tags["svg"] == 3
    assert page.tags["rect"] == 2 * len(groups) + bundle.config.num_layers
    assert not page.links
    assert "script" not in page.tags


def test_a_text_of_the_users_can_judge(calibrated: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(calibrated, tmp_path / "edgepool-bundle"))
    text = tmp_path / "held-out.txt"
    text.write_text("Words that nobody calibrated on. " * 9)
    options = Options(limits=LOOSE, files=[text], tokens=64)
    assert quantize_bundle(path, options).manifest["quantization"]["gate"]["tokens"] == 64
    with pytest.raises(BadInput, match="none.txt: no such file"):
        quantize_bundle(path, Options(files=[tmp_path / "none.txt"]))
    with pytest.raises(BadInput, match="--tokens 1"):
        quantize_bundle(path, Options(tokens=1))
