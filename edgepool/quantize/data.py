"""Token sequences to calibrate on and to judge by: from text, JSON lines or npz, or the model."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..config import ModelConfig
from ..errors import BadInput
from ..progress import Report
from .runner import CHUNK, Stepper

SAMPLES, LENGTH = 64, 1024  # sequences, tokens of each
LONG_EVERY, LONG_TIMES = 16, 4  # one sequence in so many is so much longer
SAMPLE = 8192  # most tokens of a sample of the sequences
HELD_OUT = 4096  # most tokens kept back for the gate
OWN_SAMPLES, OWN_LENGTH = 8, 256  # what a model writes itself, token by token
OWN_HELD_OUT = 4  # such sequences that are kept back for the gate
NUCLEUS = 0.9  # of the probability: the tokens that a model draws from
BLOCK = 1 << 20  # characters of text that are tokenised at once

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Data:
    """Sequences for calibration, one more that calibration never sees, and where they are from.

    source is what `calibration.json` records about them.
    """

    sequences: list[np.ndarray]
    held_out: np.ndarray
    source: dict[str, Any]

    def sample(self) -> list[np.ndarray]:
        """Sequences from all over the data, SAMPLE tokens of them at most, but one at least."""
        step = -(-sum(map(len, self.sequences)) // SAMPLE)
        chosen = self.sequences[::step]
        while sum(map(len, chosen)) > SAMPLE and len(chosen) > 1:
            chosen = chosen[:-1]
        return [ids[:SAMPLE] for ids in chosen]


def lengths(count: int, length: int, longest: int) -> list[int]:
    """Tokens of each of `count` sequences: one in LONG_EVERY, and at least one, is long."""
    length = min(length, longest)
    long = min(LONG_TIMES * length, longest)
    at = [i % LONG_EVERY == LONG_EVERY - 1 for i in range(count)]
    if count > 1 and not any(at):
        at[-1] = True
    return [long if is_long else length for is_long in at]


def from_files(
    files: Sequence[Path], encode: Encode | None, config: ModelConfig, count: int, length: int
) -> Data:
    """Sequences from the beginning of each file; what follows them is held out.

    encode is the tokenizer, None where the bundle has none. Raises BadInput for a file that cannot
    be read or holds no tokens of the model, and when all of them are shorter than one sequence.
    """
    wanted = lengths(count, length, config.max_context)
    held = min(HELD_OUT, config.max_context)
    quota = -(-(sum(wanted) + held) // len(files))
    kinds = {kind_of(file) for file in files}
    parts = [read_tokens(file, encode, config, quota) for file in files]
    tokens = np.concatenate(parts)
    if len(tokens) < wanted[0]:
        raise BadInput(
            f"{', '.join(str(f) for f in files)}: {len(tokens)} tokens, and one sample is "
            f"{wanted[0]}: give more data, or choose a smaller --length"
        )
    kept = len(tokens) - min(held, max(len(tokens) - sum(wanted), len(tokens) // 5))
    sequences, begin = [], 0
    for size in wanted:
        sequence = tokens[begin : min(begin + size, kept)]
        if len(sequence) < min(wanted[0], kept):
            break
        sequences.append(sequence)
        begin += size
    source = {
        "kind": "+".join(sorted(kinds)),
        "files": [file.name for file in files],
        **_counted(sequences, tokens),
    }
    return Data(sequences, tokens[kept:], source)


def _counted(sequences: Sequence[np.ndarray], tokens: np.ndarray) -> dict[str, Any]:
    return {
        "samples": len(sequences),
        "tokens": sum(map(len, sequences)),
        "longest": max(map(len, sequences)),
        "digest": hashlib.sha256(tokens.astype("<i4").tobytes()).hexdigest(),
    }


# ------------------------------------------------------------------------------------- files


def kind_of(file: Path) -> str:
    """npz, jsonl or text, by the file's name."""
    return {".npz": "npz", ".jsonl": "jsonl", ".ndjson": "jsonl"}.get(file.suffix, "text")


def read_tokens(file: Path, encode: Encode | None, config: ModelConfig, most: int) -> np.ndarray:
    """At most so many tokens from the beginning of a file, [n] int32."""
    kind = kind_of(file)
    if kind != "npz" and encode is None:
        raise BadInput(f"{file}: the bundle has no tokenizer: give token ids as .npz")
    parts: list[np.ndarray] = []
    found = 0
    try:
        pieces = _npz(file) if kind == "npz" else _encoded(file, kind, encode)
        for piece in pieces:
            parts.append(_checked(piece, file, config))
            found += len(piece)
            if found >= most:
                break
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{file}: not UTF-8 ({error.reason}): convert it first, for example with iconv"
        ) from error
    except OSError as error:
        raise BadInput(f"{file}: {(error.strerror or str(error)).lower()}") from error
    if not found:
        raise BadInput(f"{file}: it holds no tokens: give a file with text or token ids in it")
    return np.concatenate(parts)[:most].astype(np.int32)


