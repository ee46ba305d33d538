"""`model.pt`: configuration, weights and tokenizer in one file, read without executing anything.

    torch.save({"format": "edgepool", "version": 1, "config": {...}, "state_dict": {...},
                "tokenizer": "<text of tokenizer.json>" or None}, path)

`weight_shapes(config)` names the tensors; each is float32, float16 or bfloat16.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Union

import torch
from torch import Tensor

from ..config import ModelConfig, weight_shapes
from ..errors import BadInput
from ..files import sha256
from ..progress import Report, silent
from .archive import write_archive
from .weights import Weight, check_finite, check_weights

FORMAT, VERSION = "edgepool", 1
KEYS = ("format", "version", "config", "state_dict", "tokenizer")

ZIP = b"PK\3\4"
# What torch raises for an archive that it cannot take apart.
DAMAGE = (RuntimeError, EOFError, LookupError, ValueError, TypeError, AttributeError, OSError)


@dataclass(frozen=True)
class Checkpoint:
    """A model read from `path`; weights are mapped from the file and have the stored dtype."""

    path: Path
    config: ModelConfig
    weights: Mapping[str, Tensor]
    tokenizer: Optional[str]

    @functools.cached_property
    def source(self) -> str:
        """SHA-256 of the file, in hex. Reads the whole file on first use."""
        return sha256(self.path)


def load(path: Union[str, Path], check_values: bool = True) -> Checkpoint:
    """Read a `model.pt`.

    check_values=False leaves out the search for NaN and Inf, which reads every byte.
    Raises BadInput, naming the fault, for any file that `save` would not have written.
    """
    path = Path(path)
    record = _read(path)
    try:
        config = ModelConfig.from_dict(record["config"])
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error
    weights = _state_dict(path, record["state_dict"])
    check_weights(path, weights, weight_shapes(config))
    if check_values:
        for name, tensor in weights.items():
            check_finite(path, name, tensor)
    check_tokenizer(path, record["tokenizer"], config.vocab_size)
    return Checkpoint(path, config, weights, record["tokenizer"])


def save(
    path: Union[str, Path],
    config: ModelConfig,
    weights: Mapping[str, Weight],
    tokenizer: Optional[str],
    origin: Optional[object] = None,
    report: Report = silent,
) -> None:
    """Write a `model.pt`, one tensor at a time, in the dtype of each weight.

    Equal input gives equal bytes; `path` is replaced only once the whole file is on disk. Errors
    about the content name `origin`, where the weights come from, if it is given.
    Raises BadInput for weights or a tokenizer that do not fit the configuration, for NaN and Inf,
    and for a full disk or a folder that cannot be written.
    """
    path, origin = Path(path), origin or path
    shapes = weight_shapes(config)
    check_weights(origin, weights, shapes)
    check_tokenizer(origin, tokenizer, config.vocab_size)
    record = {"format": FORMAT, "version": VERSION, "config": config.to_dict()}
    ordered = {name: weights[name] for name in shapes}
    write_archive(path, {**record, "tokenizer": tokenizer}, ordered, origin, report)


def check_tokenizer(where: object, text: Optional[str], vocab_size: int) -> None:
    """Raise BadInput unless `text` is a tokenizer.json whose ids are all below vocab_size."""
    if text is None:
        return
    size = tokenizer_size(where, text)
    if size > vocab_size:
        raise BadInput(
            f"{where}: the tokenizer has ids up to {size - 1}, the model's vocabulary ends at "
            f"{vocab_size - 1}: they do not belong together"
        )


def tokenizer_size(where: object, text: str) -> int:
    """One more than the highest id of a tokenizer.json; raises BadInput if it cannot be read."""
    from tokenizers import Tokenizer

    try:
        json.loads(text)  # names the place of a fault; the next line only says that there is one
        vocabulary = Tokenizer.from_str(text).get_vocab(with_added_tokens=True)
    except Exception as error:  # the base class is what tokenizers raises
        raise BadInput(f"{where}: the tokenizer cannot be read: {error}") from error
    return max(vocabulary.values(), default=-1) + 1


def _read(path: Path) -> dict[str, Any]:
    """The dictionary in the file, its keys, format and version checked."""
    if path.is_dir():
        raise BadInput(f"{path}: is a folder; `edgepool import {path}` makes a model.pt of one")
    if not path.exists():
        raise BadInput(f"{path}: no such file")
    if not os.access(path, os.R_OK):
        raise BadInput(f"{path}: cannot be read: permission denied")
    if path.stat().st_size == 0:
        raise BadInput(f"{path}: the file is empty")
    try:
        with path.open("rb") as stream, zipfile.ZipFile(stream) as archive:
            names = archive.namelist()
            stream.seek(0)
            if stream.read(len(ZIP)) != ZIP:  # what a tar that holds a zip file does not begin with
                raise zipfile.BadZipFile
    except (zipfile.BadZipFile, *DAMAGE) as error:
        raise BadInput(
            f"{path}: not a model.pt: it is truncated or another kind of file "
            "(`edgepool import` reads GGUF and Hugging Face folders)"
        ) from error
    if any(name.endswith("/constants.pkl") for name in names):
        raise BadInput(f"{path}: a TorchScript module, which is never executed")
    try:
        record = torch.load(str(path), weights_only=True, mmap=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        raise BadInput(
            f"{path}: holds pickled Python objects, which are never executed; "
            "save its state_dict with edgepool.checkpoint.save"
        ) from error
    except DAMAGE as error:
        raise BadInput(f"{path}: damaged: {_first_line(error)}") from error
    if not isinstance(record, dict) or "format" not in record:
        raise BadInput(f"{path}: not an edgepool checkpoint; `edgepool import` or `init` makes one")
    if record["format"] != FORMAT:
        raise BadInput(f"{path}: unknown format {record['format']!r}; expected {FORMAT!r}")
    if record.get("version") != VERSION:
        raise BadInput(
            f"{path}: version {record.get('version')!r} of the format; "
            f"this edgepool reads version {VERSION}"
        )
    for key in KEYS:
        if key not in record:
            raise BadInput(f"{path}: key '{key}' is missing")
    for key in record:
        if key not in KEYS:
            raise BadInput(f"{path}: unknown key {key!r}")
    if not isinstance(record["tokenizer"], (str, type(None))):
        raise BadInput(f"{path}: 'tokenizer' is not the text of a tokenizer.json")
    return record


def _state_dict(path: Path, value: Any) -> dict[str, Tensor]:
    if not isinstance(value, dict):
        raise BadInput(f"{path}: 'state_dict' is not a dictionary of tensors")
    for name, tensor in value.items():
        plain = (
            isinstance(tensor, Tensor)
            and tensor.layout == torch.strided
            and tensor.device.type == "cpu"
        )
        if not (isinstance(name, str) and plain):
            raise BadInput(f"{path}: state_dict entry {name!r} is not a plain tensor")
        if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
            raise BadInput(f"{path}: tensor {name!r} repeats fewer values than its shape has")
    return {name: tensor.detach() for name, tensor in value.items()}


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
