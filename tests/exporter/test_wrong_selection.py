"""A graph that selects the wrong blocks fails, though everything else in it is right."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest

from edgepool import bundle
from edgepool.checkpoint import load
from edgepool.cli.main import main
from edgepool.config import IndexConfig
from edgepool.errors import GateFailed
from edgepool.exporter.export import Options, export
from edgepool.exporter.prove import prove

from .models import config, write_checkpoint


def nodes(items: list[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """All nodes, those in branches too."""
    for node in items:
        yield node
        for attribute in node.attribute:
            yield from nodes(list(attribute.g.node))


def take_the_worst(path: Path) -> None:
    """Turn the order of the selection in a graph."""
    model = onnx.load(path)
    (select,) = (f for f in model.functions if f.name == "IndexPoolSelect")
    turned = 0
    for node in nodes(list(select.node)):
        if node.op_type == "TopK" and all(a.name != "largest" for a in node.attribute):
            node.attribute.append(onnx.helper.make_attribute("largest", 0))  # it is 1 by default
            turned += 1
    assert turned
    onnx.save(model, path)


def test_the_worst_blocks_in_place_of_the_best(
    sparse: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(sparse / "edgepool-bundle", folder)
    take_the_worst(folder / "model.onnx")
    bundle.write_manifest(folder, json.loads((folder / "manifest.json").read_text()))

    against = str(sparse / "model.pt")
    assert main(["verify", str(folder), "--against", against, "--json"]) == 1
    out, err = capsys.readouterr()
    assert not json.loads(out)["passed"]
    assert "selected blocks differ" in err


def test_the_worst_blocks_in_a_variant(tmp_path: Path) -> None:
    """A budget beyond the first steps of the schedule: variants are judged where it is spent."""
    c = config(layer_types=("sparse",), index=IndexConfig(top_k=448), max_context=1024)
    path = write_checkpoint(tmp_path / "model.pt", c)
    made = export(path, Options(tmp_path / "b", ("rtx-4090",)))
    for outcome in made.manifest["parity"].values():
        assert outcome["choices"] > 100
    variants = made.manifest["variants"]
    prove(made.path, load(path), c, variants, "fp32", lambda *_: None)
    take_the_worst(made.variant_path("rtx-4090"))
    with pytest.raises(GateFailed, match=r"rtx-4090/model.onnx: .* selected blocks differ"):
        prove(made.path, load(path), c, variants, "fp32", lambda *_: None)