def _encoded(file: Path, kind: str, encode: Encode | None) -> Iterator[np.ndarray]:
    assert encode is not None
    for text in _json_lines(file) if kind == "jsonl" else _blocks(file):
        yield np.asarray(encode(text), np.int64)


def _blocks(file: Path) -> Iterator[str]:
    """A text in blocks that end where a line does."""
    with file.open(encoding="utf-8-sig") as stream:
        while block := stream.read(BLOCK):
            yield block + stream.readline()


def _json_lines(file: Path) -> Iterator[str]:
    """The texts of a file with one JSON object a line, under the key `text`."""
    with file.open(encoding="utf-8-sig") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise BadInput(f"{file}: line {number} is not JSON") from error
            text = record.get("text") if isinstance(record, dict) else record
            if not isinstance(text, str):
                raise BadInput(f"{file}: line {number} has no string under the key 'text'")
            yield text


def _npz(file: Path) -> Iterator[np.ndarray]:
    """The rows of the array `input_ids`, or of the only array there is."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            names = list(arrays)
            name = "input_ids" if "input_ids" in names else names[0] if len(names) == 1 else None
            if name is None:
                raise BadInput(f"{file}: no array 'input_ids' in it (it has {', '.join(names)})")
            ids = arrays[name]
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise BadInput(f"{file}: not an npz file that can be read: {error}") from error
    if ids.dtype.kind not in "iu" or ids.ndim not in (1, 2):
        raise BadInput(f"{file}: '{name}' is {ids.dtype} {ids.shape}, not rows of token ids")
    yield from np.atleast_2d(ids)


def _checked(ids: np.ndarray, file: Path, config: ModelConfig) -> np.ndarray:
    outside = (ids < 0) | (ids >= config.vocab_size)
    if outside.any():
        raise BadInput(
            f"{file}: token {ids[outside][0]} is not in the vocabulary of {config.vocab_size}: "
            "was it tokenised for another model?"
        )
    return ids


# --------------------------------------------------------------------------- the model's own


def from_model(session: Any, config: ModelConfig, count: int, length: int, report: Report) -> Data:
    """Sequences that the model writes from its beginning-of-text token, drawn by `_drawn`.

    Without that token they begin with random ones. The first goes on to be the long one, the last
    OWN_HELD_OUT are held out, one after the other.
    """
    wanted = lengths(count, length, config.max_context)
    short, long = min(wanted), max(wanted)
    random = np.random.default_rng(0)
    batch = count + OWN_HELD_OUT
    begin = config.bos_token_id
    first = random.integers(0, config.vocab_size, batch) if begin is None else [begin] * batch
    ids = _written(Stepper(session, config, batch, short), np.array(first), short, random, report)
    rows = list(ids)
    if long > short:
        stepper = Stepper(session, config, 1, long)
        for start in range(0, short - 1, CHUNK):
            part = rows[0][None, start : min(start + CHUNK, short - 1)]
            stepper.step(part, [part.shape[1] - 1])
        more = _written(stepper, rows[0][-1:], long - short + 1, random, report)
        rows[0] = np.concatenate([rows[0], more[0, 1:]])
    source = {
        "kind": "sampled from the model",
        "files": [],
        **_counted(rows[:count], np.concatenate(rows)),
    }
    return Data(rows[:count], np.concatenate(rows[count:])[: config.max_context], source)


def _written(
    stepper: Stepper, first: np.ndarray, length: int, random: np.random.Generator, report: Report
) -> np.ndarray:
    """[B,length] tokens, `first` among them."""
    ids = np.zeros((len(first), length), np.int32)
    ids[:, 0] = first
    for i in range(1, length):
        logits = stepper.step(ids[:, i - 1 : i], [0])["logits"][:, 0]
        ids[:, i] = _drawn(logits, random)
        report("sampling from the model", i + 1, length)
    return ids


def _drawn(logits: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """One token [B] of each row [B,vocab], drawn from the likeliest that make up NUCLEUS.

    The tail of a small model leads to text that nobody would write: SmolLM2's own has a perplexity
    of 186 with it and of 13 without (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751).
    """
    order = np.argsort(-logits, axis=-1)
    ranked = np.take_along_axis(logits, order, -1).astype(np.float64)
    share = np.exp(ranked - ranked[:, :1])
    share /= share.sum(-1, keepdims=True)
    before = np.cumsum(share, -1) - share
    noise = random.gumbel(size=ranked.shape)  # the largest of logits + noise is a fair draw
    best = np.argmax(np.where(before < NUCLEUS, ranked + noise, -np.inf), axis=-1)
    return np.take_along_axis(order, best[:, None], -1)[:, 0]
