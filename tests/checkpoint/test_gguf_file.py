"""The GGUF header reader, against gguf's own reader and against damaged files."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepool.checkpoint.gguf_file import GGUFFile
from edgepool.errors import BadInput

from .models import hf_model, write_gguf


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    extra = {
        "a.bool": True,
        "a.text": "Ł 漢字",
        "a.negative": [-1, 2],
        "a.floats": [0.5, 1e-5],
        "a.flags": [True, False],
    }
    return write_gguf(hf_model("llama"), path, gguf.GGMLQuantizationType.Q8_0, metadata=extra)


def same_as_gguf_reader(path: Path) -> None:
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == fields
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert found.shape == tuple(reversed(tensor.shape.tolist()))
        assert found.kind == tensor.tensor_type
        rows = int(np.prod(found.shape[:-1]))
        stored = tensor.data.reshape(rows, -1).view(np.uint8)
        assert np.array_equal(ours.rows(found, 0, rows), stored)
        assert np.array_equal(ours.rows(found, rows - 1, 1), stored[-1:])


def test_same_as_gguf_reader(file: Path) -> None:
    same_as_gguf_reader(file)


@pytest.mark.slow
def test_same_as_gguf_reader_for_a_real_model(smollm2_gguf: Path) -> None:
    same_as_gguf_reader(smollm2_gguf)


def changed(file: Path, tmp_path: Path, position: int, value: bytes) -> Path:
    data = bytearray(file.read_bytes())
    data[position : position + len(value)] = value
    (tmp_path / "changed.gguf").write_bytes(data)
    return tmp_path / "changed.gguf"


@pytest.mark.parametrize(
    ("position", "value", "expected"),
    [
        (0, b"GGUX", "not a GGUF file"),
        (4, struct.pack("<I", 1), "version 1"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 1 << 60), "dimensions"),  # tensors
        (16, struct.pack("<Q", 1 << 60), "truncated"),  # keys
        (24, struct.pack("<Q", 1 << 60), "truncated"),  # length of the first key
    ],
)
def test_faults_are_named(
    file: Path, tmp_path: Path, position: int, value: bytes, expected: str
) -> None:
    path = changed(file, tmp_path, position, value)
    with pytest.raises(BadInput, match=expected) as caught:
        GGUFFile(path)
    assert str(path) in str(caught.value)


def test_array_longer_than_the_file_is_refused_at_once(file: Path, tmp_path: Path) -> None:
    """A reader that believes the length would collect 2^60 empty numbers."""
    data = file.read_bytes()
    key = b"tokenizer.ggml.token_type"
    length = data.index(key) + len(key) + 8
    with pytest.raises(BadInput, match="truncated, or damaged"):
        GGUFFile(changed(file, tmp_path, length, struct.pack("<Q", 1 << 60)))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_every_truncation_is_refused(
    file: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = file.read_bytes()
    path = tmp_path_factory.mktemp("cut") / "model.gguf"
    path.write_bytes(whole[: data.draw(st.integers(1, len(whole) - 64))])
    with pytest.raises(BadInput):
        GGUFFile(path)
