"""calibration.json: what calibration saw, for every later stage to scale by.

    {"format": "edgepool-calibration", "version": 3, "edgepool": "...", "method": "minmax",
     "model": "sha256 of the weights and graph that were run",
     "data": {"kind", "files", "samples", "tokens", "longest", "digest"},
     "sample": [[token ids of some of its sequences], ...],
     "held_out": [token ids that calibration did not see],
     "tensors": {"layers.0.q_proj": {"lowest": x, "highest": x, "threshold": x,
                                     "channels": [largest |value| of each channel],
                                     "mean_squares": [of each channel]}, ...}}

A tensor is named after the first linear layer that reads it. Its channels are those of the rotated
model (`rotation`). `threshold` is what the method makes of the values after SmoothQuant; null for
minmax, where the channels say it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__
from ..bundle import Bundle
from ..errors import BadInput

NAME = "calibration.json"
FORMAT, VERSION = "edgepool-calibration", 3
METHODS = ("minmax", "entropy", "percentile")


@dataclass(frozen=True)
class Tensor:
    """Ranges of one activation; channels, mean_squares [C] float32, threshold None for minmax."""

    lowest: float
    highest: float
    channels: np.ndarray
    mean_squares: np.ndarray
    threshold: float | None = None


@dataclass(frozen=True)
class Calibration:
    """A parsed calibration.json; digest is its own sha256.

    sample: some of the sequences that were measured, for what is decided by more than ranges.
    """

    model: str
    method: str
    data: dict[str, Any]
    sample: list[np.ndarray]
    held_out: np.ndarray
    tensors: dict[str, Tensor]
    digest: str = field(default="", compare=False)

    def to_json(self) -> str:
        tensors = {
            name: {
                "lowest": _short(tensor.lowest),
                "highest": _short(tensor.highest),
                "threshold": None if tensor.threshold is None else _short(tensor.threshold),
                "channels": [_short(x) for x in tensor.channels],
                "mean_squares": [_short(x) for x in tensor.mean_squares],
            }
            for name, tensor in self.tensors.items()
        }
        record = {
            "format": FORMAT,
            "version": VERSION,
            "edgepool": __version__,
            "model": self.model,
            "method": self.method,
            "data": self.data,
            "sample": [ids.tolist() for ids in self.sample],
            "held_out": self.held_out.tolist(),
            "tensors": tensors,
        }
        return json.dumps(record, separators=(",", ":"), ensure_ascii=False) + "\n"


def _short(value: float) -> float:
    """Seven digits: they give the same float32 in nearly all cases, and read well."""
    return float(f"{float(value):.7g}")


def model_digest(bundle: Bundle) -> str:
    """What a calibration belongs to: the sha256 of model.onnx and of its external data."""
    files = bundle.manifest["files"]
    used = {name: files[name]["sha256"] for name in files if name.startswith("model.onnx")}
    return hashlib.sha256(json.dumps(used, sort_keys=True).encode()).hexdigest()


def read(path: Path, bundle: Bundle) -> Calibration:
    """Read a calibration of the bundle's model; raises BadInput for any other file."""
    try:
        text = path.read_text(encoding="utf-8")
        record = json.loads(text)
        if record["format"] != FORMAT or record["version"] != VERSION:
            raise BadInput(
                f"{path}: version {record['version']!r} of a calibration, and this edgepool reads "
                f"version {VERSION}: run `edgepool calibrate` on {bundle.path} again"
            )
        if record["model"] != model_digest(bundle):
            raise BadInput(
                f"{path}: made for another model than {bundle.path}: "
                "run `edgepool calibrate` on this bundle"
            )
        found = Calibration(
            model=record["model"],
            method=record["method"],
            data=dict(record["data"]),
            sample=[np.array(ids, np.int32).reshape(-1) for ids in record["sample"]],
            held_out=np.array(record["held_out"], np.int32).reshape(-1),
            tensors={name: _tensor(value) for name, value in record["tensors"].items()},
            digest=hashlib.sha256(text.encode()).hexdigest(),
        )
    except OSError as error:
        raise BadInput(f"{path}: {(error.strerror or str(error)).lower()}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise BadInput(f"{path}: not a calibration, or a damaged one: calibrate again") from error
    if found.method not in METHODS:
        raise BadInput(f"{path}: unknown method {found.method!r}: calibrate again")
    tokens = np.concatenate([found.held_out, *found.sample])
    if not found.sample or ((tokens < 0) | (tokens >= bundle.config.vocab_size)).any():
        raise BadInput(
            f"{path}: it holds no sample, or tokens that the model does not have: calibrate again"
        )
    return found


def _tensor(value: dict[str, Any]) -> Tensor:
    channels, squares = (
        np.array(value[name], np.float32).reshape(-1) for name in ("channels", "mean_squares")
    )
    threshold = None if value["threshold"] is None else float(value["threshold"])
    lowest, highest = float(value["lowest"]), float(value["highest"])
    sums = (lowest, highest, threshold or 0.0, float(channels.sum()), float(squares.sum()))
    if not all(map(math.isfinite, sums)) or min(channels.min(), squares.min()) < 0:
        raise ValueError("a range that is none")
    if len(channels) != len(squares):
        raise ValueError("channels that have no mean square")
    return Tensor(lowest, highest, channels, squares, threshold)


def with_digest(calibration: Calibration) -> Calibration:
    digest = hashlib.sha256(calibration.to_json().encode()).hexdigest()
    return dataclasses.replace(calibration, digest=digest)
