"""`edgepool verify` and `edgepool inspect`."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from edgepool import bundle
from edgepool.checkpoint import load, save
from edgepool.cli.main import main
from edgepool.exporter import prove, verify
from edgepool.inspection import cache_cost

from .models import MIXED, config, weights


def run(*arguments: object) -> int:
    return main([str(x) for x in arguments])


@pytest.mark.parametrize("large", [False, True])
def test_a_good_bundle(
    large: bool,
    mixed: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if large:
        monkeypatch.setattr(prove, "WHOLE_MODEL_BYTES", 0)
    folder = mixed / "edgepool-bundle"
    assert run("verify", folder, "--against", mixed / "model.pt", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["passed"]
    assert record["same_source"]
    names = [d["name"] for d in record["differences"]]
    assert names[:7] == ["logits", *(f"hidden.{i}" for i in range(6))]
    assert {"k_pool.0_out", "index_pool.2_out", "v_scale.5_out"} <= set(names)
    assert all(d["largest"] <= d["limit"] for d in record["differences"])


def test_a_changed_weight_is_named_by_its_layer(
    mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint's layer 3 differs; a model with INT8 pages is judged one layer at a time."""
    c = config(**MIXED)
    changed = weights(c)
    changed["layers.3.o_proj.weight"] *= 1.1
    save(tmp_path / "other.pt", c, changed, load(mixed / "model.pt").tokenizer)
    folder = mixed / "edgepool-bundle"
    assert run("verify", folder, "--against", tmp_path / "other.pt", "--json") == 1
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert not record["same_source"]
    passed = {d["name"]: d["passed"] for d in record["differences"]}
    assert [passed[f"hidden.{i}"] for i in range(6)] == [True] * 3 + [False] + [True] * 2
    assert err.splitlines()[-1].startswith("error: ")


def test_a_flipped_byte_is_found_before_anything_runs(
    mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "b"
    shutil.copytree(mixed / "edgepool-bundle", folder)
    content = bytearray((folder / "model.onnx").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "model.onnx").write_bytes(content)
    assert run("verify", folder, "--against", mixed / "model.pt") == 2
    assert "model.onnx: its sha256 is not the one" in capsys.readouterr().err


def test_another_model(mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    c = dataclasses.replace(config(**MIXED), rope_theta=5e4)
    save(tmp_path / "other.pt", c, weights(c), None)
    folder = mixed / "edgepool-bundle"
    assert run("verify", folder, "--against", tmp_path / "other.pt") == 2
    assert "its configuration is not that of" in capsys.readouterr().err


def test_nan_does_not_pass_the_comparator() -> None:
    good = {"logits": np.zeros(4, np.float32), "hidden.0": np.ones(4, np.float32)}
    bad = {**good, "hidden.0": np.array([1, np.nan, 1, 1], np.float32)}
    assert all(d.passed for d in verify.compare_outputs(good, good, "fp32"))
    assert [d.passed for d in verify.compare_outputs(bad, good, "fp32")] == [True, False]
    assert [d.passed for d in verify.compare_outputs(good, bad, "fp32")] == [True, False]


# ------------------------------------------------------------------------------------ inspect


def test_inspecting_a_bundle(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = mixed / "edgepool-bundle"
    assert run("inspect", folder, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    manifest = bundle.read_manifest(folder)
    assert record["files"] == manifest["files"]
    assert record["config"] == manifest["config"]
    graph = record["graphs"]["variants/jetson-agx-xavier/model.onnx"]
    assert graph["opsets"] == {"": 17, "edgepool": 1}
    assert graph["operators"]["edgepool::SharedKVAttention"] == 5
    loaded = onnx.load(folder / "model.onnx").graph
    assert sum(record["graphs"]["model.onnx"]["operators"].values()) == len(loaded.node)
    assert run("inspect", folder) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert any(line.startswith("selection") for line in lines)


def test_inspecting_files(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", mixed / "model.pt", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["kind"] == "model.pt"
    assert record["parameters"] == sum(x.numel() for x in load(mixed / "model.pt").weights.values())
    assert run("inspect", mixed / "model.pt") == 0
    assert run("inspect", mixed / "edgepool-bundle" / "model.onnx") == 0
    assert "hidden" not in capsys.readouterr().err
    assert run("inspect", mixed / "none") == 2
    assert "no such file or folder" in capsys.readouterr().err


def test_cache_bytes_are_those_of_the_state() -> None:
    """Counted by hand for one layer of SmolLM2's shape, and by the tensors for a mixed model."""
    c = config(
        layer_types=("sparse",), num_heads=9, num_kv_heads=3, head_dim=64, max_context=1 << 20
    )
    cost = cache_cost(c, "fp16", 1 << 16)
    tokens = (1 << 16) + 16  # the null page is part of it
    assert cost.kv == 2 * tokens * 3 * 64 * 2
    assert cost.index == tokens // 4 * 3 * 64 * 2 + 4 * 2 * 3 * 64 * 2
    assert cost.dense_fp16 == 2 * (1 << 16) * 3 * 64 * 2
    assert cost.attended == c.attended_tokens(0, 1 << 16)
    from edgepool.model import new_state

    c = config(**MIXED)
    cost = cache_cost(c, "fp32", 100)
    state = new_state(c, 1, cost.pages)
    assert cost.total == sum(x.numel() * x.element_size() for x in state)
