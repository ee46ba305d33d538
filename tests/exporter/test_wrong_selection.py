"""A graph that selects the wrong blocks fails, though everything else in it is right."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest

from edgepool import bundle
from edgepool.cli.main import main


def nodes(items: list[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """All nodes, those in branches too."""
    for node in items:
        yield node
        for attribute in node.attribute:
            yield from nodes(list(attribute.g.node))


def test_the_worst_blocks_in_place_of_the_best(
    sparse: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(sparse / "edgepool-bundle", folder)
    model = onnx.load(folder / "model.onnx")
    (select,) = (f for f in model.functions if f.name == "IndexPoolSelect")
    turned = 0
    for node in nodes(list(select.node)):
        if node.op_type == "TopK" and all(a.name != "largest" for a in node.attribute):
            node.attribute.append(onnx.helper.make_attribute("largest", 0))  # it is 1 by default
            turned += 1
    assert turned
    onnx.save(model, folder / "model.onnx")
    bundle.write_manifest(folder, json.loads((folder / "manifest.json").read_text()))

    against = str(sparse / "model.pt")
    assert main(["verify", str(folder), "--against", against, "--json"]) == 1
    out, err = capsys.readouterr()
    assert not json.loads(out)["passed"]
    assert "selected blocks differ" in err
