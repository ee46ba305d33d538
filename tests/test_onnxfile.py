"""Reading ONNX files as protobuf, compared with the `onnx` package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from edgepool import onnxfile
from edgepool.errors import BadInput


def model() -> onnx.ModelProto:
    """A model with a large and a small initialiser, an If and a function."""
    value = helper.make_tensor_value_info
    inner = helper.make_graph(
        [helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.ones(3, "f4")))],
        "inner", [], [value("c", TensorProto.FLOAT, [3])],
    )  # fmt: skip
    nodes = [
        helper.make_node("MatMul", ["x", "large"], ["y"], name="product"),
        helper.make_node("If", ["flag"], ["z"], then_branch=inner, else_branch=inner),
        helper.make_node("Own", ["z"], ["out"], domain="own", power=3),
    ]
    weights = [
        numpy_helper.from_array(np.arange(600, dtype="f4").reshape(20, 30), "large"),
        numpy_helper.from_array(np.array([1, 2], "i8"), "small"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [value("x", TensorProto.FLOAT, ["n", 20]), value("flag", TensorProto.BOOL, [])],
        [value("out", TensorProto.FLOAT, [3])],
        weights,
    )
    function = helper.make_function(
        "own", "Own", ["a"], ["b"], [helper.make_node("Neg", ["a"], ["b"])],
        [helper.make_opsetid("", 20)], ["power"],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=9)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    onnx.save(model(), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def test_a_skeleton_is_the_model_with_its_weights_referenced(path: Path) -> None:
    bones = onnx.ModelProto.FromString(onnxfile.skeleton(str(path)))
    large, small = bones.graph.initializer
    assert large.data_location == TensorProto.EXTERNAL
    assert not large.raw_data
    assert small == model().graph.initializer[1]
    onnx.external_data_helper.load_external_data_for_model(bones, str(path.parent))
    np.testing.assert_array_equal(
        numpy_helper.to_array(bones.graph.initializer[0]),
        numpy_helper.to_array(model().graph.initializer[0]),
    )
    assert list(bones.graph.node) == list(model().graph.node)
    assert list(bones.functions) == list(model().functions)
    assert bones.opset_import == model().opset_import


def test_places_and_another_place(path: Path, tmp_path: Path) -> None:
    """The weights move to another file, in a folder below, and the model is the same."""
    (name, place), *others = onnxfile.places(str(path)).items()
    assert (name, others) == ("large", [])
    content = path.read_bytes()[place.offset : place.offset + place.length]
    assert content == numpy_helper.to_array(model().graph.initializer[0]).tobytes()
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "data").write_bytes(b"before" + content)
    moved = {name: onnxfile.Place("below/data", 6, len(content))}
    elsewhere = onnxfile.skeleton(str(path), elsewhere=moved)
    (tmp_path / "elsewhere.onnx").write_bytes(elsewhere)
    assert onnxfile.places(str(tmp_path / "elsewhere.onnx")) == moved
    again = onnx.load(tmp_path / "elsewhere.onnx")
    again.graph.initializer[0].ClearField("data_location")
    original = onnx.load(path)
    assert again.graph.initializer == original.graph.initializer
    assert again.graph.node == original.graph.node
    small = onnxfile.skeleton(str(path), elsewhere={"small": onnxfile.Place("below/data", 0, 16)})
    (tmp_path / "small.onnx").write_bytes(small)
    assert onnxfile.places(str(tmp_path / "small.onnx"))["small"].location == "below/data"


def test_summary(path: Path) -> None:
    summary = onnxfile.summary(str(path))
    assert summary.ir_version == 9
    assert summary.opsets == {"": 20, "own": 1}
    assert summary.inputs == ["x", "flag"]
    assert summary.outputs == ["out"]
    assert summary.operators == {"If": 1, "MatMul": 1, "own::Own": 1}
    assert summary.functions == ["Own"]
    assert summary.initializers == 2
    assert summary.external == []


def refer(tensor: TensorProto, location: str) -> None:
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    tensor.external_data.add(key="offset", value="0")


def test_external_locations_are_found_wherever_a_tensor_can_be(tmp_path: Path) -> None:
    m = model()
    refer(m.graph.initializer[0], "a")
    for branch, location in zip(m.graph.node[1].attribute, "bc"):
        refer(branch.g.node[0].attribute[0].t, location)
    constant = helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(np.ones(2)))
    refer(constant.attribute[0].t, "d")
    m.functions[0].node.append(constant)
    sparse = m.graph.sparse_initializer.add()
    refer(sparse.values, "e")
    refer(sparse.indices, "f")
    many = helper.make_node("Own", ["z"], ["w"], domain="own")
    many.attribute.append(onnx.AttributeProto(name="t", type=onnx.AttributeProto.TENSORS))
    refer(many.attribute[0].tensors.add(), "g")
    m.graph.node.append(many)
    path = tmp_path / "m.onnx"
    path.write_bytes(m.SerializeToString())
    assert onnxfile.external_locations(str(path)) == set("abcdefg")


SERIALISED = model().SerializeToString()


@settings(max_examples=300, deadline=None)
@given(
    end=st.integers(0, len(SERIALISED)),
    position=st.integers(0, len(SERIALISED) - 1),
    byte=st.integers(0, 255),
)
def test_damaged_files_are_refused_or_read_but_never_crash(
    tmp_path_factory: pytest.TempPathFactory, end: int, position: int, byte: int
) -> None:
    content = bytearray(SERIALISED)
    content[position] = byte
    path = tmp_path_factory.mktemp("damaged") / "m.onnx"
    path.write_bytes(content[:end])
    for read in (
        onnxfile.skeleton,
        onnxfile.summary,
        onnxfile.places,
        onnxfile.external_locations,
    ):
        try:
            read(str(path))
        except BadInput as error:
            assert "\n" not in str(error)


def test_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_text("once upon a time")
    with pytest.raises(BadInput, match="the file is empty"):
        onnxfile.skeleton(str(tmp_path / "empty"))
    with pytest.raises(BadInput, match="not an ONNX file"):
        onnxfile.skeleton(str(tmp_path / "text"))
    with pytest.raises(BadInput, match="no such file"):
        onnxfile.skeleton(str(tmp_path / "none"))
    with pytest.raises(BadInput, match="directory"):
        onnxfile.skeleton(str(tmp_path))


@given(st.integers(0, 2**63))
def test_varint(value: int) -> None:
    encoded = onnxfile.varint(value)
    assert onnxfile._read_varint(encoded, 0, len(encoded)) == (value, len(encoded))
