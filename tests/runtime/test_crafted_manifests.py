"""Whatever a manifest says, commands answer or refuse: never another exception."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepool.bundle import Bundle, manifest_digest, write_manifest
from edgepool.cli.main import main
from edgepool.errors import EdgepoolError

from .test_source import CONFIG, write_bundle
from .tiny_graph import write_tiny_graph

VARIANT = {"model": "variants/l4/model.onnx", "opset": 20, "ir_version": 9, "functions": "auto"}
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 0, 1, 2, 8, 1 << 31, 1 << 64, 10**300])
    | st.floats()
    | st.text(max_size=9)
    | st.sampled_from(["", ".", "..", "model.onnx", "tokenizer.json", "a\0b", "\ud800", "x" * 300])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("crafted")
    path = write_bundle(
        folder / "bundle", variants={"l4": VARIANT}, parity={"m": {"max_logit_difference": 0.0}}
    )
    (path / "variants" / "l4").mkdir(parents=True)
    write_tiny_graph(CONFIG, path / "variants" / "l4" / "model.onnx")
    (path / "reference.json").write_text("{}")
    manifest = json.loads((path / "manifest.json").read_text())
    write_manifest(path, {**manifest, "reference": "reference.json"})
    (folder / "original.json").write_bytes((path / "manifest.json").read_bytes())
    return path


def places(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside `value`, at any depth."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, inner in items:
        found.append((*prefix, key))
        if isinstance(inner, (dict, list)):
            found += places(inner, (*prefix, key))
    return found


def changed(manifest: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """The manifest with one value put at `place`, and a digest that says so."""
    result = copy.deepcopy(manifest)
    inner = result
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    if place != ("digest",):
        result["digest"] = manifest_digest(result)
    return result


def use(path: Path) -> None:
    opened = Bundle.open(path)
    opened.verify()
    opened.reference()
    for target in opened.manifest["variants"]:
        opened.variant_path(target)


@given(data=st.data())
def test_a_changed_value(bundle: Path, data: st.DataObject) -> None:
    original = json.loads((bundle.parent / "original.json").read_text())
    place = data.draw(st.sampled_from(places(original)))
    check(bundle, changed(original, place, data.draw(VALUES)))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("parity",), None),
        (("dtype",), 5),
        (("dtype",), []),
        (("variants",), {"x": 1}),
        (("reference",), {}),
        (("config", "index"), {}),
        (("config", "vocab_size"), (1 << 31) - 1),
        (("config", "page_size"), (1 << 31) - 1),
        (("config", "num_layers"), 4096),
        (("edgepool",), "\ud800"),
    ],
)
def test_values_that_were_found(bundle: Path, place: tuple[str, ...], value: object) -> None:
    original = json.loads((bundle.parent / "original.json").read_text())
    check(bundle, changed(original, place, value))


def test_defaults_may_be_left_out(bundle: Path) -> None:
    original = json.loads((bundle.parent / "original.json").read_text())
    config = {k: v for k, v in original["config"].items() if k not in ("index", "chat_template")}
    config = {k: v for k, v in config.items() if not k.endswith(("layers", "types", "donor"))}
    config["num_layers"] = 1
    check(bundle, changed(original, ("config",), config))
    assert main(["inspect", str(bundle)]) == 0


def check(bundle: Path, manifest: dict[str, Any]) -> None:
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    try:
        use(bundle)
    except EdgepoolError as error:
        assert "\n" not in str(error)
    assert main(["inspect", str(bundle)]) in (0, 2)
    assert main(["inspect", str(bundle), "--json"]) in (0, 2)
    assert main(["run", str(bundle), "--prompt", "abc", "--max-new-tokens", "2"]) in (0, 2)
