"""Token sequences from files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepool.errors import BadInput
from edgepool.quantize import data
from tests.exporter.models import FULL, config

CONFIG = config(**FULL)


def encode(text: str) -> list[int]:
    return list(text.encode())


@given(st.integers(1, 200), st.integers(1, 600))
def test_one_sequence_in_sixteen_is_long(count: int, length: int) -> None:
    sizes = data.lengths(count, length, CONFIG.max_context)
    short = min(length, CONFIG.max_context)
    assert len(sizes) == count
    assert sizes[0] == short or count > 1
    long = [size for size in sizes if size > short]
    if count > 1 and short * 4 <= CONFIG.max_context:
        assert len(long) == max(1, count // 16)
        assert set(long) == {4 * short}
    assert max(sizes) <= CONFIG.max_context


@given(st.integers(20, 4000), st.integers(1, 20), st.integers(1, 20), st.integers(1, 3))
def test_calibration_never_sees_what_is_held_out(
    tmp_path_factory: pytest.TempPathFactory, tokens: int, count: int, length: int, files: int
) -> None:
    folder = tmp_path_factory.mktemp("data")
    wide = config(**FULL, vocab_size=12_000)
    parts = np.arange(tokens * files).reshape(files, tokens)  # every token is there once
    paths = [folder / f"{i}.npz" for i in range(files)]
    for path, part in zip(paths, parts):
        np.savez(path, input_ids=part)
    found = data.from_files(paths, None, wide, count, length)
    seen = np.concatenate(found.sequences)
    assert len(np.unique(seen)) == len(seen)
    assert len(found.held_out) > 0
    assert len(np.intersect1d(seen, found.held_out)) == 0
    assert found.source["tokens"] == len(seen)
    assert set(seen) | set(found.held_out) <= set(parts.reshape(-1))


@pytest.mark.parametrize("sizes", [[100], [20_000], [1024] * 76, [512] * 15 + [4096], [3000, 9000]])
def test_a_sample_is_from_all_over_the_data(sizes: list[int]) -> None:
    starts = np.cumsum([0, *sizes])
    sequences = [np.arange(a, b, dtype=np.int32) for a, b in zip(starts, starts[1:])]
    sample = data.Data(sequences, np.zeros(0, np.int32), {}).sample()
    assert sample and sum(map(len, sample)) <= data.SAMPLE
    assert set(np.concatenate(sample)) <= set(range(starts[-1]))
    if len(sample) > 1:
        assert sample[0][0] == 0
        assert sample[-1][-1] > 0.6 * starts[-1]


def test_text_is_read_in_blocks_that_end_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "BLOCK", 100)
    text = "".join(f"line {i} of a text: \u00e9\u4e2d\n" for i in range(60))
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8")
    blocks = list(data._blocks(path))
    assert "".join(blocks) == text
    assert len(blocks) > 5
    assert all(block.endswith("\n") for block in blocks)


def test_json_lines_give_their_texts(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "ab" * 30, "other": 1}), "", json.dumps("cd" * 30)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    found = data.from_files([path], encode, CONFIG, 1, 60)
    assert bytes(found.sequences[0].tolist()) == b"ab" * 30


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "it holds no tokens"),
        ("a.txt", b"short", "5 tokens, and one sample is 16"),
        ("a.txt", "caf\u00e9 ".encode("latin-1") * 9, "not UTF-8"),
        ("a.txt", ("word " * 9).encode("utf-16"), "not UTF-8"),
        ("a.jsonl", b'{"text": "abc"}\n{"text"\n', "line 2 is not JSON"),
        ("a.jsonl", b'{"text": "abc"}\n{"txt": "d"}\n', "line 2 has no string under the key"),
        ("a.npz", b"no archive", "not an npz file"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadInput, match=message) as caught:
        data.from_files([path], encode, CONFIG, 2, 16)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"input_ids": np.full(99, 272)}, "token 272 is not in the vocabulary of 272"),
        ({"input_ids": np.full(99, -1)}, "token -1 is not in the vocabulary"),
        ({"input_ids": np.zeros(99)}, "not rows of token ids"),
        ({"a": np.zeros(9, int), "b": np.zeros(9, int)}, "no array 'input_ids'"),
    ],
)
def test_arrays_that_are_no_token_ids_are_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray], message: str
) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(BadInput, match=message):
        data.from_files([tmp_path / "a.npz"], None, CONFIG, 2, 16)


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text")
    with pytest.raises(BadInput, match="has no tokenizer: give token ids as .npz"):
        data.from_files([path], None, CONFIG, 2, 16)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="none.txt: no such file"):
        data.from_files([tmp_path / "none.txt"], encode, CONFIG, 2, 16)


def test_a_model_draws_fairly_from_its_likeliest_tokens() -> None:
    share = np.array([0.02, 0.5, 0.03, 0.3, 0.15])
    logits = np.tile(np.log(share), (4000, 1)).astype(np.float32)
    drawn = data._drawn(logits, np.random.default_rng(3))
    counts = np.bincount(drawn, minlength=5) / len(drawn)
    kept = np.where(share > 0.1, share, 0)  # 0.5 and 0.3 are not yet 0.9
    np.testing.assert_allclose(counts, kept / kept.sum(), atol=0.03)
